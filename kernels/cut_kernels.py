"""The kernel that finds what filters leave of a row, without sorting; `fused_cut.py` launches it.

Logits are compared as unsigned integers, their keys, which stand in the same order. A search holds the key at
which a weight is reached, counted from the largest logit downwards, between two keys. Each reading of the row
divides them into at most 256 intervals, counts the logits in each, and adds the exact weights above and
within. The weight of an interval then lies between its number times the weights at its two ends, and only
those intervals remain in which the key can be.
"""
# ruff: noqa: N803 (Triton's compile-time constants are written in capitals)
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import BIG, INF, at, fours, load_chunk
from .reference_cut import COLDEST

MOST_COLD: tl.constexpr = tl.constexpr(COLDEST)
REACH: tl.constexpr = tl.constexpr(
    32.0
)  # e^−32: 2^20 such tokens weigh less than the largest top_p leaves out


@triton.jit
def whole_key(x):
    """`key_of` without a shift, in fewer instructions."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # −0 becomes 0
    flipped = (bits >> 31).to(tl.uint32, bitcast=True) | 0x80000000  # all bits of a negative number
    return bits.to(tl.uint32, bitcast=True) ^ flipped


@triton.jit
def key_of(x, SHIFT: tl.constexpr):
    """uint32 in the order of float32 x, 0 and −0 alike. SHIFT: zeros that end the bits of such numbers.

    The same as `whole_key`, in a form with which no thread of `cut` must set registers aside.
    """
    bits = tl.where(x == 0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where(x < 0, bits ^ 0xFFFFFFFF, bits | 0x80000000) >> SHIFT


@triton.jit
def value_of(key, SHIFT: tl.constexpr):
    bits = key << SHIFT
    below = (bits | ((1 << SHIFT) - 1)) ^ 0xFFFFFFFF
    return tl.where(bits >= 0x80000000, bits ^ 0x80000000, below).to(tl.float32, bitcast=True)


@triton.jit
def shift_of(hi, lo, BINS: tl.constexpr):
    """By how many bits the keys of [lo, hi] are shortened, so that there are at most BINS intervals."""
    wide = ((hi - lo) >> tl.arange(0, 32).to(tl.uint32)) >= BINS
    return tl.sum(wide.to(tl.int32), axis=0).to(tl.uint32)


@triton.jit
def weight_of(x, best, inverse, BY_COUNT: tl.constexpr):
    return tl.zeros_like(x) + 1.0 if BY_COUNT else tl.exp((x - best) * inverse)


@triton.jit
def measure(
    row, stride_v, V, best, inverse, hi, lo, shift, BY_COUNT: tl.constexpr, SHIFT: tl.constexpr,
    CHUNK: tl.constexpr, BINS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Weights of the keys above `hi` and of those from `lo` on; how many lie in each interval below hi."""
    above, within = tl.zeros([CHUNK // 4], tl.float32), tl.zeros([CHUNK // 4], tl.float32)
    counts = tl.zeros([BINS], tl.int32)
    for start in tl.range(0, V, CHUNK, num_stages=STAGES):
        offsets = start + tl.arange(0, CHUNK)
        x = load_chunk(row, offsets, stride_v, V)
        key = key_of(x, SHIFT)
        weight = tl.where(offsets < V, weight_of(x, best, inverse, BY_COUNT), 0.0)
        above += fours(tl.where(key > hi, weight, 0.0))
        within += fours(tl.where(key >= lo, weight, 0.0))
        inside = (offsets < V) & (key <= hi) & (key >= lo)
        interval = tl.where(inside, (hi - key) >> shift, 0).to(tl.int32)
        counts += tl.histogram(interval, BINS, mask=inside)
    return tl.sum(above.to(tl.float64), axis=0), tl.sum(within.to(tl.float64), axis=0), counts


@triton.jit
def first_of(reached, otherwise, BINS: tl.constexpr):
    bins = tl.arange(0, BINS)
    return tl.minimum(tl.min(tl.where(reached, bins, BINS), axis=0), otherwise)


@triton.jit
def candidates(
    counts, above, within, goal, hi, lo, shift, best, inverse,
    BY_COUNT: tl.constexpr, SHIFT: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """The first and the last interval in which the goal can be reached."""
    widest = (hi - lo).to(tl.int64)
    first = tl.arange(0, BINS).to(tl.int64) << shift.to(tl.int64)
    last = first + (tl.full([], 1, tl.int64) << shift.to(tl.int64)) - 1
    top = value_of((hi.to(tl.int64) - tl.minimum(first, widest)).to(tl.uint32), SHIFT)
    bottom = value_of((hi.to(tl.int64) - tl.minimum(last, widest)).to(tl.uint32), SHIFT)
    most = counts * weight_of(top, best, inverse, BY_COUNT).to(tl.float64)
    least = counts * weight_of(bottom, best, inverse, BY_COUNT).to(tl.float64)
    high, low = tl.cumsum(most, axis=0), tl.cumsum(least, axis=0)
    high, low = (
        tl.minimum(above + high, within - (tl.sum(least, axis=0) - low)),
        tl.maximum(above + low, within - (tl.sum(most, axis=0) - high)),
    )
    return first_of(high >= goal, BINS - 1, BINS), first_of(low >= goal, BINS - 1, BINS)


@triton.jit
def reached(
    counts, above, goal, hi, best, inverse, BY_COUNT: tl.constexpr, SHIFT: tl.constexpr, BINS: tl.constexpr
):
    """(key, weight above it, logits that have it) where the goal is reached; an interval is one key here."""
    bins = tl.arange(0, BINS)
    steps = tl.minimum(bins.to(tl.int64), hi.to(tl.int64))
    keys = (hi.to(tl.int64) - steps).to(tl.uint32)
    weights = tl.where(counts > 0, counts * weight_of(value_of(keys, SHIFT), best, inverse, BY_COUNT), 0.0)
    weights = weights.to(tl.float64)
    total = above + tl.cumsum(weights, axis=0)
    final = tl.max(tl.where(counts > 0, bins, 0), axis=0)
    chosen = first_of((counts > 0) & (total >= goal), final, BINS)
    here = bins == chosen
    return hi - chosen.to(tl.uint32), at(here, total - weights), at(here, counts)


@triton.jit
def search(
    row, stride_v, V, best, inverse, goal, share, hi, lo, BY_COUNT: tl.constexpr, SHIFT: tl.constexpr,
    CHUNK: tl.constexpr, BINS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """(goal, key, weight above it, logits that have it) where the weights reach the goal, in [lo, hi].

    A goal below zero: `share` of the weights from lo on. Each round leaves at most half of the keys, or asks
    about one half of them in the next.
    """
    floor, key, before, count, going = lo, hi, goal, tl.full([], 0, tl.int32), True
    while going:
        shift = shift_of(hi, floor, BINS)
        above, within, counts = measure(
            row, stride_v, V, best, inverse, hi, floor, shift, BY_COUNT, SHIFT, CHUNK, BINS, STAGES
        )
        goal = tl.where(goal < 0, share * within, goal)
        if (within < goal) & (floor > lo):  # it lies in the other half
            hi, floor = floor - 1, lo
        elif shift == 0:
            key, before, count = reached(counts, above, goal, hi, best, inverse, BY_COUNT, SHIFT, BINS)
            going = False
        else:
            lo = floor
            first, last = candidates(
                counts, above, within, goal, hi, lo, shift, best, inverse, BY_COUNT, SHIFT, BINS
            )
            first, last = first.to(tl.uint32), tl.maximum(first, last).to(tl.uint32)
            top = hi - tl.minimum(first << shift, hi - lo)
            lo = hi - tl.minimum(((last + 1) << shift) - 1, hi - lo)
            hi, floor = top, lo
            if last - first >= BINS // 2:
                floor = hi - (hi - lo) // 2
    return goal, key, before, count


@triton.jit
def nth_equal(row, stride_v, V, value, n, CHUNK: tl.constexpr):
    """The token of the n-th logit that equals `value`."""
    seen, start, token = tl.full([], 0, tl.int32), 0, BIG
    while (seen < n) & (start < V):
        offsets = start + tl.arange(0, CHUNK)
        equal = ((load_chunk(row, offsets, stride_v, V) == value) & (offsets < V)).to(tl.int32)
        hit = (equal > 0) & (seen + tl.cumsum(equal, axis=0) == n)
        token = tl.minimum(token, tl.min(tl.where(hit, offsets, BIG), axis=0))
        seen += tl.sum(equal, axis=0)
        start += CHUNK
    return token


@triton.jit
def best_of(row, stride_v, V, CHUNK: tl.constexpr, STAGES: tl.constexpr):
    """A row's largest logit, +inf where there is a NaN."""
    top = tl.full([CHUNK], -INF, tl.float32)
    for start in tl.range(0, V, CHUNK, num_stages=STAGES):
        x = load_chunk(row, start + tl.arange(0, CHUNK), stride_v, V)
        top = tl.where(x == x, tl.maximum(top, x), INF)
    return tl.max(top, axis=0)


@triton.jit
def by_mass(
    row, stride_v, V, best, warmth, inverse, share, hi, lo,
    SHIFT: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """(value, last) of top-p among the keys in [lo, hi]."""
    least = key_of(tl.maximum(best - REACH * warmth, -3.0e38), SHIFT)
    goal, key, before, count = search(
        row, stride_v, V, best, inverse, tl.full([], -1.0, tl.float64), share, hi, tl.maximum(lo, least),
        False, SHIFT, CHUNK, BINS, STAGES,
    )  # fmt: skip
    value, last = value_of(key, SHIFT), BIG
    each = tl.exp((value - best) * inverse).to(tl.float64)
    wanted = tl.maximum(tl.ceil((goal - before) / each), 1.0)
    if wanted < count:
        last = nth_equal(row, stride_v, V, value, wanted.to(tl.int32), CHUNK)
    return value, last


@triton.jit
def cut_of(
    row, stride_v, temperature, top_k, top_p, min_p, b, V,
    SHIFT: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """(value, last) of a row of sequence b."""
    warmth = tl.load(temperature + b).to(tl.float32)
    best = best_of(row, stride_v, V, CHUNK, STAGES)
    value, last = -INF, BIG
    if (warmth > 0) & (best > -INF) & (best < INF):
        warmth = tl.maximum(warmth, MOST_COLD)
        inverse = 1.0 / warmth
        hi, lo = key_of(best, SHIFT), key_of(tl.full([], -INF, tl.float32), SHIFT)
        if top_k is not None:
            rank = tl.load(top_k + b)
            if (rank > 0) & (rank < V):
                _, lo, _, _ = search(
                    row, stride_v, V, best, inverse, rank.to(tl.float64), 1.0, hi, lo,
                    True, SHIFT, CHUNK, BINS, STAGES,
                )  # fmt: skip
                value = value_of(lo, SHIFT)
        if top_p is not None:
            share = tl.load(top_p + b).to(tl.float64)
            if share < 1:
                value, last = by_mass(
                    row, stride_v, V, best, warmth, inverse, share, hi, lo, SHIFT, CHUNK, BINS, STAGES
                )
        if min_p is not None:
            least = tl.load(min_p + b).to(tl.float32)
            if least > 0:
                floor = best + warmth * tl.log(least)
                last = tl.where(floor > value, BIG, last)
                value = tl.where(floor > value, floor, value)
    return value, last


@triton.jit(do_not_specialize=["T"])
def cut(
    logits, stride_b, stride_k, stride_v, temperature, top_k, top_p, min_p, stages, values, lasts, V, T,
    SHIFT: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (rows), T of each sequence. A row's numbers do not depend on the rows around it.

    stages: of rows that several programs have read before; 0 where they have found the cut.
    """
    place = tl.program_id(0).to(tl.int64)
    if stages is not None:  # noqa: SIM102 (asked while it is compiled; what follows, when it runs)
        if tl.load(stages + place) == 0:
            return
    row = logits + (place // T) * stride_b + (place % T) * stride_k
    value, last = cut_of(
        row, stride_v, temperature, top_k, top_p, min_p, place // T, V, SHIFT, CHUNK, BINS, STAGES
    )
    tl.store(values + place, value)
    tl.store(lasts + place, last)
