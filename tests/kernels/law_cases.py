"""Requests decoded as an engine does, with a draft that is the target's opposite, and the exact law."""

from __future__ import annotations

from collections.abc import Callable

import torch
from chain_cases import chi_square, chi_square_limit
from torch import Tensor

from moedraft import kernels

VOCAB, LENGTH, POSITIONS = 16, 3, 4
Table = Tensor  # [VOCAB, VOCAB]: logits of the next token, given the last


def tables(device: str) -> tuple[Table, Table]:
    gen = torch.Generator().manual_seed(7)
    target = torch.randn(VOCAB, VOCAB, generator=gen) * 0.7
    return target.to(device), (-target + 0.3 * torch.randn(VOCAB, VOCAB, generator=gen)).to(device)


def decode(
    batch: int,
    backend: str,
    device: str,
    draft_seen: Callable[[Table], Table] = lambda table: table,
    verify: Callable[..., tuple[Tensor, Tensor, Tensor]] = kernels.verify_chain,
    seeds: Callable[[Tensor, Tensor], Tensor] = lambda seed, position: seed,
) -> tuple[Tensor, int, int]:
    """First POSITIONS tokens of `batch` requests, and how many first drafts were accepted, of how many.

    draft_seen: what verification is told the draft was. seeds: those of one round.
    """
    target, draft = tables(device)
    request = torch.arange(batch, device=device) * 7919 + 13
    text = torch.zeros(
        batch, POSITIONS + LENGTH + 2, dtype=torch.int64, device=device
    )  # column 0: the prompt
    length = torch.zeros(batch, dtype=torch.int64, device=device)  # tokens emitted
    rows = torch.arange(batch, device=device)
    accepted = tried = 0
    while int(length.min()) < POSITIONS:
        position = length + 100
        seed = seeds(request, position)
        last, drafted = text[rows, length], []
        for j in range(LENGTH):
            last, _, _ = kernels.sample_draft(draft[last], 1.0, seed, position + j, backend=backend)
            drafted.append(last)
        context = torch.stack((text[rows, length], *drafted), 1)
        seen = draft_seen(draft)[context[:, :-1]]
        tokens, count, status = verify(
            target[context], context[:, 1:].contiguous(), seen, temperature=1.0, seed=seed, position=position,
            backend=backend,
        )  # fmt: skip
        assert not status.any()
        going = length < POSITIONS
        if not tried:
            accepted, tried = int((count > 0).sum()), batch
        for j in range(LENGTH + 1):
            write = going & (j <= count)
            text[rows[write], (length + 1 + j)[write].clamp(max=text.shape[1] - 1)] = tokens[write, j]
        length = torch.where(going, length + count + 1, length)
    return text[:, 1 : POSITIONS + 1], accepted, tried


def worst_excess(text: Tensor) -> float:
    """Largest χ² over its limit: every position's tokens, every pair of neighbours, against the exact law."""
    target = torch.softmax(tables("cpu")[0].double(), -1)
    law, excess, text = target[0], 0.0, text.cpu()
    for j in range(POSITIONS):
        statistic, freedom = chi_square(torch.bincount(text[:, j], minlength=VOCAB), law)
        excess = max(excess, statistic / chi_square_limit(freedom))
        if j + 1 < POSITIONS:
            pairs = torch.bincount(text[:, j] * VOCAB + text[:, j + 1], minlength=VOCAB**2)
            joint = (law[:, None] * target).flatten()
            keep = joint * text.shape[0] > 10
            observed = torch.cat((pairs[keep], pairs[~keep].sum()[None]))
            expected = torch.cat((joint[keep], joint[~keep].sum()[None]))
            if float(expected[-1]) * text.shape[0] <= 10:
                observed, expected = observed[:-1], expected[:-1] / expected[:-1].sum()
            statistic, freedom = chi_square(observed, expected)
            excess = max(excess, statistic / chi_square_limit(freedom))
        law = law @ target
    return excess


BATCH = 30_000
