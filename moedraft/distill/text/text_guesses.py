"""Which tokens of the answers an independent draft model guesses, and how surely."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from moedraft.distill.text.batches import RecordBatch

Row = tuple[NDArray[np.int64], tuple[float, int]]  # [depth, 2], as `runs`; the sum of chances, and how many


def guessed_rows(logits: Iterable[torch.Tensor], batch: RecordBatch, depth: int) -> Iterator[Row]:
    """By record of the batch: hits and tries of greedy drafts, and what first guesses gave the right token.

    logits: [n, V] each, together those of all positions of `batch.mask`, in their order.
    """
    best, right, given, first = batch.topk_ids[:, 0], [], [], 0
    for some in logits:
        mine = best[first : first + len(some)]
        first += len(some)
        right.append(some.argmax(-1) == mine)
        chosen = some.gather(1, mine.clamp(min=0)[:, None])[:, 0].float()
        chance = (chosen - some.float().logsumexp(-1)).exp()
        given.append(chance.masked_fill(mine < 0, 0.0))  # a token that the draft lacks
    lengths = batch.mask.sum(1).tolist()
    pairs = zip(torch.split(torch.cat(right), lengths), torch.split(torch.cat(given), lengths), strict=True)
    for hits, chances in pairs:
        yield runs(hits.cpu().numpy(), depth), (float(chances.sum()), len(chances))


def runs(right: np.ndarray[tuple[int], np.dtype[np.bool_]], depth: int) -> NDArray[np.int64]:
    """bool [tokens], which are guessed right → hits and tries [depth, 2] of the drafts from every token."""
    counts = np.zeros((depth, 2), np.int64)
    alive = np.ones(len(right), bool)
    for step in range(min(depth, len(right))):
        tried = alive[: len(right) - step]
        alive = tried & right[step:]
        counts[step] = alive.sum(), tried.sum()
    return counts
