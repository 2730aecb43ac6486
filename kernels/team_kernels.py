"""The kernels that find the cuts of long rows, several programs a row; `fused_cut.py` launches them.

    survey  reads every logit: the maximum of each chunk of a row, and its mass
    aim     per row: from those, and from every sixteenth part of the row, between which two keys the cut
            must lie if the rest of the row is like that part
    narrow  reads every logit: counts and weighs those above, and counts those between, in 512 intervals. The
            last program of a row adds, and finds the cut, or between which two keys it lies. Where top-p
            ends among equal logits, the next launch counts these

The sample decides where to look, and never what is found: sums over the whole row show whether the cut lies
there. Counts are integers, so that it does not matter who adds first. A chunk's sums have a place of their
own and are added in one order, so that neither the other rows nor the number of programs change a result.
"""
# ruff: noqa: N803 (Triton's compile-time constants are written in capitals)
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from .cut_kernels import MOST_COLD, first_of, shift_of, whole_key
from .cut_sample import sample, window
from .cut_settling import AMONG, BY_MASS, BY_RANK, SETTLED, settle
from .primitives import BIG, INF, arrives_last, at, finite_or_zero, load_chunk

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def asked(temperature, top_k, top_p, min_p, b, V):
    """(temperature, rank, share, least) of sequence b; 0, 1 and 0 where a filter leaves its rows alone."""
    warmth = tl.load(temperature + b).to(tl.float32)
    rank, share = tl.full([], 0, tl.int64), tl.full([], 1.0, tl.float64)
    least = tl.full([], 0.0, tl.float32)
    if top_k is not None:
        given = tl.load(top_k + b)
        rank = tl.where((warmth > 0) & (given > 0) & (given < V), given, 0)
    if top_p is not None:
        mass = tl.load(top_p + b).to(tl.float64)
        share = tl.where((warmth > 0) & (mass < 1), mass, 1.0)
    if min_p is not None:
        chance = tl.load(min_p + b).to(tl.float32)
        least = tl.where((warmth > 0) & (chance > 0), chance, 0.0)
    return tl.maximum(warmth, MOST_COLD), rank, share, least


