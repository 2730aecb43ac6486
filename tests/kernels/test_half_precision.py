"""Gradients in float16 of a large vocabulary: most entries are less than float16 holds, and must not be lost.

The rows are peaked: one token has nearly all of the probability, and each of 50 000 others some 3e-9, which
float16 rounds to 0. Together they have 2e-4. A loss scaler's factor comes after the gradient is stored.
Tolerances, by relative norm over the others: 2e-2, since what is stored of them has some six bits. The one
token's gradient is compared with float32's, whose rounding it has.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moedraft import kernels
from moedraft.kernels.backends import Backend
from moedraft.kernels.linear import Layer

KINDS = ["fkl", "rkl", "jsd", "tvd"]
ROWS, VOCAB, WIDTH, RANK, PEAK = 2, 50_304, 16, 3, 7
TEMPERATURE = 1.1
FACTOR = 32768.0  # a loss scaler's
LOWEST = -65504.0  # with which some models mark what is not allowed
INTERPRETED = pytest.mark.filterwarnings("ignore:invalid value|overflow:RuntimeWarning")
LISTS = pytest.mark.parametrize("dense", [True, False], ids=["dense", "topk"])


def peaked(seed: int, device: str, top: float = 21.5) -> Tensor:
    """float16 [ROWS, VOCAB]"""
    values = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed)) * 0.5
    values[:, PEAK] = top
    return values.half().to(device)


def teacher_of(dense: bool, device: str) -> dict[str, Any]:
    """Less sure than the student; its list holds the peak and two others."""
    logits = peaked(2, device, 20.5)
    if dense:
        return {"teacher_logits": logits}
    ids = torch.tensor([[PEAK, 3, 40_000]] * ROWS, device=device)
    return {"teacher_topk": (ids, (logits.float() / TEMPERATURE).log_softmax(-1).gather(1, ids))}


def gradient(
    student: Tensor,
    teacher: dict[str, Any],
    dtype: torch.dtype = torch.float64,
    backend: Backend = "reference",
    **how: Any,
) -> Tensor:
    """Of these logits, in this type."""
    wide = student.detach().to(dtype).requires_grad_()
    given = {name: value.to(dtype) for name, value in teacher.items() if name == "teacher_logits"}
    loss = kernels.divergence(wide, **{**teacher, **given}, **how, backend=backend)
    return torch.autograd.grad(loss.sum(), wide)[0]


def away(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def others(gradient: Tensor) -> Tensor:
    return torch.cat((gradient[:, :PEAK], gradient[:, PEAK + 1 :]), 1)


@LISTS
@pytest.mark.parametrize("kind", KINDS)
def test_the_unlikely_tokens_keep_their_gradient(
    kind: str, dense: bool, backend: Backend, device: str
) -> None:
    student, teacher = peaked(1, device).requires_grad_(), teacher_of(dense, device)
    reduction = "mean" if dense else "none"
    how: dict[str, Any] = {"kind": kind, "reduction": reduction, "temperature": TEMPERATURE}
    wanted = gradient(student, teacher, **how)
    loss = kernels.divergence(student, **teacher, **how, backend=backend)
    (loss.sum() * FACTOR).backward()
    assert student.grad is not None
    assert student.grad.dtype == torch.float16
    found = student.grad.double() / FACTOR
    assert away(others(found), others(wanted)) < 2e-2
    single = gradient(student, teacher, torch.float32, backend, **how)
    assert away(found[:, PEAK], single[:, PEAK].double()) < 2e-3
    early = wanted.half()  # the control: stored as it is
    assert away(others(early), others(wanted)) > 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_they_keep_it_in_place_and_in_a_compiled_graph(kind: str, device: str) -> None:
    student, teacher = peaked(1, device), teacher_of(True, device)
    wanted = gradient(student, teacher, kind=kind, temperature=TEMPERATURE)

    def loss(given: Tensor, inplace: bool = False) -> Tensor:
        options: dict[str, Any] = {
            "kind": kind,
            "temperature": TEMPERATURE,
            "inplace_grad": inplace,
            **teacher,
        }
        return FACTOR * kernels.divergence(given * 1, **options)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for function in (loss, lambda given: loss(given, True), compiled):
        given = student.clone().requires_grad_()
        (grad,) = torch.autograd.grad(function(given), given)
        assert away(others(grad.double()) / FACTOR, others(wanted)) < 2e-2


def test_a_second_backward_has_the_same_gradient(device: str) -> None:
    student = peaked(1, device).requires_grad_()
    loss = kernels.divergence(student, **teacher_of(True, device), reduction="sum", backend="reference")
    first, second, double = (
        torch.autograd.grad(loss * factor, student, retain_graph=True)[0] for factor in (1, 1, 2)
    )
    assert torch.equal(first, second)
    assert away(double, first.double() * 2) < 1e-3


@INTERPRETED
@pytest.mark.parametrize("temperature", [0.01, 1.0, 50.0])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_overflows(kind: str, temperature: float, backend: str, device: str) -> None:
    """A student that has likely what the teacher all but excludes: no reverse KL is larger.

    Of the last row the loss is infinite, for rkl; then its gradient is zero.
    """
    noise = torch.randn(2, 4, 300, generator=torch.Generator().manual_seed(5)) * temperature
    student, teacher = noise.half().to(device)
    student[:, PEAK], teacher[:, 2] = 8.0 * temperature, 8.0 * temperature
    teacher[1, PEAK], teacher[2, PEAK], teacher[3, 100:] = LOWEST, LOWEST / 100, float("-inf")
    given: dict[str, Any] = {"teacher_logits": teacher}
    how: dict[str, Any] = {"kind": kind, "reduction": "none", "temperature": temperature}
    wanted = gradient(student, given, **how)
    limit = float(wanted.abs().amax())
    factor = min(1.0, 30_000 / limit)  # as a loss scaler finds it
    leaf = student.clone().requires_grad_()
    loss = kernels.divergence(leaf, teacher, **how, backend=backend)
    (grad,) = torch.autograd.grad(loss, leaf, torch.full_like(loss, factor))
    assert bool(grad.isfinite().all())
    for row in range(4):
        assert torch.allclose(grad[row].double(), wanted[row] * factor, rtol=3e-3, atol=1e-6)


@INTERPRETED
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_with_a_nan_leaves_the_others_alone(kind: str, backend: str, device: str) -> None:
    student, teacher = peaked(1, device, 3.0)[:, :400], peaked(2, device, 2.0)[:, :400]
    wanted = gradient(student, {"teacher_logits": teacher}, kind=kind, reduction="none")
    student[0, 9] = float("nan")
    leaf = student.clone().requires_grad_()
    loss = kernels.divergence(leaf, teacher, kind=kind, reduction="none", backend=backend)  # type: ignore[arg-type]
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    assert loss.isnan().tolist() == [True, False]
    assert away(grad[1], wanted[1]) < 2e-3


def layer_of(device: str) -> tuple[Tensor, Layer]:
    """Hidden states and a layer that make peaked logits. Only the others have a weight in the last column.

    There the hidden states are 0, so that their gradient is what the others' gradients add up to.
    """
    gen = torch.Generator().manual_seed(3)
    hidden = torch.randn(ROWS, WIDTH, generator=gen) * 0.3
    hidden[:, 0], hidden[:, -1] = 2.0, 0.0
    weight = torch.randn(VOCAB, WIDTH, generator=gen) * 0.25
    weight[:, 0], weight[:, -1] = 0.0, 1.0
    weight[PEAK], weight[PEAK, 0] = 0.0, 10.75
    lora_a, lora_b = torch.randn(RANK, WIDTH, generator=gen) * 0.1, torch.randn(VOCAB, RANK, generator=gen)
    lora_a[:, -1], lora_b[PEAK] = 0.0, 0.0
    parts = (hidden, weight, torch.zeros(VOCAB), lora_a, lora_b * 0.1)
    hidden, *layer = (part.half().to(device).requires_grad_() for part in parts)
    return hidden, Layer(*layer)


def expected(hidden: Tensor, layer: Layer, teacher: dict[str, Any], **how: Any) -> list[Tensor]:
    """The gradients of all parts, from the logits as float16 has them; their products in float64."""
    assert layer.bias is not None
    assert layer.lora_a is not None
    assert layer.lora_b is not None
    with torch.no_grad():
        low = hidden @ layer.lora_a.T
        logits = torch.addmm(hidden @ layer.weight.T, low, layer.lora_b.T) + layer.bias
    grad = gradient(logits, teacher, **how).double()
    states, weight, a, b = (part.detach().double() for part in (hidden, layer.weight, *layer[2:]))  # type: ignore[union-attr]
    back = grad @ b
    return [grad @ weight + back @ a, grad.T @ states, grad.sum(0), back.T @ states, grad.T @ low.double()]


@LISTS
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_gets_the_gradient_of_the_unlikely_tokens(kind: str, dense: bool, device: str) -> None:
    (hidden, layer), teacher = layer_of(device), teacher_of(dense, device)
    reduction = "mean" if dense else "none"
    parts = [hidden, *layer]
    how: dict[str, Any] = {"kind": kind, "reduction": reduction, "temperature": TEMPERATURE}
    wanted = expected(hidden, layer, teacher, **how)
    single = expected(hidden, layer, teacher, dtype=torch.float32, **how)
    lora = (layer.lora_a, layer.lora_b)
    loss = kernels.linear_divergence(hidden, layer.weight, bias=layer.bias, lora=lora, **teacher, **how)  # type: ignore[arg-type]
    grads = torch.autograd.grad(loss.sum() * FACTOR, parts)  # type: ignore[arg-type]
    found = [grad.double() / FACTOR for grad in grads]
    for one, other in zip(found, single, strict=True):
        assert away(one, other) < 2e-2
    assert away(found[0][:, -1], wanted[0][:, -1]) < 1e-2
    for index in (1, 2, 4):  # of these parts, a token's own rows
        mine, theirs = (torch.cat((grad[:PEAK], grad[PEAK + 1 :])) for grad in (found[index], wanted[index]))
        assert away(mine, theirs) < 2e-2


def test_a_layer_does_not_overflow(device: str) -> None:
    """Reverse KL from a teacher that all but excludes what is likely; and a scaler's factor for each row."""
    gen = torch.Generator().manual_seed(4)
    hidden, weight = (torch.randn(size, 8, generator=gen).half().to(device) for size in (40, 100))
    teacher = torch.randn(40, 100, generator=gen).half().to(device)
    teacher[3, :90] = LOWEST / 50
    upstream = torch.linspace(0, 65536.0, 40, device=device)
    for kind in ("rkl", "fkl"):
        parts = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        how: dict[str, Any] = {"teacher_logits": teacher, "kind": kind, "reduction": "none"}
        loss = kernels.linear_divergence(*parts, block_rows=16, **how)
        logits = (hidden @ weight.T).double().requires_grad_()
        wide = {**how, "teacher_logits": teacher.double()}
        exact = kernels.divergence(logits, **wide, backend="reference")
        (grad,) = torch.autograd.grad(exact, logits, upstream.double() / 2**20)
        found = torch.autograd.grad(loss, parts, upstream / 2**20)
        assert away(found[0], grad @ weight.double()) < 5e-3
        assert away(found[1], grad.T @ hidden.double()) < 5e-3
        small = torch.autograd.grad(
            kernels.linear_divergence(hidden * 1e-4, parts[1], block_rows=16, **how), parts[1], upstream
        )
        assert bool(small[0].isfinite().all())
