"""The rank that an expert is published with, which follows from what it has learned.

What an expert has learned mostly lies in few directions. Cut to these by singular values, it guesses nearly
as before, and costs a fraction in files, in memory and in batches of several experts. The trainer's own
weights keep their rank; one that is loaded from storage is filled up again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from moedraft.drafting.experts.adapter import Delta


@dataclass(frozen=True)
class Kept:
    """How much a cut keeps: a share of the squared singular values of each low-rank term, or of all together.

    The output layer's are the largest by far. Where an expert changes more layers, these matter as much, so
    each term counts by itself (docs/experiments.md, "What an expert needs of its rank").
    """

    share: float
    together: bool = False


ALL = Kept(1.0)
MOST = Kept(0.99)
LEADING = Kept(0.97, together=True)  # a small draft serves mixed batches by experts where their ranks are low


def cut(deltas: Mapping[str, Delta], kept: Kept) -> dict[str, Delta]:
    """These low-rank terms with the smallest rank that keeps so much.

    All get the same rank, but none a higher one than before or than its layer allows; ALL changes nothing.
    """
    if kept.share >= 1:
        return dict(deltas)
    found = {module: _singular(a, b) for module, (a, b) in deltas.items()}
    squares = [values.double() ** 2 for _, values, _ in found.values()]
    if kept.together:
        squares = [pad_sequence(squares).sum(1)]
    rank = max(_needed(one, kept.share) for one in squares)
    return {
        module: (v[:rank].contiguous(), (u[:, :rank] * values[:rank]).contiguous())
        for module, (u, values, v) in found.items()
    }


def filled_up(a: torch.Tensor, b: torch.Tensor, rank: int) -> Delta:
    """The term B·A with the rank `rank` at least; what is new in it changes nothing yet, and can learn."""
    spare, bound = max(rank - len(a), 0), a.shape[1] ** -0.5
    a, b = a.detach(), b.detach()
    return torch.cat([a, a.new_empty(spare, a.shape[1]).uniform_(-bound, bound)]), pad(b, (0, spare))


def _singular(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """B·A as U [out, r], singular values [r] in descending order, and V [r, in], on the CPU."""
    (q_b, r_b), (q_a, r_a) = (torch.linalg.qr(part.detach().float().cpu()) for part in (b, a.T))
    u, values, v = torch.linalg.svd(r_b @ r_a.T, full_matrices=False)
    return q_b @ u, values, v @ q_a.T


def _needed(squares: torch.Tensor, share: float) -> int:
    """The smallest rank, 1 at least, that keeps this share of these squares, which descend."""
    lost = squares.sum() - squares.cumsum(0)  # by rank, from 1 on
    return 1 + int((lost[:-1] > (1 - share) * squares.sum()).sum())