@triton.jit
def row_of(logits, place, stride_b, stride_k, T):
    return logits + (place // T) * stride_b + (place % T) * stride_k


@triton.jit
def likely(best, warmth, least):
    """The logit that min-p asks for."""
    return tl.where(least > 0, best + warmth * tl.log(tl.where(least > 0, least, 1.0)), -INF)


@triton.jit(do_not_specialize=["T"])
def survey(
    logits, stride_b, stride_k, stride_v, temperature, top_k, top_p, min_p, peaks, masses, V, T, NC,
    PER: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, programs a row), PER chunks each. Rows that nothing filters are not read."""
    place, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    warmth, rank, share, least = asked(temperature, top_k, top_p, min_p, place // T, V)
    if (rank > 0) | (share < 1) | (least > 0):
        row, steep = row_of(logits, place, stride_b, stride_k, T), LOG2E / warmth
        for step in tl.static_range(PER):
            chunk = part * PER + step
            if chunk < NC:
                x = load_chunk(row, chunk * CHUNK + tl.arange(0, CHUNK), stride_v, V)
                top = tl.max(tl.where(x == x, x, INF), axis=0)
                mass = tl.sum(tl.exp2((x - finite_or_zero(top)) * steep), axis=0)
                tl.store(peaks + place * NC + chunk, top)
                tl.store(masses + place * NC + chunk, mass)


@triton.jit
def store_state(stages, spans, goals, stage, hi, lo, ceiling, floor, wanted, goal):
    tl.store(stages, stage)
    tl.store(goals, goal)
    tl.store(spans, hi.to(tl.int64))
    tl.store(spans + 1, lo.to(tl.int64))
    tl.store(spans + 2, ceiling.to(tl.int64))
    tl.store(spans + 3, floor.to(tl.int64))
    tl.store(spans + 4, wanted)


@triton.jit(do_not_specialize=["T"])
def aim(
    logits, stride_b, stride_k, stride_v, temperature, top_k, top_p, min_p, peaks, masses, tables, arrivals,
    stages, spans, goals, tops, values, lasts, V, T, NC,
    SHIFT: tl.constexpr, CHUNK: tl.constexpr, NCP: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Grid (rows). Also sets to zero what the next launches count in."""
    place = tl.program_id(0).to(tl.int64)
    tl.store(tables + place * BINS + tl.arange(0, BINS), 0)
    tl.store(arrivals + place, 0)
    tl.store(stages + place, SETTLED)
    tl.store(lasts + place, BIG)
    warmth, rank, share, least = asked(temperature, top_k, top_p, min_p, place // T, V)
    value = -INF
    if (rank > 0) | (share < 1) | (least > 0):
        chunks = tl.arange(0, NCP)
        cells, inside = place * NC + chunks, chunks < NC
        found = tl.load(peaks + cells, mask=inside, other=-INF)
        best = tl.max(found, axis=0)
        if (best > -INF) & (best < INF):
            value = likely(best, warmth, least)
            if (rank > 0) | (share < 1):
                mass = tl.load(masses + cells, mask=inside, other=0.0)
                total = tl.sum((mass * tl.exp2((found - best) * (LOG2E / warmth))).to(tl.float64), axis=0)
                goal = tl.where(rank > 0, rank.to(tl.float64), share * total)
                row = row_of(logits, place, stride_b, stride_k, T)
                counts = sample(row, stride_v, V, best, 1.0 / warmth, CHUNK)
                hi, lo, ceiling, floor = window(
                    counts, rank, share, goal, total, best, warmth, V, SHIFT, BINS
                )
                stage = tl.where(rank > 0, BY_RANK, BY_MASS)
                store_state(
                    stages + place, spans + place * 5, goals + place, stage, hi, lo, ceiling, floor, 0, goal
                )
                tl.store(tops + place, best)
    tl.store(values + place, value)


@triton.jit
def as_threads(values, EACH: tl.constexpr):
    """The same values, neighbours first by threads, where each thread has loaded EACH of them at a time.

    Without it the compiler would move all of them between threads before it counts them one by one.
    """
    parts: tl.constexpr = values.shape[0] // (256 * EACH)  # of 8 warps
    apart = tl.permute(tl.reshape(values, [parts, 256, EACH]), (0, 2, 1))
    return tl.reshape(apart, [values.shape[0]])


@triton.jit
def weigh(
    row, stride_v, V, NC, best, steep, hi, lo, table, masses, numbers, part,
    PER: tl.constexpr, SHIFT: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Mass and number of this program's logits above `hi`, by chunk; how many lie in each interval below."""
    shift = shift_of(hi, lo, BINS) + SHIFT
    top, width = (
        ((hi + 1) << SHIFT) - 1,
        ((hi - lo + 1) << SHIFT) - 1,
    )  # in whole keys, which end in 0 or in 1
    for step in tl.static_range(PER):
        chunk = part * PER + step
        if chunk < NC:
            x = load_chunk(row, chunk * CHUNK + tl.arange(0, CHUNK), stride_v, V)
            key = whole_key(x)
            below = top - key  # of what lies above, more than any below: there is no sign
            counted = as_threads(below, 128 // row.dtype.element_ty.primitive_bitwidth)
            tl.atomic_add(table + (counted >> shift).to(tl.int32), 1, mask=counted <= width, sem="relaxed")
            over = key > top
            mass = tl.sum(tl.where(over, tl.exp2((x - best) * steep), 0.0), axis=0)
            tl.store(masses + chunk, mass)
            tl.store(numbers + chunk, tl.sum(over.to(tl.int32), axis=0))


@triton.jit
def count_equal(
    row, stride_v, V, NC, value, numbers, part, PER: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """How many logits of each of this program's chunks equal `value`."""
    for step in tl.static_range(PER):
        chunk = part * PER + step
        if chunk < NC:
            x = load_chunk(row, chunk * CHUNK + tl.arange(0, CHUNK), stride_v, V)
            tl.store(numbers + chunk, tl.sum((x == value).to(tl.int32), axis=0))


@triton.jit
def last_equal(row, stride_v, V, value, numbers, n, NC, CHUNK: tl.constexpr, NCP: tl.constexpr):
    """The token of the n-th logit that equals `value`; `numbers` of them lie in each chunk."""
    chunks = tl.arange(0, NCP)
    found = tl.load(numbers + chunks, mask=chunks < NC, other=0, cache_modifier=".cg")
    running = tl.cumsum(found, axis=0)
    chunk = tl.minimum(first_of(running >= n, NC - 1, NCP), NC - 1)
    offsets = chunk * CHUNK + tl.arange(0, CHUNK)
    equal = (load_chunk(row, offsets, stride_v, V) == value).to(tl.int32)
    rank = at(chunks == chunk, running - found) + tl.cumsum(equal, axis=0)
    return tl.min(tl.where((equal > 0) & (rank == n), offsets, BIG), axis=0)


@triton.jit
def conclude(
    table, masses, numbers, stage, share, least, warmth, best, stage_at, span, goal_at, value_at, NC,
    SHIFT: tl.constexpr, NCP: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Stores what all programs of a row have found together, and empties their table.

    What they have just stored is read from the second cache. min-p may exclude more than top-k and top-p.
    """
    bins, chunks = tl.arange(0, BINS), tl.arange(0, NCP)
    counts = tl.load(table + bins, cache_modifier=".cg")
    tl.store(table + bins, 0)
    mass = tl.load(masses + chunks, mask=chunks < NC, other=0.0, cache_modifier=".cg").to(tl.float64)
    number = tl.load(numbers + chunks, mask=chunks < NC, other=0, cache_modifier=".cg")
    hi, lo = tl.load(span).to(tl.uint32), tl.load(span + 1).to(tl.uint32)
    ceiling, floor = tl.load(span + 2).to(tl.uint32), tl.load(span + 3).to(tl.uint32)
    stage, hi, lo, ceiling, floor, wanted, goal, value = settle(
        counts, tl.sum(mass, axis=0), tl.sum(number, axis=0), stage, share, tl.load(goal_at), hi, lo,
        ceiling, floor, best, LOG2E / warmth, SHIFT, BINS,
    )  # fmt: skip
    if (stage == SETTLED) | (stage == AMONG):
        limit = likely(best, warmth, least)
        stage = tl.where(limit > value, SETTLED, stage)
        tl.store(value_at, tl.maximum(value, limit))
    store_state(stage_at, span, goal_at, stage, hi, lo, ceiling, floor, wanted, goal)


@triton.jit(do_not_specialize=["T"])
def narrow(
    logits, stride_b, stride_k, stride_v, temperature, top_k, top_p, min_p, masses, numbers, tables,
    arrivals, stages, spans, goals, tops, values, lasts, V, T, NC,
    PER: tl.constexpr, SHIFT: tl.constexpr, CHUNK: tl.constexpr, NCP: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Grid (rows, programs a row), PER chunks each. Rows whose cut is known are not read."""
    place, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    stage = tl.load(stages + place)
    if stage != SETTLED:
        row, span = row_of(logits, place, stride_b, stride_k, T), spans + place * 5
        warmth, _, share, least = asked(temperature, top_k, top_p, min_p, place // T, V)
        value, best, table = tl.load(values + place), tl.load(tops + place), tables + place * BINS
        masses, numbers = masses + place * NC, numbers + place * NC
        if stage == AMONG:
            count_equal(row, stride_v, V, NC, value, numbers, part, PER, CHUNK)
        else:
            hi, lo = tl.load(span).to(tl.uint32), tl.load(span + 1).to(tl.uint32)
            weigh(
                row, stride_v, V, NC, best, LOG2E / warmth, hi, lo, table, masses, numbers, part,
                PER, SHIFT, CHUNK, BINS,
            )  # fmt: skip
        if arrives_last(arrivals + place, tl.num_programs(1)):
            tl.store(arrivals + place, 0)
            if stage == AMONG:
                n = tl.load(span + 4)
                tl.store(lasts + place, last_equal(row, stride_v, V, value, numbers, n, NC, CHUNK, NCP))
                tl.store(stages + place, SETTLED)
            else:
                conclude(
                    table, masses, numbers, stage, share, least, warmth, best, stages + place, span,
                    goals + place, values + place, NC, SHIFT, NCP, BINS,
                )  # fmt: skip
