"""What number types do to the divergences: half precision with a gradient scaler, float64, ids outside."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moedraft import kernels
from moedraft.kernels import fused_divergence

KINDS = ["fkl", "rkl", "jsd", "tvd"]
ROWS, VOCAB, FACTOR = 4096, 64, 65536.0  # the factor that torch.amp.GradScaler begins with


@pytest.mark.parametrize("kind", KINDS)
def test_small_gradients_survive_in_float16_with_a_scaler(kind: str, device: str) -> None:
    """Most entries, divided by the number of rows, are below what float16 holds; scaled they are not."""
    gen = torch.Generator().manual_seed(0)
    student = (torch.randn(ROWS, VOCAB, generator=gen) * 2).half().to(device).requires_grad_()
    teacher = (student.detach().cpu() + 0.1 * torch.randn(ROWS, VOCAB, generator=gen)).half().to(device)
    exact = student.detach().double().requires_grad_()
    loss = kernels.divergence(student, teacher, kind=kind)  # type: ignore[arg-type]
    wanted = kernels.divergence(exact, teacher.double(), kind=kind, backend="reference")  # type: ignore[arg-type]
    value, whole = loss.item(), wanted.item()
    assert abs(value - whole) < 1e-5 * whole + 1e-9
    (loss * FACTOR).backward()
    wanted.backward()
    assert student.grad is not None
    assert exact.grad is not None
    found = student.grad.double() / FACTOR
    error = float((found - exact.grad).norm() / exact.grad.norm())
    assert error < 2e-3
    early = exact.grad.half().double()  # the control: rounded after the division, before the factor
    assert float((early - exact.grad).norm() / exact.grad.norm()) > 3 * error
    assert int((early == 0).sum()) > 2 * int((found == 0).sum())


def test_the_mean_of_float16_counts_the_rows_that_count(device: str) -> None:
    student = torch.randn(6, 20, device=device).half().requires_grad_()
    teacher = torch.randn(6, 20, device=device).half()
    mask = torch.tensor([True, False, True, True, False, True], device=device)
    loss = kernels.divergence(student, teacher, mask=mask)
    rows = kernels.divergence(student.detach(), teacher, mask=mask, reduction="none")
    assert torch.allclose(loss, rows.sum() / 4)
    loss.backward()
    assert student.grad is not None
    assert bool((student.grad[~mask] == 0).all())
    nobody = kernels.divergence(student, teacher, mask=mask & False)
    assert nobody.item() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_sum_that_is_divided_is_divided_with_its_gradient(
    dtype: torch.dtype, backend: str, device: str
) -> None:
    """So that the backward has nothing to multiply; in float16 it has, as a mean's has there."""
    gen = torch.Generator().manual_seed(3)
    values = torch.randn(6, 40, generator=gen).to(device, dtype)
    teacher = torch.randn(6, 40, generator=gen).to(device, dtype)
    mask = torch.tensor([True, False, True, True, True, True], device=device)
    ours, mean = (values.clone().requires_grad_() for _ in range(2))
    how = {"mask": mask, "kind": "jsd", "backend": backend}
    loss = kernels.divergence(ours, teacher, reduction="sum", divisor=2.5, **how)  # type: ignore[arg-type]
    wanted = 2 * kernels.divergence(mean, teacher, **how)  # type: ignore[arg-type]
    torch.testing.assert_close(loss, wanted)
    loss.backward()
    wanted.backward()
    torch.testing.assert_close(ours.grad, mean.grad)


