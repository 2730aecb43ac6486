"""Several drafts of one continuation, of which the target keeps the best: two rules, in plain PyTorch.

    kseq         k-SEQ of SpecTr, arXiv 2310.15141, algorithms 2 and 3: each candidate is accepted with a
                 probability that is lowered by a factor, so that k tries together give the target's law
    multi_round  SpecInfer, arXiv 2305.09781, algorithm 2: a chain's test for each candidate in turn, each
                 against what the target has left after the candidates before it

The drafts must be drawn independently of one another, token after token from the same distributions: see
`draft_seeds`. At each position the drafts that agree with everything accepted so far are the candidates.
References for a measurement; the engine drafts once. Knows logits, tokens and random numbers only.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .philox import ACCEPT, CANDIDATE, RESAMPLE, philox_torch, uniform
from .reference import computed, inverse_cdf

Rule = Literal["kseq", "multi_round"]
HALVINGS = 60  # of the interval in which k-SEQ's factor lies


def draft_seeds(seed: Tensor, drafts: int) -> Tensor:
    """Seeds int64 [B, k] to draw k independent drafts with, from the requests' seeds [B]."""
    number = torch.arange(drafts, device=seed.device)
    high, low = philox_torch(seed[:, None], number[None], CANDIDATE)[:2]
    return (high << 32) | low


def verify_several(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor,
    temperature: float,
    seed: Tensor,
    position: Tensor,
    rule: Rule,
) -> tuple[Tensor, Tensor]:
    """Tokens emitted int64 [B, K+1], then −1, and how many of them were drafted [B].

    target_logits [B, k, K+1, V], draft_logits [B, k, K, V]: after each draft's own tokens; draft_tokens int64
    [B, k, K]. Drafts that begin alike have the same logits there.
    """
    batch, _, length = draft_tokens.shape
    target = torch.softmax(computed(target_logits).double() / temperature, dim=-1)
    draft = torch.softmax(computed(draft_logits).double() / temperature, dim=-1)
    tokens = draft_tokens.new_full((batch, length + 1), -1)
    for b in range(batch):
        alive = torch.ones(draft_tokens.shape[1], dtype=torch.bool)
        for j in range(length + 1):
            first = int(alive.nonzero()[0])
            where = seed[b : b + 1], position[b : b + 1] + j
            if j == length:
                tokens[b, j] = _drawn(target[b, first, j], *where)
                break
            candidates = draft_tokens[b, alive, j]
            token, accepted = choose(target[b, first, j], draft[b, first, j], candidates, *where, rule)
            tokens[b, j] = token
            if not accepted:
                break
            alive = alive & (draft_tokens[b, :, j] == token)
    return tokens, (tokens >= 0).sum(1) - 1


def choose(
    target: Tensor, draft: Tensor, candidates: Tensor, seed: Tensor, position: Tensor, rule: Rule
) -> tuple[int, bool]:
    """One token distributed as `target` [V], and whether it is one of the candidates [m], drawn from `draft`.

    seed, position [1].
    """
    factor = kseq_factor(target, draft, len(candidates)) if rule == "kseq" else 1.0
    left = target
    for number, token in enumerate(candidates.tolist()):
        u = float(uniform(seed, position, ACCEPT + 16 * number))
        if u * factor * float(draft[token]) < float(left[token]):
            return token, True
        if rule == "multi_round":
            left = (left - draft).clamp(min=0)
            left = left / left.sum() if float(left.sum()) > 0 else target
    if rule == "kseq":
        left = kseq_residual(target, draft, factor, len(candidates))
    return int(_drawn(left, seed, position)), False


def kseq_factor(target: Tensor, draft: Tensor, drafts: int) -> float:
    """The least factor f in [1, k] with 1 − (1 − β)^k ≤ f·β, where β = Σ min(draft, target/f)."""
    low, high = 1.0, float(drafts)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        beta = float(torch.minimum(draft, target / middle).sum())
        low, high = (low, middle) if 1 - (1 - beta) ** drafts <= middle * beta else (middle, high)
    return high


def kseq_residual(target: Tensor, draft: Tensor, factor: float, drafts: int) -> Tensor:
    """What is drawn from when all candidates were rejected [V], not normalised."""
    some = torch.minimum(draft, target / factor)
    beta = float(some.sum())
    left = (target - some * ((1 - (1 - beta) ** drafts) / max(beta, 1e-300))).clamp(min=0)
    return left if float(left.sum()) > 0 else target


def accepted_share(target: Tensor, draft: Tensor, drafts: int, rule: Rule) -> float:
    """The probability that one of k candidates is accepted, exactly; with one draft it is a chain's."""
    if rule == "kseq":
        factor = kseq_factor(target, draft, drafts)
        return 1 - (1 - float(torch.minimum(draft, target / factor).sum())) ** drafts
    left, rejected = target, 1.0
    for _ in range(drafts):
        kept = float(torch.minimum(left, draft).sum())
        rejected *= max(0.0, 1 - kept)
        rest = (left - draft).clamp(min=0)
        if float(rest.sum()) <= 0:
            break
        left = rest / rest.sum()
    return 1 - rejected


def _drawn(weights: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    return inverse_cdf(weights[None], uniform(seed, position, RESAMPLE))[0][0]
