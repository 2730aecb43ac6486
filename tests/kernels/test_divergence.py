"""Divergences, reference and Triton alike, against the formulas in float64 with PyTorch's own derivative.

Tolerances, by relative norm: float32 1e-5, which is a hundred roundings (6e-8) of sums over a vocabulary
and leaves no room for a wrong term; bf16 and fp16 1e-2 for the gradient, since storing one in bf16 alone
costs up to 4e-3 an entry (twice that in Triton's interpreter, which truncates), and 1e-5 for the loss,
which is float32 throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moedraft import kernels
from moedraft.kernels import autograd, reference_divergence

KINDS = ["fkl", "rkl", "jsd", "tvd"]
NEG = float("-inf")
NUMPY = pytest.mark.filterwarnings(
    "ignore:invalid value|divide by zero|overflow:RuntimeWarning"
)  # the interpreter


def plain(student: Tensor, teacher: Tensor, kind: str, beta: float) -> Tensor:
    """The definitions over probabilities [..., n], derived by autograd; sound where nothing is excluded."""
    s, t = student, teacher
    if kind == "tvd":
        return (s - t).abs().sum(-1) / 2
    if kind == "fkl":
        return (t * (t.log() - s.log())).sum(-1)
    if kind == "rkl":
        return (s * (s.log() - t.log())).sum(-1)
    m = beta * t + (1 - beta) * s
    return beta * (t * (t.log() - m.log())).sum(-1) + (1 - beta) * (s * (s.log() - m.log())).sum(-1)


def plain_buckets(student: Tensor, ids: Tensor, logprobs: Tensor, kind: str, beta: float) -> Tensor:
    s, t = student.gather(-1, ids), logprobs.exp()
    s = torch.cat((s, 1 - s.sum(-1, keepdim=True)), -1)
    return plain(s, torch.cat((t, 1 - t.sum(-1, keepdim=True)), -1), kind, beta)


def logits(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype).to(device)


def topk(teacher: Tensor, k: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Top-k in no particular order."""
    logprobs = torch.log_softmax(teacher.double() / temperature, -1)
    ids = logprobs.topk(k).indices[..., torch.randperm(k, generator=torch.Generator().manual_seed(0))]
    return ids, logprobs.gather(-1, ids)


