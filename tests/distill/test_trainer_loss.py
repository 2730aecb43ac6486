"""The trainer's loss, which never has all logits at once, is that of a student that has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from distill_rig import Rig, record

from moedraft.core import SHARED
from moedraft.distill.text.batches import taught_by
from moedraft.kernels import Kind, divergence


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "home")


@pytest.mark.parametrize("expert", [SHARED, "code"])
def test_the_loss_is_the_plain_ways(rig: Rig, expert: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = rig.trainer
    student = trainer.student
    student.activate(expert)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    batch = trainer._collated([record(number) for number in range(5)])
    found = trainer.loss(batch)
    gradients = torch.autograd.grad(found, student.parameters())
    asked: list[int] = []
    real = student.logits
    monkeypatch.setattr(student, "logits", lambda given: asked.append(1) or real(given))
    trainer.loss(batch)
    assert not asked
    monkeypatch.setattr(student, "_plain_logits", False)
    wanted = trainer.loss(batch)
    assert asked
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    plain = torch.autograd.grad(wanted, student.parameters())
    assert any(bool(part.any()) for part in plain)
    for one, other in zip(gradients, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_capped_logits_are_computed_by_the_model_itself(rig: Rig) -> None:
    student = rig.trainer.student
    student.activate("code")
    assert student.output_layer() is not None
    student._plain_logits = None
    real = student.model.base_model.model.forward

    def capped(*args, **how):  # type: ignore[no-untyped-def]
        out = real(*args, **how)
        out.logits = torch.tanh(out.logits / 30) * 30
        return out

    student.model.base_model.model.forward = capped
    assert student.output_layer() is None


@pytest.mark.parametrize("kind", ["fkl", "rkl", "jsd", "tvd"])
def test_a_target_that_is_sure_of_its_token_teaches_by_every_divergence(kind: Kind) -> None:
    """Its stored tokens have all the probability, and yet the draft may give others some."""
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(0), requires_grad=True)
    ids = torch.tensor([[4, 5], [6, 7], [8, -1]])
    logprobs = torch.tensor([[0.7, 0.3], [0.5, 0.2], [1.0, 0.0]]).log()
    loss = divergence(logits, teacher_topk=(ids, taught_by(logprobs, kind)), kind=kind)
    loss.backward()
    assert loss.isfinite()
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())
    assert bool((logits.grad.abs().sum(1) > 0).all())  # every row teaches
    assert bool((logits.grad[[0, 0, 2], [4, 5, 8]] < 0).all())  # towards the target's own tokens


def test_what_leaves_others_enough_is_taught_as_it_is() -> None:
    logprobs = torch.tensor([[0.5, 0.2], [0.6, 0.3]]).log()
    assert torch.equal(taught_by(logprobs, "rkl"), logprobs)