def test_the_loss_of_a_layer_is_divided_with_its_gradients(device: str) -> None:
    hidden, weight = torch.randn(7, 5, device=device), torch.randn(30, 5, device=device)
    some = torch.randn(7, 30, device=device).log_softmax(-1).topk(4)
    topk = some.indices, some.values
    ours, theirs = ([tensor.clone().requires_grad_() for tensor in (hidden, weight)] for _ in range(2))
    loss = kernels.linear_divergence(*ours, teacher_topk=topk, reduction="sum", divisor=14.0)
    whole = kernels.linear_divergence(*theirs, teacher_topk=topk) / 2
    loss.backward()
    whole.backward()
    torch.testing.assert_close(loss, whole)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize(
    ("reduction", "divisor"), [("mean", 2.0), ("none", 2.0), ("sum", 0.0), ("sum", -1.0)]
)
def test_a_divisor_that_means_nothing_is_refused(reduction: str, divisor: float) -> None:
    logits = torch.randn(2, 8)
    with pytest.raises(ValueError, match="divisor"):
        kernels.divergence(logits, logits, reduction=reduction, divisor=divisor)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="divisor"):
        kernels.linear_divergence(
            logits, torch.randn(9, 8), teacher_logits=torch.randn(2, 9), reduction=reduction, divisor=divisor
        )  # type: ignore[arg-type]


def test_float64_logits_give_float64_whoever_computes(backend: str, device: str) -> None:
    """So that a compiled graph, which asks the op's fake, expects what it will get."""
    student = torch.randn(3, 40, dtype=torch.float64, device=device)
    loss = kernels.divergence(student, student.flip(0), reduction="none", backend=backend)  # type: ignore[arg-type]
    assert loss.dtype == torch.float64


def test_ids_outside_the_vocabulary_are_refused(backend: str) -> None:
    student = torch.randn(2, 10)
    ids = torch.tensor([[1, 9], [3, 10]])
    logprobs = torch.full((2, 2), -2.0)
    with pytest.raises(ValueError, match="token 10; the student's vocabulary has 10"):
        kernels.divergence(student, teacher_topk=(ids, logprobs), backend=backend)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_ids_outside_the_vocabulary_count_as_padding_on_a_gpu() -> None:
    student = torch.randn(2, 10, device="cuda")
    ids = torch.tensor([[1, 9], [3, 10_000_000]], device="cuda")
    logprobs = torch.full((2, 2), -2.0, device="cuda")
    padded = ids.masked_fill(ids >= 10, -1), logprobs.masked_fill(ids >= 10, -torch.inf)
    found, wanted = (
        kernels.divergence(student, teacher_topk=topk, reduction="none") for topk in ((ids, logprobs), padded)
    )
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("reduce", [False, True])
def test_the_fake_op_says_what_the_op_gives(
    reduce: bool, dtype: torch.dtype, backend: str, device: str
) -> None:
    """Types and shapes, which is all that a compiled graph knows before it runs."""
    student, weight = torch.randn(3, 12, device=device).to(dtype), torch.ones(3, device=device)
    weight = weight.double() if dtype == torch.float64 else weight
    arguments = (student, student.flip(0), None, None, weight, "fkl", 0.5, 1.0, reduce, backend)
    real = torch.ops.moedraft.divergence(*arguments)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
        fake = torch.ops.moedraft.divergence(*fakes)
    assert [(one.dtype, one.shape) for one in fake] == [(one.dtype, one.shape) for one in real]
    assert real[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_ids_outside_the_vocabulary_count_as_padding_in_a_compiled_graph() -> None:
    """Where nothing may wait for the values, on a CPU too."""
    student = torch.randn(2, 10)
    ids = torch.tensor([[1, 9], [3, 10_000_000]])
    logprobs = torch.full((2, 2), -2.0)
    padded = ids.masked_fill(ids >= 10, -1), logprobs.masked_fill(ids >= 10, -torch.inf)

    def loss(ids: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
        return kernels.divergence(student, teacher_topk=(ids, logprobs), reduction="none")

    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids, logprobs), loss(*padded))


LISTS = {
    "one lane": [7, 2055, 4103],  # entries 7, 7 + 2048 … of a row are summed in one lane
    "one lane and its neighbours": [2054, 7, 2056, 4103],
    "first and last": [0, 4999],
    "the last block alone": [4998, 4999, 4997],
}


