"""What a reading of a whole row shows of its cut; `team_kernels.py` uses it.

Known are the number and the mass of the logits above a key, and how many lie in each interval below it. So
the cut is found, where an interval is a single key, or else what is left to be looked at.
"""
# ruff: noqa: N803 (Triton's compile-time constants are written in capitals)
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from .cut_kernels import first_of, key_of, shift_of, value_of
from .primitives import INF, at

# what is known of a row
SETTLED: tl.constexpr = tl.constexpr(0)  # its cut
BY_RANK: tl.constexpr = tl.constexpr(1)  # between which keys top-k ends
BY_MASS: tl.constexpr = tl.constexpr(2)  # between which keys top-p ends
AMONG: tl.constexpr = tl.constexpr(3)  # at which value top-p ends, and after how many that equal it


@triton.jit
def bounds(counts, hi, lo, shift, best, steep, SHIFT: tl.constexpr, BINS: tl.constexpr):
    """The most and the least that the logits of each interval can weigh together, float64."""
    width, shift = (hi - lo).to(tl.int64), shift.to(tl.int64)
    first = tl.arange(0, BINS).to(tl.int64) << shift
    last = first + (tl.full([], 1, tl.int64) << shift) - 1
    top = value_of((hi.to(tl.int64) - tl.minimum(first, width)).to(tl.uint32), SHIFT)
    bottom = value_of((hi.to(tl.int64) - tl.minimum(last, width)).to(tl.uint32), SHIFT)
    most = counts * tl.exp2((top - best) * steep).to(tl.float64)
    return most, counts * tl.exp2((bottom - best) * steep).to(tl.float64)


@triton.jit
def end_of_mass(
    counts, masses, before, goal, final, hi, best, steep, SHIFT: tl.constexpr, BINS: tl.constexpr
):  # fmt: skip
    """(value, wanted) where top-p ends; all that equal it are wanted where that is 0. Intervals are keys.

    final: the last interval in which it may end.
    """
    bins = tl.arange(0, BINS)
    total = before + tl.cumsum(masses, axis=0)
    chosen = first_of((counts > 0) & (total >= goal), final, BINS)
    here = bins == chosen
    value = value_of(hi - chosen.to(tl.uint32), SHIFT)
    each = tl.exp2((value - best) * steep).to(tl.float64)
    wanted = tl.maximum(tl.ceil((goal - at(here, total - masses)) / each), 1.0)
    return value, tl.where(wanted < at(here, counts), wanted, 0.0).to(tl.int64)


@triton.jit
def narrower(high, low, goal, hi, lo, shift, floor, BINS: tl.constexpr):
    """(hi, lo, ceiling, floor): what is left of [lo, hi]. The floor stays where the goal may lie below."""
    first = first_of(high >= goal, BINS - 1, BINS)
    last = first_of(low >= goal, BINS, BINS)
    sure = last < BINS
    first, last = first.to(tl.uint32), tl.maximum(first, tl.minimum(last, BINS - 1)).to(tl.uint32)
    top = hi - tl.minimum(first << shift, hi - lo)
    bottom = hi - tl.minimum(((last + 1) << shift) - 1, hi - lo)
    return top, bottom, top, tl.where(sure, bottom, floor)


@triton.jit
def ended(
    counts, masses, mass_above, number_above, goal, by_rank, share, hi, lo, ceiling, floor, best, steep,
    SHIFT: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """What `settle` returns where each interval is one key, so that the cut of this search is among them.

    After top-k comes top-p, for which the same counts suffice unless it ends above all of them.
    """
    bins = tl.arange(0, BINS)
    final = tl.max(tl.where(counts > 0, bins, 0), axis=0)
    stage, value, wanted = tl.full([], SETTLED, tl.int32), -INF, tl.full([], 0, tl.int64)
    if by_rank:
        running = number_above + tl.cumsum(counts, axis=0)
        enough = number_above + tl.sum(counts, axis=0) >= goal
        final = first_of(running >= goal, final, BINS)
        value = tl.where(enough, value_of(hi - final.to(tl.uint32), SHIFT), -INF)
        counts, masses = tl.where(bins <= final, counts, 0), tl.where(bins <= final, masses, 0.0)
        goal = share * (mass_above + tl.sum(masses, axis=0))
        if (share < 1) & (mass_above >= goal) & (hi < key_of(best, SHIFT)):
            stage = tl.full([], BY_MASS, tl.int32)
            lo, floor = hi + 1, hi + 1
            hi, ceiling = key_of(best, SHIFT), key_of(best, SHIFT)
    if (share < 1) & (stage == SETTLED):
        value, wanted = end_of_mass(counts, masses, mass_above, goal, final, hi, best, steep, SHIFT, BINS)
        stage = tl.where(wanted > 0, AMONG, SETTLED)
    return stage, hi, lo, ceiling, floor, wanted, goal, value


@triton.jit
def settle(
    counts, mass_above, number_above, stage, share, goal, hi, lo, ceiling, floor, best, steep,
    SHIFT: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """(stage, hi, lo, ceiling, floor, wanted, goal, value): what is known after the row was read."""
    shift, by_rank = shift_of(hi, lo, BINS), stage == BY_RANK
    masses_most, masses = bounds(counts, hi, lo, shift, best, steep, SHIFT, BINS)
    before = tl.where(by_rank, number_above.to(tl.float64), mass_above)
    most = tl.where(by_rank, counts.to(tl.float64), masses_most)
    least = tl.where(by_rank, counts.to(tl.float64), masses)
    value, wanted = -INF, tl.full([], 0, tl.int64)
    if (before >= goal) & (hi < ceiling):
        lo, floor = hi + 1, hi + 1
        hi = ceiling
    elif (before + tl.sum(most, axis=0) < goal) & (lo > floor):
        hi, ceiling = lo - 1, lo - 1
        lo = floor
    elif shift > 0:
        high, low = before + tl.cumsum(most, axis=0), before + tl.cumsum(least, axis=0)
        hi, lo, ceiling, floor = narrower(high, low, goal, hi, lo, shift, floor, BINS)
    else:
        stage, hi, lo, ceiling, floor, wanted, goal, value = ended(
            counts, masses, mass_above, number_above, goal, by_rank, share, hi, lo, ceiling, floor, best,
            steep, SHIFT, BINS,
        )  # fmt: skip
    return stage, hi, lo, ceiling, floor, wanted, goal, value
