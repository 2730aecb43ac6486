"""A token that one side excludes costs nothing where the other side's probability of it is 0 in float32.

The fused kernel meets a row's tokens block by block and learns last how large its largest logit is: here with
that one in a block after the excluded token, before it, and with maxima that rise from block to block.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moedraft import kernels
from moedraft.kernels import fused_divergence

VOCAB, NEG = 4112, float("-inf")
pytestmark = pytest.mark.filterwarnings("ignore:invalid value|overflow:RuntimeWarning")  # the interpreter
FIRST, SECOND, THIRD = 7, 2050, 4100  # tokens of the three blocks
ORDERS = {
    "excluded first": ([FIRST], {THIRD: 200.0}),
    "excluded last": ([THIRD], {FIRST: 200.0}),
    "in one block": ([FIRST], {FIRST + 1: 200.0}),
    "a whole block": (list(range(SECOND)), {THIRD: 200.0}),
    "by and by": ([FIRST], {SECOND: 60.0, THIRD: 120.0}),
    "sum decides": ([FIRST], dict.fromkeys(range(SECOND, VOCAB), 96.0)),  # 102 below each, 110 below all
}


def pair(kind: str, tokens: list[int], tops: dict[int, float], device: str) -> tuple[Tensor, Tensor]:
    """Logits of student and teacher, where for fkl the student excludes tokens, for rkl the teacher."""
    gen = torch.Generator().manual_seed(1)
    expects, excludes = (torch.randn(2, VOCAB, generator=gen) for _ in range(2))
    expects[0, tokens], excludes[0, tokens] = -6.0, NEG
    expects[0, list(tops)] = torch.tensor(list(tops.values()))
    sides = (excludes, expects) if kind == "fkl" else (expects, excludes)
    return sides[0].to(device), sides[1].to(device)


def evaluated(student: Tensor, teacher: Tensor, kind: str, backend: str) -> tuple[Tensor, Tensor]:
    given = student.clone().requires_grad_()
    loss = kernels.divergence(given, teacher, kind=kind, reduction="none", backend=backend)  # type: ignore[arg-type]
    (grad,) = torch.autograd.grad(loss.sum(), given)
    return loss.detach(), grad


@pytest.mark.parametrize("kind", ["fkl", "rkl"])
@pytest.mark.parametrize("order", ORDERS)
def test_what_became_too_unlikely_costs_nothing(order: str, kind: str, device: str) -> None:
    assert fused_divergence.tile(VOCAB)["BLOCK"] == 2048
    student, teacher = pair(kind, *ORDERS[order], device)
    expects = teacher if kind == "fkl" else student
    assert not expects[0].softmax(-1)[ORDERS[order][0]].any()
    wanted, found = (evaluated(student, teacher, kind, backend) for backend in ("reference", "triton"))
    assert bool(wanted[0].isfinite().all())
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["fkl", "rkl"])
@pytest.mark.parametrize("order", ORDERS)
def test_control_what_is_still_possible_costs_everything(order: str, kind: str, device: str) -> None:
    tokens, tops = ORDERS[order]
    student, teacher = pair(kind, tokens, {at: top / 4 for at, top in tops.items()}, device)
    for backend in ("reference", "triton"):
        loss, grad = evaluated(student, teacher, kind, backend)
        assert loss.isposinf().tolist() == [True, False]
        assert bool(grad.isfinite().all())


@pytest.mark.parametrize("kind", ["fkl", "rkl"])
def test_a_nan_beside_it_shows(kind: str, device: str) -> None:
    student, teacher = pair(kind, *ORDERS["excluded first"], device)
    student[0, SECOND] = float("nan")
    for backend in ("reference", "triton"):
        assert evaluated(student, teacher, kind, backend)[0].isnan().tolist() == [True, False]
