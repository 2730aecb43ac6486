"""Several drafts: both rules follow the target's law, accept what they promise, and the tests can fail."""

from __future__ import annotations

import pytest
import torch
from chain_cases import chi_square, chi_square_limit
from torch import Tensor

from moedraft import kernels
from moedraft.kernels import reference_several as several

VOCAB, LENGTH, RUNS = 6, 2, 3000
RULES = ["kseq", "multi_round"]


def tables() -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(7)
    target = torch.randn(VOCAB, VOCAB, generator=gen)
    return target, -0.5 * target + 0.5 * torch.randn(VOCAB, VOCAB, generator=gen)


def decode(rule: str, drafts: int, seen_factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Tokens [RUNS, LENGTH + 1] of one verification each, −1 behind their end, and how many were drafted."""
    target, draft = tables()
    seed = torch.arange(RUNS) * 7919 + 13
    position = torch.full_like(seed, 50)
    seeds = several.draft_seeds(seed, drafts)
    last, drawn = torch.zeros(RUNS, drafts, dtype=torch.int64), []
    for j in range(LENGTH):
        flat, _, _ = kernels.sample_draft(
            draft[last].flatten(0, 1),
            1.0,
            seeds.flatten(),
            position.repeat_interleave(drafts) + j,
            "reference",
        )
        last = flat.view(RUNS, drafts)
        drawn.append(last)
    tokens = torch.stack(drawn, 2)
    context = torch.cat([torch.zeros_like(tokens[..., :1]), tokens], 2)
    return several.verify_several(
        target[context],
        tokens,
        seen_factor * draft[context[..., :-1]],
        1.0,
        seed,
        position,
        rule,  # type: ignore[arg-type]
    )


def excess(tokens: Tensor) -> float:
    """χ² over its limit, of the first token and of the second after each first one that was accepted."""
    law = torch.softmax(tables()[0].double(), -1)
    statistic, freedom = chi_square(torch.bincount(tokens[:, 0], minlength=VOCAB), law[0])
    worst = statistic / chi_square_limit(freedom)
    for first in range(VOCAB):
        second = tokens[(tokens[:, 0] == first) & (tokens[:, 1] >= 0), 1]
        if len(second) * float(law[first].min()) > 5:
            statistic, freedom = chi_square(torch.bincount(second, minlength=VOCAB), law[first])
            worst = max(worst, statistic / chi_square_limit(freedom))
    return worst


@pytest.mark.parametrize("drafts", [1, 2, 8])
@pytest.mark.parametrize("rule", RULES)
def test_it_follows_the_target_and_accepts_what_it_promises(rule: str, drafts: int) -> None:
    tokens, count = decode(rule, drafts)
    assert excess(tokens) < 1
    target, draft = (torch.softmax(table[0].double(), -1) for table in tables())
    expected = several.accepted_share(target, draft, drafts, rule)  # type: ignore[arg-type]
    found = float((count > 0).double().mean())
    assert abs(found - expected) < 5 * (expected * (1 - expected) / RUNS) ** 0.5


@pytest.mark.parametrize("rule", RULES)
def test_control_a_wrong_draft_distribution_shows(rule: str) -> None:
    assert excess(decode(rule, 4, seen_factor=0.2)[0]) > 1.5


def test_control_a_factor_too_small_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several, "kseq_factor", lambda *_: 1.0)
    assert excess(decode("kseq", 4)[0]) > 1.5


def test_control_drafts_that_are_one_draft_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several, "draft_seeds", lambda seed, drafts: seed[:, None].expand(-1, drafts))
    assert excess(decode("multi_round", 4)[0]) > 1.5


@pytest.mark.parametrize("rule", RULES)
def test_one_draft_is_a_chain_and_more_accept_more(rule: str) -> None:
    gen = torch.Generator().manual_seed(1)
    for _ in range(20):
        target, draft = torch.softmax(2 * torch.randn(2, 50, generator=gen).double(), -1)
        shares = [several.accepted_share(target, draft, k, rule) for k in (1, 2, 4, 8)]  # type: ignore[arg-type]
        assert abs(shares[0] - float(torch.minimum(target, draft).sum())) < 1e-9
        assert shares == sorted(shares)


def test_k_seqs_factor_is_the_least_that_leaves_nothing_negative() -> None:
    gen = torch.Generator().manual_seed(2)
    target, draft = torch.softmax(2 * torch.randn(2, 30, generator=gen).double(), -1)
    factor = several.kseq_factor(target, draft, 4)

    def least(value: float) -> float:
        some = torch.minimum(draft, target / value)
        beta = float(some.sum())
        return float((target - some * (1 - (1 - beta) ** 4) / beta).min())

    assert 1 < factor < 4
    assert least(factor) >= -1e-12
    assert least(factor * 0.99) < -1e-6
