"""Where the cut of a long row is looked for, told from a sixteenth of the row; `team_kernels.py` uses it.

The logits of the sample are counted on levels below the row's largest logit, which are equally wide and so
have a known weight. How far such a count may be wrong follows from its size.
"""
# ruff: noqa: N803 (Triton's compile-time constants are written in capitals)
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from .cut_kernels import REACH, first_of, key_of
from .primitives import INF, load_chunk

LEVELS: tl.constexpr = tl.constexpr(256)  # of a sample, each an eighth of the temperature wide
WIDTH: tl.constexpr = tl.constexpr(0.125)
PIECE: tl.constexpr = tl.constexpr(32)  # neighbours of which a sample takes all; they are 64 bytes or more
SPARSE: tl.constexpr = tl.constexpr(16)  # and then none of fifteen times as many
SURE: tl.constexpr = tl.constexpr(4.0)  # standard deviations by which a sample may be wrong
UNSEEN: tl.constexpr = tl.constexpr(8.0)  # logits that it may have missed where it saw none


@triton.jit
def sample(row, stride_v, V, best, inverse, CHUNK: tl.constexpr):
    """Of every sixteenth part of a row, how many logits lie on each level below the largest."""
    counts = tl.zeros([LEVELS], tl.int32)
    lane = tl.arange(0, CHUNK)
    for start in range(0, V, CHUNK * SPARSE):
        offsets = start + (lane // PIECE) * (PIECE * SPARSE) + lane % PIECE
        x = load_chunk(row, offsets, stride_v, V)
        level = tl.minimum((best - x) * inverse * (1.0 / WIDTH), LEVELS - 1.0).to(tl.int32)
        counts += tl.histogram(level, LEVELS, mask=offsets < V)
    return counts


@triton.jit
def expected(counts, goal, total, V, by_rank):
    """The last level before which the goal is not reached, and the first before which it is.

    Of a mass that is known as a whole, a sample tells best what lies below a level: that are many logits.
    """
    scale = V / tl.sum(counts, axis=0).to(tl.float64)
    levels = tl.arange(0, LEVELS)
    weight = tl.exp((levels.to(tl.float32) + 0.5) * -0.125).to(tl.float64)  # in its middle
    number = counts.to(tl.float64)
    above = (tl.cumsum(counts, axis=0) - counts).to(tl.float64)
    mass, square = number * weight, number * weight * weight
    below = tl.sum(mass, axis=0) - tl.cumsum(mass, axis=0) + mass
    varied = tl.sum(square, axis=0) - tl.cumsum(square, axis=0) + square
    missed = tl.sqrt(tl.maximum(tl.where(by_rank, above, varied), 0.0)) * SURE
    missed = scale * (missed + UNSEEN * tl.where(by_rank, 1.0, weight)) + tl.where(by_rank, 0.0, 0.02 * below)
    reached = tl.where(by_rank, scale * above, total - scale * below)
    first = tl.max(tl.where(reached + missed < goal, levels, 0), axis=0)
    return first, first_of(reached - missed >= goal, LEVELS, LEVELS)


@triton.jit
def window(
    counts, rank, share, goal, total, best, warmth, V, SHIFT: tl.constexpr, BINS: tl.constexpr
):  # fmt: skip
    """(hi, lo, ceiling, floor): keys between which the cut is expected, and between which it must lie."""
    by_rank = rank > 0
    first, last = expected(counts, goal, total, V, by_rank)
    ceiling = key_of(best, SHIFT)
    lowest = key_of(tl.full([], -INF, tl.float32), SHIFT) + 1
    reach = key_of(tl.maximum(best - REACH * warmth, -3.0e38), SHIFT)
    floor = tl.minimum(tl.where(by_rank, lowest, tl.maximum(lowest, reach)), ceiling)
    lo = key_of(tl.maximum(best - last * WIDTH * warmth, -3.0e38), SHIFT)
    lo = tl.where(last < LEVELS, tl.minimum(tl.maximum(lo, floor), ceiling), floor)
    hi = tl.minimum(key_of(tl.maximum(best - first * WIDTH * warmth, -3.0e38), SHIFT), ceiling)
    hi = tl.where(first == 0, ceiling, tl.maximum(hi, lo))
    # then the same reading shows where top-p ends above it
    hi = tl.where(by_rank & (share < 1) & (rank * SPARSE <= V) & (ceiling - lo < BINS), ceiling, hi)
    return hi, lo, ceiling, floor
