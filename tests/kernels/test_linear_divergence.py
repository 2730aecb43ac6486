"""The output layer and a divergence in one: losses and gradients of the plain way, block by block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from moedraft import kernels
from moedraft.kernels import linear
from moedraft.kernels.linear import rows_per_block

KINDS = ["fkl", "rkl", "jsd", "tvd"]
ROWS, WIDTH, VOCAB, RANK = 11, 6, 33, 3


def made(dtype: torch.dtype = torch.float64, device: str = "cpu") -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(0)
    shapes = {"hidden": (ROWS, WIDTH), "weight": (VOCAB, WIDTH), "bias": (VOCAB,)}
    shapes |= {"a": (RANK, WIDTH), "b": (VOCAB, RANK), "teacher": (ROWS, VOCAB)}
    return {
        name: torch.randn(shape, generator=gen, dtype=torch.float64).to(device, dtype).requires_grad_()
        for name, shape in shapes.items()
    }


def top(teacher: Tensor, k: int = 5) -> tuple[Tensor, Tensor]:
    found = teacher.detach().log_softmax(-1).topk(k, dim=-1)
    ids, logprobs = found.indices, found.values
    ids[0, 3:], logprobs[0, 3:] = -1, -torch.inf
    ids[1], logprobs[1] = -1, -torch.inf
    return ids, logprobs


def plain(parts: dict[str, Tensor], **how: Any) -> Tensor:
    logits = parts["hidden"] @ parts["weight"].T + parts["bias"]
    return kernels.divergence(logits + parts["hidden"] @ parts["a"].T @ parts["b"].T, **how)


def blocked(parts: dict[str, Tensor], **how: Any) -> Tensor:
    layer = {"bias": parts["bias"], "lora": (parts["a"], parts["b"]), "block_rows": 4}
    return kernels.linear_divergence(parts["hidden"], parts["weight"], **{**layer, **how})


def gradients(parts: dict[str, Tensor], loss: Tensor) -> list[Tensor]:
    names = ["hidden", "weight", "bias", "a", "b"]
    weights = torch.arange(1, loss.numel() + 1, device=loss.device, dtype=loss.dtype).reshape(loss.shape)
    return list(torch.autograd.grad((loss * weights).sum(), [parts[name] for name in names]))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("teacher", ["dense", "topk"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_plain_ways_loss_and_gradients(kind: str, teacher: str, reduction: str, device: str) -> None:
    parts = made(device=device)
    how: dict[str, Any] = {"kind": kind, "reduction": reduction, "temperature": 1.4, "backend": "reference"}
    how["mask"] = torch.arange(ROWS, device=device) % 4 != 2
    if teacher == "dense":
        how["teacher_logits"] = parts["teacher"]
    else:
        how["teacher_topk"] = top(parts["teacher"])
    wanted, found = plain(parts, **how), blocked(parts, **how)
    assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-14)
    for one, other in zip(gradients(parts, found), gradients(parts, wanted), strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("kind", ["fkl", "rkl", "jsd"])  # tvd has kinks, where differences say nothing
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradcheck(kind: str, reduction: str) -> None:
    parts = made()
    teacher = parts.pop("teacher").detach()

    def loss(*values: Tensor) -> Tensor:
        given = dict(zip(parts, values, strict=True))
        return blocked(given, teacher_logits=teacher, kind=kind, reduction=reduction)

    assert torch.autograd.gradcheck(loss, tuple(parts.values()))


def test_the_fused_divergence_gives_the_same(device: str) -> None:
    parts = made(torch.float32, device)
    how: dict[str, Any] = {"teacher_topk": top(parts["teacher"])}
    wanted, found = blocked(parts, backend="reference", **how), blocked(parts, backend="triton", **how)
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)
    for one, other in zip(gradients(parts, found), gradients(parts, wanted), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def test_only_what_learns_gets_a_gradient(device: str) -> None:
    parts = made(torch.float32, device)
    for name in ("hidden", "weight", "bias"):
        parts[name].requires_grad_(False)
    blocked(parts, teacher_logits=parts["teacher"]).backward()  # type: ignore[no-untyped-call]
    assert [name for name, part in parts.items() if part.grad is not None] == ["a", "b"]


def test_no_logits_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = linear.block_rows

    def watched(problem: Any, *rest: Any) -> Tensor:
        seen.append(problem.student.shape[0])
        return real(problem, *rest)

    monkeypatch.setattr(linear, "block_rows", watched)
    parts = made()
    blocked(parts, teacher_logits=parts["teacher"])
    assert seen == [4, 4, 3]
    assert rows_per_block(torch.empty(1, 1), 50_000) == 167
    assert rows_per_block(torch.empty(1, 1), 10**7) == 16


def test_autocast_computes_in_its_type(device: str) -> None:
    parts = made(torch.float32, device)
    with torch.autocast(device, torch.bfloat16):
        rough = blocked(parts, teacher_logits=parts["teacher"])
        rows = blocked(parts, teacher_logits=parts["teacher"], reduction="none")
    assert all(part.dtype == torch.float32 for part in torch.autograd.grad(rows.mean(), [parts["hidden"]]))
    exact = blocked(parts, teacher_logits=parts["teacher"])
    assert rough.dtype == torch.float32
    assert 0 < abs(rough.item() - exact.item()) < 0.02 * exact.item()
    for one, other in zip(gradients(parts, rough), gradients(parts, exact), strict=True):
        assert one.dtype == other.dtype
        assert float((one - other).norm() / other.norm()) < 0.05


@pytest.mark.parametrize("autocast", [False, True])
def test_float16_with_a_scaler_keeps_small_gradients(autocast: bool, device: str) -> None:
    """Also where only the products are in float16, by autocast."""
    gen = torch.Generator().manual_seed(1)
    kept = torch.float32 if autocast else torch.float16
    hidden = torch.randn(4096, 16, generator=gen).half().to(device, kept).requires_grad_()
    weight = torch.randn(64, 16, generator=gen).half().to(device, kept)
    teacher = (hidden.detach().float().cpu() @ weight.float().cpu().T) * 0.9
    exact = hidden.detach().double().requires_grad_()
    with torch.autocast(device, torch.float16, enabled=autocast):
        loss = kernels.linear_divergence(hidden, weight, teacher_logits=teacher.half().to(device))
    (loss * 65536).backward()
    kernels.linear_divergence(
        exact, weight.double(), teacher_logits=teacher.half().double().to(device), backend="reference"
    ).backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    assert exact.grad is not None
    found = hidden.grad.double() / 65536
    assert float((found - exact.grad).norm() / exact.grad.norm()) < 2e-2


def test_it_is_differentiable_once_and_as_often_as_one_likes() -> None:
    parts = made()
    loss = blocked(parts, teacher_logits=parts["teacher"])
    (grad,) = torch.autograd.grad(loss, parts["hidden"], create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()
    (again,) = torch.autograd.grad(loss, parts["hidden"])
    assert torch.allclose(again, grad, rtol=1e-12)


@pytest.mark.parametrize("changed", ["hidden", "weight", "bias", "a", "b", "teacher", "ids", "logprobs"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_what_was_changed_before_the_logits_are_computed_again_is_noticed(
    reduction: str, changed: str, device: str
) -> None:
    """Rows' losses, and a second backward, would have the gradient of what is there now."""
    parts = made(torch.float32, device)
    ids, logprobs = top(parts["teacher"])
    given: dict[str, Any] = {"teacher_logits": parts["teacher"]}
    if changed in ("ids", "logprobs"):
        given = {"teacher_topk": (ids, logprobs)}
    loss = blocked(parts, reduction=reduction, **given)
    if reduction == "mean":
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        {**parts, "ids": ids, "logprobs": logprobs}[changed].mul_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()


