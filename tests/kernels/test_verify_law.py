"""What verification emits is distributed as the target says, whatever the draft; and the tests can tell.

Sixteen tokens, a draft that is the target's opposite, a target that depends on the token before. Many
independent requests are decoded step by step as an engine would do it, so noise that is used again by a
later step counts too. Seeds are fixed: a sound build passes always; the limits are those a sound sampler
fails once in a million seeds.
"""

from __future__ import annotations

import pytest
import torch
from chain_cases import chi_square, chi_square_limit
from law_cases import BATCH, VOCAB, decode, tables, worst_excess
from torch import Tensor

from moedraft import kernels
from moedraft.kernels import philox, reference


def test_the_reference_follows_the_target(device: str) -> None:
    text, accepted, tried = decode(BATCH, "reference", device)
    assert worst_excess(text) < 1
    target, draft = (torch.softmax(table[0].double().cpu(), -1) for table in tables(device))
    overlap = float(torch.minimum(target, draft).sum())
    sigma = (overlap * (1 - overlap) / tried) ** 0.5
    assert abs(accepted / tried - overlap) < 5 * sigma
    assert overlap < 0.7  # the draft is a bad one, or this would prove little


def test_one_hot_draft_follows_the_target(device: str) -> None:
    target = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)).to(device)
    seed = torch.arange(BATCH, device=device)
    drafted = torch.full((BATCH, 1), 5, dtype=torch.int64, device=device)
    tokens, count, _ = kernels.verify_chain(
        target.expand(BATCH, 2, VOCAB), drafted, temperature=1.3, seed=seed, position=seed * 0
    )
    probs = torch.softmax(target.double().cpu() / 1.3, -1)
    statistic, freedom = chi_square(torch.bincount(tokens[:, 0].cpu(), minlength=VOCAB), probs)
    assert statistic < chi_square_limit(freedom)
    share = float(probs[5])
    assert abs(float(count.double().mean()) - share) < 5 * (share * (1 - share) / BATCH) ** 0.5


def test_the_fused_kernel_follows_the_target(device: str) -> None:
    """Few rows in the interpreter, where the kernel's tokens are held to the reference's anyway."""
    batch = 200_000 if device == "cuda" else 112
    target, draft = (table[0] for table in tables(device))
    seed = torch.arange(batch, device=device)
    position = torch.full_like(seed, 41)
    rows, seen = target.expand(batch, 2, VOCAB), draft.expand(batch, 1, VOCAB)
    drafted, lse, _ = kernels.sample_draft(draft.expand(batch, VOCAB), 1.0, seed, position, backend="triton")
    tokens, count, _ = kernels.verify_chain(
        rows, drafted[:, None], seen, draft_lse=lse[:, None], temperature=1.0, seed=seed, position=position,
        backend="triton",
    )  # fmt: skip
    probs = torch.softmax(target.double().cpu(), -1)
    order = probs.argsort()
    groups = order.reshape(4, 4) if device == "cpu" else order.reshape(16, 1)  # enough expected in every cell
    observed = torch.bincount(tokens[:, 0].cpu(), minlength=VOCAB)
    statistic, freedom = chi_square(observed[groups].sum(1), probs[groups].sum(1))
    assert statistic < chi_square_limit(freedom)
    overlap = float(torch.minimum(probs, torch.softmax(draft.double().cpu(), -1)).sum())
    assert abs(float(count.double().mean()) - overlap) < 5 * (overlap * (1 - overlap) / batch) ** 0.5


# Negative controls: each fault is put in on purpose, and the test above must catch it by a wide margin.


def test_control_a_wrong_draft_distribution_shows(device: str) -> None:
    text, _, _ = decode(BATCH, "reference", device, draft_seen=lambda table: table * 0.5)
    assert worst_excess(text) > 3


def test_control_shared_noise_shows(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def shared(seed: Tensor, position: Tensor, length: int) -> tuple[Tensor, Tensor]:
        accept, _ = philox.chain_uniforms(seed, position, length)
        steps = torch.arange(length + 1, device=seed.device)
        return accept, philox.uniform(seed[:, None], position[:, None] + steps, philox.PROPOSE)

    monkeypatch.setattr(reference, "chain_uniforms", shared)
    text, _, _ = decode(BATCH, "reference", device)
    assert worst_excess(text) > 3


def test_control_accepting_always_shows(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def zero(seed: Tensor, position: Tensor, length: int) -> tuple[Tensor, Tensor]:
        accept, resample = philox.chain_uniforms(seed, position, length)
        return accept * 0, resample

    monkeypatch.setattr(reference, "chain_uniforms", zero)
    text, accepted, tried = decode(BATCH, "reference", device)
    assert accepted == tried
    assert worst_excess(text) > 3
