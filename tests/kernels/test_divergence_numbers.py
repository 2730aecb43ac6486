"""What number types do to the divergences: half precision with a gradient scaler, float64, ids outside."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moedraft import kernels

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


def test_float64_logits_give_float64_whoever_computes(backend: str) -> None:
    """So that a compiled graph, which asks the op's fake, expects what it will get."""
    student = torch.randn(3, 40, dtype=torch.float64)
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
def test_the_fake_op_says_what_the_op_gives(reduce: bool, dtype: torch.dtype, backend: str) -> None:
    """Types and shapes, which is all that a compiled graph knows before it runs."""
    student, weight = torch.randn(3, 12).to(dtype), torch.ones(3)
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
