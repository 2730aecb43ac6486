"""Which tokens of the answers an independent draft model guesses, and how surely."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from moedraft.distill.guessing.sampled import accepted, at_temperature
from moedraft.distill.text.batches import RecordBatch

Row = tuple[NDArray[np.float64], tuple[float, int]]  # [depth, 2], as `runs`; the sum of chances, and how many


def guessed_rows(logits: Iterable[torch.Tensor], batch: RecordBatch, depth: int) -> Iterator[Row]:
    """By record of the batch: hits and tries of drafts, and what first guesses gave the right token.

    Of greedy answers these are right guesses. Of sampled ones they are expected numbers of tokens that would
    be accepted and drafted, and the chances are those of first guesses to be accepted.

    logits: [n, V] each, together those of all positions of `batch.mask`, in their order.
    """
    right, given, first = [], [], 0
    for some in logits:
        mine = slice(first, first + len(some))
        first += len(some)
        temperatures, best = batch.temperatures[mine], batch.topk_ids[mine, 0]
        chosen = some.gather(1, best.clamp(min=0)[:, None])[:, 0].float()
        chance = (chosen - some.float().logsumexp(-1)).exp()
        chance = chance.masked_fill(best < 0, 0.0).double()  # a token that the draft lacks
        hit = (some.argmax(-1) == best).double()
        if bool((sampled := temperatures > 0).any()):
            wanted = at_temperature(batch.known[mine][sampled], temperatures[sampled])
            drawn = accepted(some[sampled], batch.topk_ids[mine][sampled], wanted, temperatures[sampled])
            hit[sampled], chance[sampled] = drawn, drawn
        right.append(hit)
        given.append(chance)
    lengths = batch.mask.sum(1).tolist()
    pairs = zip(torch.split(torch.cat(right), lengths), torch.split(torch.cat(given), lengths), strict=True)
    for hits, chances in pairs:
        yield runs(hits.cpu().numpy(), depth), (float(chances.sum()), len(chances))


def runs(right: NDArray[np.float64], depth: int) -> NDArray[np.float64]:
    """[tokens], how likely each is accepted, or whether it is → hits and tries [depth, 2] of all drafts."""
    counts = np.zeros((depth, 2))
    alive = np.ones(len(right))
    for step in range(min(depth, len(right))):
        tried = alive[: len(right) - step]
        alive = tried * right[step:]
        counts[step] = alive.sum(), tried.sum()
    return counts
