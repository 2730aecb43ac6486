"""What number types do to the divergences: half precision with a gradient scaler, float64, ids outside."""

from __future__ import annotations

import pytest
import torch

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