@pytest.mark.parametrize("listed", LISTS.values(), ids=LISTS)
def test_listed_tokens_leave_the_tokens_of_their_lane_alone(
    listed: list[int], backend: str, device: str
) -> None:
    """The largest probabilities of the tail lie beside what is listed, which outweighs them 10^9 times."""
    gen = torch.Generator().manual_seed(1)
    student = torch.randn(2, 5000, generator=gen)
    student[:, [7, 2055, 4103, 4999, 903, 2951]] += 8  # in the lanes of what is listed
    student[:, listed] = 30.0
    ids = torch.tensor([listed, listed[::-1]], device=device)
    logprobs = torch.full(ids.shape, 0.9 / len(listed)).log().to(device)
    exact = student.double().to(device).requires_grad_()
    logs = exact.log_softmax(-1)
    others = torch.ones(5000, dtype=torch.bool, device=device)
    others[listed] = False
    tail = exact[:, others].logsumexp(-1) - exact.logsumexp(-1)
    t_tail = -torch.expm1(logprobs.double().logsumexp(-1))
    wanted = (logprobs.double().exp() * (logprobs - logs.gather(1, ids))).sum(-1) + t_tail * (
        t_tail.log() - tail
    )
    wanted.sum().backward()
    given = student.to(device).requires_grad_()
    loss = kernels.divergence(given, teacher_topk=(ids, logprobs), reduction="none", backend=backend)  # type: ignore[arg-type]
    loss.sum().backward()
    assert given.grad is not None
    assert exact.grad is not None
    assert float((loss.detach().double() - wanted.detach()).norm() / wanted.detach().norm()) < 1e-6
    assert float((given.grad.double() - exact.grad).norm() / exact.grad.norm()) < 1e-5
    rest = (given.grad.double() - exact.grad)[:, others].norm() / exact.grad[:, others].norm()
    assert float(rest) < 1e-5


def test_a_long_list_is_left_out_in_parts(device: str) -> None:
    """More tokens than are read again at a time: 300 of 10 000, many of which share lanes."""
    gen = torch.Generator().manual_seed(2)
    student, teacher = (torch.randn(2, 10_000, generator=gen).to(device) for _ in range(2))
    ids = torch.cat((torch.arange(100), torch.arange(2048, 2148), torch.arange(4000, 4100))).to(device)
    topk = ids.expand(2, -1), teacher.log_softmax(-1)[:, ids]
    found = []
    for backend in ("triton", "reference"):
        given = student.clone().requires_grad_()
        loss = kernels.divergence(given, teacher_topk=topk, kind="jsd", reduction="none", backend=backend)  # type: ignore[arg-type]
        loss.sum().backward()
        found.append((loss.detach(), given.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-7)


def test_a_gradient_from_above_reaches_every_block(device: str) -> None:
    """Three blocks of contiguous rows, as in real vocabularies: half the loss has half the gradient."""
    gen = torch.Generator().manual_seed(3)
    student, teacher = (
        torch.randn(3, 4112, generator=gen).mul(3).to(device, torch.bfloat16) for _ in range(2)
    )
    tile = fused_divergence.tile(4112)
    assert (tile["BLOCK"], tile["STAGES"]) == (2048, 3)
    grads = []
    for factor in (1.0, 0.5):
        given = student.clone().requires_grad_()
        (kernels.divergence(given, teacher, reduction="sum", backend="triton") * factor).backward()
        assert given.grad is not None
        grads.append(given.grad)
    assert torch.equal(grads[1], grads[0] / 2)  # halves of bfloat16 are exact
    exact = student.double().requires_grad_()
    (kernels.divergence(exact, teacher.double(), reduction="sum", backend="reference") / 2).backward()
    assert exact.grad is not None
    assert float((grads[1].double() - exact.grad).norm() / exact.grad.norm()) < 1e-2