def test_a_scalar_loss_has_its_gradients_already(device: str) -> None:
    """The first backward reads nothing again, so that a step of an optimiser before it changes nothing."""
    parts = made(torch.float32, device)
    wanted = gradients(parts, blocked(parts, teacher_logits=parts["teacher"]))
    loss = blocked(parts, teacher_logits=parts["teacher"])
    with torch.no_grad():
        parts["weight"].mul_(2)
    assert all(torch.equal(*pair) for pair in zip(gradients(parts, loss), wanted, strict=True))


def test_a_second_backward_asks_for_the_graph_to_be_kept(device: str) -> None:
    parts = made(torch.float32, device)
    loss = blocked(parts, teacher_logits=parts["teacher"])
    loss.backward()  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()  # type: ignore[no-untyped-call]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's own: it looks at what it hands over
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_compiled_caller_gets_the_same(reduction: str, backend: str, device: str) -> None:
    """And is compiled in two pieces, before the call and after it, however many rows and blocks there are."""
    parts, counter = made(torch.float32, device), CompileCounterWithBackend(backend)

    def learn(hidden: Tensor, teacher: Tensor) -> Tensor:
        layer: dict[str, Any] = {"bias": parts["bias"], "lora": (parts["a"], parts["b"]), "block_rows": 4}
        how: dict[str, Any] = {"teacher_logits": teacher, "reduction": reduction}
        return 3 * kernels.linear_divergence(hidden * 2, parts["weight"], **layer, **how)

    torch._dynamo.reset()
    compiled, graphs = torch.compile(learn, backend=counter), []
    for rows in (11, 7, 9, 5, 10):
        hidden, teacher = (parts[name].detach()[:rows] for name in ("hidden", "teacher"))
        hidden.requires_grad_()
        wanted, found = learn(hidden, teacher), compiled(hidden, teacher)
        assert torch.equal(found, wanted)
        ours, theirs = (gradients({**parts, "hidden": hidden}, loss) for loss in (found, wanted))
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
        graphs.append(counter.frame_count)
    assert graphs[0] == 2
    assert graphs[1] <= 4  # once more for any number of rows
    assert graphs[1:] == [graphs[1]] * 4


def test_a_caller_that_must_be_one_graph_is_refused() -> None:
    parts = made()
    compiled = torch.compile(blocked, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="loop over blocks"):
        compiled(parts, teacher_logits=parts["teacher"].detach())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": torch.ones(4, 5)}, "hidden"),
        ({"bias": torch.ones(3)}, "bias"),
        ({"lora": (torch.ones(2, 5), torch.ones(VOCAB, 2))}, "lora"),
        ({"bias": torch.ones(VOCAB, dtype=torch.float16)}, "one floating type"),
        ({"bias": torch.ones(VOCAB, device="meta")}, "bias must be where"),
        ({"block_rows": -1}, "block_rows must be at least 1, not -1"),
        ({"block_rows": 0}, "block_rows must be at least 1, not 0"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    given = {"hidden": torch.ones(2, WIDTH), "weight": torch.ones(VOCAB, WIDTH), **changes}
    with pytest.raises(ValueError, match=message):
        kernels.linear_divergence(teacher_logits=torch.ones(2, VOCAB), **given)
