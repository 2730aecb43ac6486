"""The three kernels of verification, which `verify.py` launches and describes."""
# ruff: noqa: N803 (Triton's compile-time constants are written in capitals)
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import (
    ACCEPT,
    BIG,
    INF,
    at,
    combine,
    finite_or_zero,
    load_chunk,
    pick,
    row_offset,
    temperature_of,
    uniform,
)

DONE = tl.constexpr(0)  # nothing to draw: a greedy row, or an invalid one, which gets a placeholder
TARGET = tl.constexpr(1)  # draw from the target's row
ONE_HOT = tl.constexpr(2)  # draw from the target's row without the token that was drafted
RESIDUAL = tl.constexpr(3)  # draw from max(0, target − draft)


@triton.jit
def sweep(
    logits, stride_b, stride_k, stride_v, starts, counts, temperature, maxima, sums, arguments, V, NC, WIDTH,
    PER: tl.constexpr, EXTRA: tl.constexpr, HAS_COUNTS: tl.constexpr, PACKED: tl.constexpr,
    NEED_ARGUMENTS: tl.constexpr, SKIP_GREEDY_SUM: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (B·WIDTH rows, programs per row); each reads PER chunks. maxima, sums, arguments [rows, NC]."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, j = row // WIDTH, row % WIDTH
    wanted = WIDTH
    if HAS_COUNTS:
        wanted = tl.load(counts + b).to(tl.int32) + EXTRA
    if j < wanted:
        greedy, inverse = temperature_of(temperature, b)
        source = logits + row_offset(starts, b, j, stride_b, stride_k, PACKED)
        for step in tl.static_range(PER):
            chunk = part * PER + step
            if chunk < NC:
                offsets = chunk * CHUNK + tl.arange(0, CHUNK)
                x = load_chunk(source, offsets, stride_v, V)
                top = tl.max(x, axis=0)
                if NEED_ARGUMENTS and greedy:
                    tl.store(arguments + row * NC + chunk, tl.min(tl.where(x == top, offsets, BIG), axis=0))
                if greedy and SKIP_GREEDY_SUM:  # the sum need only show whether there is a NaN
                    total = tl.where(tl.max(tl.where(x == x, 0, 1), axis=0) > 0, float("nan"), 1.0)
                else:
                    total = tl.sum(tl.exp(x * inverse - finite_or_zero(top * inverse)), axis=0)
                tl.store(maxima + row * NC + chunk, top * inverse)
                tl.store(sums + row * NC + chunk, total)


@triton.jit
def resolve(
    target, target_b, target_k, target_v, target_starts, draft, draft_b, draft_k, draft_v, draft_starts,
    tokens, counts, draft_lse, temperature, seed, position, t_max, t_sum, t_arg, d_max, d_sum,
    mass, modes, drafted, scales, uniforms, out, num_accepted, status, V, NC, K,
    PER: tl.constexpr, HAS_DRAFT: tl.constexpr, HAS_LSE: tl.constexpr, HAS_COUNTS: tl.constexpr,
    PACKED: tl.constexpr, PURPOSE: tl.constexpr, KP: tl.constexpr, NCP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (B, programs per residual row). Each program of a row finds the row's end, the first stores it."""
    b, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    greedy, inverse = temperature_of(temperature, b)
    j = tl.arange(0, KP)
    x = tl.load(tokens + b * K + j, mask=j < K, other=-1)
    if HAS_COUNTS:
        x = tl.where(j < tl.load(counts + b), x, -1)
    count = tl.min(tl.where(x < 0, j, KP), axis=0)  # drafted tokens; row `count` is the bonus row
    chunks = tl.arange(0, NCP)
    cells = (b * (K + 1) + j)[:, None] * NC + chunks[None, :]
    inside = (j <= count)[:, None] & (chunks < NC)[None, :]
    maxima = tl.load(t_max + cells, mask=inside, other=-INF)
    valid, top, total = combine(maxima, tl.load(t_sum + cells, mask=inside, other=0.0), KP, NCP)
    lse = top + tl.log(total)
    known = (j < count) & (x < V)
    index = tl.where(known, x, 0)
    lse_draft = tl.zeros_like(lse)
    if greedy:
        best = tl.load(t_arg + cells, mask=inside, other=BIG)
        best = tl.min(tl.where(maxima == top[:, None], best, BIG), axis=1)
        accepted = valid & known & (index == best)
    else:
        best = tl.zeros_like(j)
        t_row = target + row_offset(target_starts, b, j, target_b, target_k, PACKED)
        t_x = tl.load(t_row + index * target_v, mask=known, other=-INF).to(tl.float32)
        target_probs = tl.exp(t_x * inverse - lse)
        draft_probs = tl.full([KP], 1.0, tl.float32)
        if HAS_DRAFT:
            if HAS_LSE:
                lse_draft = tl.load(draft_lse + b * K + j, mask=j < count, other=0.0).to(tl.float32)
            else:
                d_cells = (b * K + j)[:, None] * NC + chunks[None, :]
                drawn = (j < count)[:, None] & (chunks < NC)[None, :]
                d_maxima = tl.load(d_max + d_cells, mask=drawn, other=-INF)
                d_sums = tl.load(d_sum + d_cells, mask=drawn, other=0.0)
                d_valid, d_top, d_total = combine(d_maxima, d_sums, KP, NCP)
                lse_draft = tl.where(d_valid, d_top + tl.log(d_total), float("nan"))
            d_row = draft + row_offset(draft_starts, b, j, draft_b, draft_k, PACKED)
            d_x = tl.load(d_row + index * draft_v, mask=known, other=-INF).to(tl.float32)
            draft_probs = tl.exp(d_x * inverse - lse_draft)
        u = uniform(tl.load(seed + b), tl.load(position + b) + j, ACCEPT)
        accepted = valid & known & (u * draft_probs.to(tl.float64) < target_probs.to(tl.float64))
    n = tl.min(tl.where(accepted, KP, j), axis=0)
    end = j == n
    rejected = n < count
    sound = at(end, (known & (lse_draft > -INF) & (lse_draft < INF)).to(tl.int32)) > 0
    target_valid = at(end, valid.to(tl.int32)) > 0
    sampled = target_valid & (greedy == 0)
    mode = tl.where(sampled, tl.where(rejected & sound, RESIDUAL if HAS_DRAFT else ONE_HOT, TARGET), DONE)
    if part == 0:
        token = tl.where(target_valid, at(end, best), 0)
        tl.store(out + b * (K + 1) + j, tl.where(j < n, x, tl.where(end, token, -1)), mask=j <= K)
        tl.store(num_accepted + b, n)
        unsound = sampled & rejected & (sound == 0)
        tl.store(status + b, tl.where(target_valid, tl.where(unsound, 2, 0), 1))
        tl.store(modes + b, mode)
        tl.store(drafted + b, at(end, index))
        tl.store(scales + b * 3, at(end, top))
        tl.store(scales + b * 3 + 1, tl.where(target_valid, at(end, lse), float("nan")))
        tl.store(scales + b * 3 + 2, at(end, lse_draft))
        tl.store(uniforms + b, at(end, uniform(tl.load(seed + b), tl.load(position + b) + j, PURPOSE)))
    if HAS_DRAFT:  # noqa: SIM102 (known when compiling; the mode is not)
        if mode == RESIDUAL:
            t_row = target + row_offset(target_starts, b, n, target_b, target_k, PACKED)
            d_row = draft + row_offset(draft_starts, b, n, draft_b, draft_k, PACKED)
            lse_t, lse_d = at(end, lse), at(end, lse_draft)
            for step in tl.static_range(PER):
                chunk = part * PER + step
                if chunk < NC:
                    offsets = chunk * CHUNK + tl.arange(0, CHUNK)
                    t_probs = tl.exp(load_chunk(t_row, offsets, target_v, V) * inverse - lse_t)
                    d_probs = tl.exp(load_chunk(d_row, offsets, draft_v, V) * inverse - lse_d)
                    left = t_probs - d_probs  # not tl.maximum, which would drop a NaN
                    tl.store(mass + b * NC + chunk, tl.sum(tl.where(left < 0, 0.0, left), axis=0))


@triton.jit
def draw(
    target, target_b, target_k, target_v, target_starts, draft, draft_b, draft_k, draft_v, draft_starts,
    temperature, t_max, t_sum, mass, modes, drafted, scales, uniforms, out, num_accepted, status, V, NC, K,
    HAS_DRAFT: tl.constexpr, PACKED: tl.constexpr, NCP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (B). The inverse CDF in two levels: chunk, then token. Rows in mode DONE need none."""
    b = tl.program_id(0).to(tl.int64)
    mode = tl.load(modes + b)
    if mode != DONE:
        n = tl.load(num_accepted + b)
        _, inverse = temperature_of(temperature, b)
        top, lse, lse_draft = (
            tl.load(scales + b * 3),
            tl.load(scales + b * 3 + 1),
            tl.load(scales + b * 3 + 2),
        )
        x = tl.load(drafted + b)
        t_row = target + row_offset(target_starts, b, n, target_b, target_k, PACKED)
        chunks = tl.arange(0, NCP)
        cells = (b * (K + 1) + n) * NC + chunks
        maxima = tl.load(t_max + cells, mask=chunks < NC, other=-INF)
        target_mass = tl.load(t_sum + cells, mask=chunks < NC, other=0.0) * tl.exp(maxima - top)
        weights = target_mass
        if HAS_DRAFT:
            if mode == RESIDUAL:
                weights = tl.load(mass + b * NC + chunks, mask=chunks < NC, other=0.0)
        elif mode == ONE_HOT:  # only the drafted token's chunk differs: sum it again, without the token
            offsets = (x // CHUNK) * CHUNK + tl.arange(0, CHUNK)
            probs = tl.exp(load_chunk(t_row, offsets, target_v, V) * inverse - top)
            weights = tl.where(
                chunks == x // CHUNK, tl.sum(tl.where(offsets == x, 0.0, probs), axis=0), weights
            )
        total = tl.sum(weights.to(tl.float64), axis=0)
        if total != total:
            tl.store(status + b, 2)
        empty = (total > 0) == 0  # all zero, or a NaN in the draft's row: draw from the target's row
        weights = tl.where(empty, target_mass, weights)
        total = tl.where(empty, tl.sum(target_mass.to(tl.float64), axis=0), total)
        mode = tl.where(empty, TARGET, mode)
        threshold = tl.load(uniforms + b) * total
        chunk, before = pick(weights, chunks, threshold)
        offsets = chunk * CHUNK + tl.arange(0, CHUNK)
        logits = load_chunk(t_row, offsets, target_v, V) * inverse
        probs = tl.exp(logits - top)
        if HAS_DRAFT:
            if mode == RESIDUAL:
                d_row = draft + row_offset(draft_starts, b, n, draft_b, draft_k, PACKED)
                d_probs = tl.exp(load_chunk(d_row, offsets, draft_v, V) * inverse - lse_draft)
                probs = tl.maximum(tl.exp(logits - lse) - d_probs, 0.0)
        elif mode == ONE_HOT:
            probs = tl.where(offsets == x, 0.0, probs)
        token, _ = pick(probs, offsets, tl.maximum(threshold - before, 0.0))
        tl.store(out + b * (K + 1) + n, token.to(tl.int64))