def difference(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("from_topk", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradient_match_the_formulas(
    kind: str, dtype: torch.dtype, from_topk: bool, backend: str, device: str
) -> None:
    for vocab in (127, 1000, 4097) if dtype == torch.float32 else (1000,):
        beta, temperature = 0.3, 1.5
        student, teacher = logits((3, vocab), dtype, device, 1), logits((3, vocab), dtype, device, 2)
        exact = student.double().requires_grad_()
        probs = torch.softmax(exact / temperature, -1)
        inputs: dict[str, Any]
        if from_topk:
            ids, logprobs = topk(teacher, 7, temperature)
            expected = plain_buckets(probs, ids, logprobs, kind, beta)
            inputs = {"teacher_topk": (ids, logprobs.float())}
        else:
            expected = plain(probs, torch.softmax(teacher.double() / temperature, -1), kind, beta)
            inputs = {"teacher_logits": teacher}
        upstream = torch.tensor([0.5, 2.0, 1.25], device=device)
        expected.backward(upstream.double())
        given = student.clone().requires_grad_()
        loss = kernels.divergence(
            given, **inputs, kind=kind, beta=beta, temperature=temperature, reduction="none", backend=backend
        )
        loss.backward(upstream)
        assert loss.dtype == torch.float32
        assert given.grad is not None
        assert given.grad.dtype == dtype
        assert difference(loss, expected) < 1e-5
        assert exact.grad is not None
        assert difference(given.grad, exact.grad) < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_passes_gradcheck(kind: str) -> None:
    student = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(3, 7, dtype=torch.float64)
    mask = torch.tensor([1, 0, 1])
    ids, logprobs = topk(teacher, 3)
    for inputs in ({"teacher_logits": teacher}, {"teacher_topk": (ids, logprobs)}):
        for reduction in ("none", "mean"):
            options: dict[str, Any] = {"kind": kind, "beta": 0.2, "temperature": 0.7, "mask": mask, **inputs}
            assert torch.autograd.gradcheck(
                lambda x, o=options, r=reduction: kernels.divergence(x, **o, reduction=r), (student,)
            )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_reductions_respect_the_mask(reduction: str, backend: str, device: str) -> None:
    student, teacher = (
        logits((2, 3, 40), torch.float32, device, 1),
        logits((2, 3, 40), torch.float32, device, 2),
    )
    mask = torch.tensor([[True, False, True], [True, True, False]], device=device)
    clean = student.clone().requires_grad_()
    rows = plain(torch.softmax(clean, -1), torch.softmax(teacher, -1), "fkl", 0.5) * mask
    expected = {"mean": rows.sum() / 4, "sum": rows.sum(), "none": rows}[reduction]
    expected.sum().backward()
    student[~mask], teacher[0, 1, 3] = float("nan"), float("inf")  # what is masked may hold anything
    given = student.clone().requires_grad_()
    loss = kernels.divergence(given, teacher, mask=mask, reduction=reduction, backend=backend)
    loss.sum().backward()
    assert loss.shape == expected.shape
    assert torch.allclose(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    assert given.grad is not None
    assert bool((given.grad[~mask] == 0).all())
    assert difference(given.grad, clean.grad) < 1e-5  # type: ignore[arg-type]


def test_a_mask_of_nothing_gives_zero(backend: str, device: str) -> None:
    given = logits((2, 40), torch.float32, device, 1).requires_grad_()
    loss = kernels.divergence(given, given.detach(), mask=torch.zeros(2, device=device), backend=backend)
    loss.backward()
    assert loss.item() == 0
    assert given.grad is not None
    assert not given.grad.any()


@NUMPY
@pytest.mark.parametrize("kind", KINDS)
def test_what_both_exclude_costs_nothing(kind: str, backend: str, device: str) -> None:
    """0·(−inf) = 0: the same as if the excluded tokens were not in the vocabulary."""
    student, teacher = logits((2, 600), torch.float32, device, 1), logits((2, 600), torch.float32, device, 2)
    student[:, 300:580], teacher[:, 300:580] = NEG, NEG  # whole blocks of the fused kernel among them
    keep = torch.ones(600, dtype=torch.bool, device=device)
    keep[300:580] = False
    results = []
    for s, t in ((student, teacher), (student[:, keep], teacher[:, keep])):
        given = s.clone().requires_grad_()
        loss = kernels.divergence(given, t, kind=kind, reduction="none", backend=backend)
        loss.sum().backward()
        assert given.grad is not None
        results.append((loss.detach(), given.grad))
    assert torch.allclose(results[0][0], results[1][0], rtol=1e-5)
    assert difference(results[0][1][:, keep], results[1][1]) < 1e-5
    assert not results[0][1][:, ~keep].any()


@NUMPY
@pytest.mark.parametrize("kind", KINDS)
def test_one_sided_exclusion_costs_what_it_must(kind: str, backend: str, device: str) -> None:
    """The teacher's filter is fine for fkl, the student's for rkl; the other way round the loss is +inf."""
    student, teacher = logits((2, 300), torch.float32, device, 1), logits((2, 300), torch.float32, device, 2)
    student[0, 5], teacher[1, 270] = NEG, NEG
    given = student.clone().requires_grad_()
    loss = kernels.divergence(given, teacher, kind=kind, reduction="none", backend=backend)
    loss.sum().backward()
    endless = {"fkl": [True, False], "rkl": [False, True]}.get(kind, [False, False])
    assert loss.isposinf().tolist() == endless
    assert not loss.isnan().any()
    assert given.grad is not None
    assert bool(given.grad.isfinite().all())
    expected = torch.softmax(student, -1) - torch.softmax(teacher, -1)
    if kind == "fkl":
        assert difference(given.grad, expected) < 1e-5
    if kind == "rkl":
        assert not given.grad[1].any()
        assert given.grad[0].any()


@NUMPY
@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_shows_in_the_loss(kind: str, backend: str, device: str) -> None:
    student, teacher = logits((3, 300), torch.float32, device, 1), logits((3, 300), torch.float32, device, 2)
    student[0, 280], teacher[1, 3] = float("nan"), float("nan")
    loss = kernels.divergence(student, teacher, kind=kind, reduction="none", backend=backend)
    assert loss.isnan().tolist() == [True, True, False]


def test_rising_maxima_lose_no_precision(backend: str, device: str) -> None:
    """A ramp shifts the running maximum with every block; without the correction the loss is far off."""
    ramp = torch.linspace(-60, 60, 9000, device=device)
    student = ramp + logits((2, 9000), torch.float32, device, 1)
    teacher = 0.9 * ramp.flip(0) + logits((2, 9000), torch.float32, device, 2)
    exact = [torch.softmax(x.double(), -1) for x in (student, teacher)]
    for kind in ("fkl", "rkl"):
        loss = kernels.divergence(student, teacher, kind=kind, reduction="none", backend=backend)
        assert difference(loss, plain(*exact, kind, 0.5)) < 1e-5
    # the control: sums taken block by block against the block's own maximum, never brought to one scale
    s, t = student.double().split(4096, -1), teacher.double().split(4096, -1)
    unshifted = sum((torch.softmax(b, -1) * (b - a)).sum(-1) for a, b in zip(s, t, strict=True)) / len(s)
    unshifted = unshifted - teacher.double().logsumexp(-1) + student.double().logsumexp(-1)
    assert difference(unshifted, plain(*exact, "fkl", 0.5)) > 0.1


@NUMPY
@pytest.mark.parametrize("kind", KINDS)
def test_topk_ignores_padding_and_may_be_all(kind: str, backend: str, device: str) -> None:
    student, teacher = logits((3, 300), torch.float32, device, 1), logits((3, 300), torch.float32, device, 2)
    ids, logprobs = topk(teacher, 6)
    padded_ids = torch.cat((ids, torch.full_like(ids, -1)), 1)[:, [0, 9, 1, 2, 8, 3, 4, 5, 11]]
    padded_logs = torch.cat((logprobs, torch.full_like(logprobs, NEG)), 1)[:, [0, 9, 1, 2, 8, 3, 4, 5, 11]]
    empty_ids, empty_logs = padded_ids.clone(), padded_logs.clone()
    empty_ids[1], empty_logs[1] = -1, NEG
    results = []
    for pair in ((ids, logprobs), (padded_ids, padded_logs), (empty_ids, empty_logs), topk(teacher, 300)):
        given = student.clone().requires_grad_()
        loss = kernels.divergence(given, teacher_topk=pair, kind=kind, reduction="none", backend=backend)
        loss.sum().backward()
        results.append((loss.detach(), given.grad))
    assert torch.allclose(results[1][0], results[0][0], rtol=1e-6)
    assert difference(results[1][1], results[0][1]) < 1e-6  # type: ignore[arg-type]
    assert results[2][0][1] == 0  # nothing is known of that row's teacher: as if masked
    assert not results[2][1][1].any()  # type: ignore[index]
    full = student.clone().requires_grad_()
    loss = kernels.divergence(full, teacher, kind=kind, reduction="none", backend=backend)
    loss.sum().backward()
    assert torch.allclose(results[3][0], loss.detach(), rtol=1e-4, atol=1e-5)
    assert difference(results[3][1], full.grad) < 1e-4  # type: ignore[arg-type]


def test_a_tiny_tail_survives_cancellation(backend: str, device: str) -> None:
    student = logits((2, 1000), torch.float32, device, 1) * 0.1
    student[:, 0] = 25.0
    ids = torch.zeros(2, 1, dtype=torch.int64, device=device)
    logprobs = torch.full((2, 1), 0.5, device=device).log()
    exact = student.double().requires_grad_()
    tail = torch.logsumexp(exact[:, 1:], -1) - torch.logsumexp(exact, -1)
    head = exact[:, 0] - torch.logsumexp(exact, -1)
    expected = 0.5 * (0.5 * torch.ones_like(head)).log() * 2 - 0.5 * head - 0.5 * tail
    expected.sum().backward()
    given = student.clone().requires_grad_()
    loss = kernels.divergence(given, teacher_topk=(ids, logprobs), reduction="none", backend=backend)
    loss.sum().backward()
    assert difference(loss, expected) < 1e-6
    assert difference(given.grad, exact.grad) < 1e-5  # type: ignore[arg-type]
    probs = torch.softmax(student, -1)
    assert difference((1 - probs[:, 0]).log(), tail) > 1e-4  # 1 − Σ in float32 would be this far off


def test_strided_inputs_give_the_same(backend: str, device: str) -> None:
    student, teacher = logits((3, 50), torch.float32, device, 1), logits((3, 50), torch.float32, device, 2)
    expected = kernels.divergence(student, teacher, kind="jsd", backend=backend)
    store = torch.zeros(3, 120, device=device)
    store[:, 1:101:2] = student
    turned = teacher.t().contiguous().t()
    given = store[:, 1:101:2].requires_grad_()
    loss = kernels.divergence(given, turned, kind="jsd", backend=backend)
    loss.backward()
    assert torch.equal(loss, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_in_place_gradient_is_the_gradient(
    kind: str, dtype: torch.dtype, backend: str, device: str
) -> None:
    hidden = logits((3, 8), dtype, device, 1).requires_grad_()
    head, teacher = logits((300, 8), dtype, device, 3), logits((3, 300), dtype, device, 2)
    grads = []
    for inplace in (False, True):
        student = hidden @ head.t()
        student.retain_grad()
        loss = kernels.divergence(student, teacher, kind=kind, inplace_grad=inplace, backend=backend)
        (loss * 0.5).backward()
        assert student.grad is not None
        grads.append(student.grad)
    assert torch.equal(*grads)
    assert torch.equal(student.detach(), grads[1])  # where the logits were


def test_autograd_notices_the_in_place_gradient(backend: str, device: str) -> None:
    base = logits((2, 40), torch.float32, device, 1).requires_grad_()
    student = torch.tanh(base)  # keeps its own output for the backward pass
    loss = kernels.divergence(student, base.detach(), inplace_grad=True, backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_in_place_gradient_allows_one_backward(backend: str, device: str) -> None:
    student, teacher = logits((2, 40), torch.float32, device, 1), logits((2, 40), torch.float32, device, 2)
    loss = kernels.divergence(student.requires_grad_(), teacher, inplace_grad=True, backend=backend)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="call divergence again"):
        loss.backward()


def test_a_double_backward_raises(backend: str, device: str) -> None:
    student = logits((2, 40), torch.float32, device, 1).requires_grad_()
    loss = kernels.divergence(student, student.detach() * 2, backend=backend)
    (grad,) = torch.autograd.grad(loss, student, create_graph=True)
    with pytest.raises(RuntimeError, match="not twice"):
        (loss + grad.square().sum()).backward()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "share",
    [
        lambda base: base[:1].expand(3, -1),  # rows
        lambda base: base[:1].expand(2, 3, -1),
        lambda base: base[:, :1].expand(-1, 40),  # a row's entries
        lambda base: base[0].unfold(0, 20, 4),  # rows that begin in one another
    ],
)
def test_logits_that_share_memory_cannot_be_overwritten(
    share: Callable[[Tensor], Tensor], grad: bool, backend: str, device: str
) -> None:
    student = share(logits((2, 40), torch.float32, device, 1).requires_grad_(grad))
    teacher = logits(tuple(student.shape), torch.float32, device, 2)
    with pytest.raises(ValueError, match="inplace_grad needs logits whose entries each have their own place"):
        kernels.divergence(student, teacher, inplace_grad=True, backend=backend)
    kernels.divergence(student, teacher, backend=backend)


@pytest.mark.parametrize(
    "part",
    [
        lambda base: base[:, ::2],
        lambda base: base[1:].t(),
        lambda base: base[:, None, :1].expand(-1, 1, -1),
        lambda base: base[:0],
        lambda base: base.expand(1, -1, -1),
    ],
)
def test_control_other_views_are_overwritten(part: Callable[[Tensor], Tensor], device: str) -> None:
    student = part(logits((3, 40), torch.float32, device, 1)).requires_grad_()
    teacher = logits(tuple(student.shape), torch.float32, device, 2)
    loss = kernels.divergence(student, teacher, inplace_grad=True)
    (grad,) = torch.autograd.grad(loss, student)
    assert torch.equal(student.detach(), grad)


def test_without_gradient_nothing_is_overwritten(backend: str, device: str) -> None:
    student, teacher = logits((2, 40), torch.float32, device, 1), logits((2, 40), torch.float32, device, 2)
    before = student.clone()
    loss = kernels.divergence(student, teacher, inplace_grad=True, backend=backend)
    assert not loss.requires_grad
    assert torch.equal(student, before)


@pytest.mark.parametrize("from_topk", [False, True])
def test_compiles_as_one_graph(from_topk: bool, device: str) -> None:
    student, teacher = logits((3, 60), torch.float32, device, 1), logits((3, 60), torch.float32, device, 2)
    ids, logprobs = topk(teacher, 5)
    mask = torch.tensor([1, 1, 0], device=device)

    def learn(x: Tensor) -> Tensor:
        if from_topk:
            return kernels.divergence(x * 1.5, teacher_topk=(ids, logprobs.float()), kind="rkl", mask=mask)
        return kernels.divergence(x * 1.5, teacher, kind="jsd", mask=mask, temperature=2.0)

    results = []
    for function in (learn, torch.compile(learn, fullgraph=True, backend="aot_eager")):
        given = student.clone().requires_grad_()
        loss = function(given)
        loss.backward()
        results.append((loss.detach(), given.grad))
    assert torch.allclose(results[0][0], results[1][0])
    assert torch.allclose(results[0][1], results[1][1])  # type: ignore[arg-type]


def test_the_custom_op_passes_opcheck() -> None:
    student, teacher = torch.randn(3, 20, requires_grad=True), torch.randn(3, 20)
    arguments = (student, teacher, None, None, torch.ones(3), "fkl", 0.5, 1.0, True, "reference")
    torch.library.opcheck(torch.ops.moedraft.divergence.default, arguments)
    loss, _, _ = torch.ops.moedraft.divergence(*arguments)
    (grad,) = torch.autograd.grad(loss, student, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()


def test_only_the_fused_path_ran(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the reference ran")

    monkeypatch.setattr(reference_divergence, "divergence_rows", refuse)
    student = logits((2, 40), torch.float32, device, 1).requires_grad_()
    kernels.divergence(student, student.detach(), backend="triton").backward()
    with pytest.raises(AssertionError, match="the reference ran"):
        kernels.divergence(student, student.detach(), backend="reference")
    assert autograd.reference_divergence is reference_divergence


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher_logits": None}, "either"),
        ({"kind": "kl"}, "kind"),
        ({"reduction": "batchmean"}, "reduction"),
        ({"kind": "jsd", "beta": 1.0}, "beta"),
        ({"temperature": 0.0}, "temperature"),
        ({"teacher_logits": torch.zeros(2, 7)}, "shaped"),
        ({"mask": torch.ones(3)}, "mask"),
        ({"teacher_logits": None, "teacher_topk": (torch.zeros(2, 3), torch.zeros(2, 4))}, "teacher_topk"),
        ({"teacher_logits": None, "teacher_topk": (torch.zeros(2, 3), torch.zeros(2, 3))}, "int64 ids"),
        (
            {"teacher_logits": None, "teacher_topk": (torch.zeros(2, 3).int(), torch.zeros(2, 3))},
            r"int64 ids .* not torch\.int32",
        ),
        ({"teacher_logits": torch.zeros(2, 8, dtype=torch.int64)}, "teacher_logits must be floating"),
        ({"teacher_logits": torch.zeros(2, 8, device="meta")}, "teacher_logits must be where"),
        ({"student_logits": torch.zeros(2, 8, dtype=torch.int64)}, "floating"),
    ],
)
def test_bad_arguments_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"student_logits": torch.zeros(2, 8), "teacher_logits": torch.zeros(2, 8)}
    with pytest.raises(ValueError, match=message):
        kernels.divergence(**{**arguments, **changes})
