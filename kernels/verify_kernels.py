"""The two kernels of chain verification, which `verify.py` launches and describes."""
# ruff: noqa: N803 (Triton's compile-time constants are written in capitals)
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import (
    ACCEPT,
    BIG,
    DONE,
    INF,
    ONE_HOT,
    RESIDUAL,
    TARGET,
    arrives_last,
    at,
    best_tokens,
    draft_scales,
    drafted_tokens,
    draw,
    finite_or_zero,
    left,
    load_chunk,
    load_cut,
    row_number,
    row_offset,
    statistics,
    store_mass,
    store_row,
    temperature_of,
    uniform,
)


@triton.jit
def _sweep_row(
    source, stride_v, cut, greedy, inverse, maxima, sums, arguments, part, V, NC,
    PER: tl.constexpr, NEED_ARGUMENTS: tl.constexpr, SKIP_GREEDY_SUM: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Maximum, sum and argmax of this program's chunks of the row whose logits begin at `source`."""
    for step in tl.static_range(PER):
        chunk = part * PER + step
        if chunk < NC:
            offsets = chunk * CHUNK + tl.arange(0, CHUNK)
            x = left(load_chunk(source, offsets, stride_v, V), offsets, cut)
            top = tl.max(x, axis=0)
            if NEED_ARGUMENTS and greedy:
                tl.store(arguments + chunk, tl.min(tl.where(x == top, offsets, BIG), axis=0))
            if greedy and SKIP_GREEDY_SUM:  # the sum need only show whether there is a NaN
                total = tl.where(tl.max(tl.where(x == x, 0, 1), axis=0) > 0, float("nan"), 1.0)
            else:
                total = tl.sum(tl.exp(x * inverse - finite_or_zero(top * inverse)), axis=0)
            tl.store(maxima + chunk, top * inverse)
            tl.store(sums + chunk, total)


@triton.jit(do_not_specialize=["K", "ROWS"])
def sweep(
    target, target_b, target_k, target_v, target_starts, draft, draft_b, draft_k, draft_v, draft_starts,
    t_values, t_lasts, d_values, d_lasts, counts, temperature, t_max, t_sum, t_arg, d_max, d_sum, arrivals,
    V, NC, K, ROWS,
    PER: tl.constexpr, BOTH: tl.constexpr, HAS_COUNTS: tl.constexpr, PACKED: tl.constexpr,
    SKIP_GREEDY_SUM: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, programs per row): the target's ROWS = B·(K+1) and, if both are swept, the draft's B·K.

    It also sets each sequence's counter of arrivals to zero, for the launch that comes after it.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if row < ROWS:
        b, j = row // (K + 1), row % (K + 1)
        if arrivals is not None:  # noqa: SIM102 (known when compiling; the part is not)
            if (part == 0) & (j == 0):
                tl.store(arrivals + b, 0)
        wanted = K + 1
        if HAS_COUNTS:
            wanted = tl.load(counts + b).to(tl.int32) + 1
        if j < wanted:
            greedy, inverse = temperature_of(temperature, b)
            source = target + row_offset(target_starts, b, j, target_b, target_k, PACKED)
            cut = load_cut(t_values, t_lasts, row_number(target_starts, b, j, K + 1, PACKED), True)
            _sweep_row(
                source, target_v, cut, greedy, inverse, t_max + row * NC, t_sum + row * NC, t_arg + row * NC,
                part, V, NC, PER, True, SKIP_GREEDY_SUM, CHUNK,
            )  # fmt: skip
    if BOTH:  # noqa: SIM102 (known when compiling; the row is not)
        if row >= ROWS:
            cell = row - ROWS
            b, j = cell // K, cell % K
            wanted = K
            if HAS_COUNTS:
                wanted = tl.load(counts + b).to(tl.int32)
            greedy, inverse = temperature_of(temperature, b)
            if (j < wanted) & (greedy == 0):
                source = draft + row_offset(draft_starts, b, j, draft_b, draft_k, PACKED)
                cut = load_cut(d_values, d_lasts, row_number(draft_starts, b, j, K, PACKED), True)
                _sweep_row(
                    source, draft_v, cut, False, inverse, d_max + cell * NC, d_sum + cell * NC, None,
                    part, V, NC, PER, False, False, CHUNK,
                )  # fmt: skip


@triton.jit(do_not_specialize=["K"])
def resolve(
    target, target_b, target_k, target_v, target_starts, draft, draft_b, draft_k, draft_v, draft_starts,
    t_values, t_lasts, d_values, d_lasts, tokens, counts, draft_lse, temperature, seed, position,
    t_max, t_sum, t_arg, d_max, d_sum, arrivals, mass, lses, tops, out, num_accepted, status, V, NC, K,
    PER: tl.constexpr, HAS_DRAFT: tl.constexpr, HAS_LSE: tl.constexpr, HAS_COUNTS: tl.constexpr,
    PACKED: tl.constexpr, PURPOSE: tl.constexpr, KP: tl.constexpr, NCP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (B, programs per residual row). Each program of a row finds the row's end, one draws and stores.

    That is the last to have stored its part of the residual's mass, or the first where there is no residual.
    """
    b, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    greedy, inverse = temperature_of(temperature, b)
    j = tl.arange(0, KP)
    x, count = drafted_tokens(tokens, counts, b, K, HAS_COUNTS, KP)
    maxima, valid, top, total = statistics(t_max, t_sum, b * (K + 1), j <= count, NC, KP, NCP)
    lse = top + tl.log(total)
    known = (j < count) & (x < V)
    index = tl.where(known, x, 0)
    lse_draft = tl.zeros_like(lse)
    if greedy:
        best = best_tokens(t_arg, maxima, b * (K + 1), j <= count, NC, KP, NCP)
        accepted = valid & known & (index == best)
    else:
        best = tl.zeros_like(j)
        t_row = target + row_offset(target_starts, b, j, target_b, target_k, PACKED)
        t_cuts = load_cut(t_values, t_lasts, row_number(target_starts, b, j, K + 1, PACKED), known)
        t_x = left(tl.load(t_row + index * target_v, mask=known, other=-INF).to(tl.float32), index, t_cuts)
        draft_probs = tl.full([KP], 1.0, tl.float32)
        if HAS_DRAFT:
            lse_draft = draft_scales(draft_lse, d_max, d_sum, b, K, j < count, NC, HAS_LSE, KP, NCP)
            d_row = draft + row_offset(draft_starts, b, j, draft_b, draft_k, PACKED)
            d_cuts = load_cut(d_values, d_lasts, row_number(draft_starts, b, j, K, PACKED), known)
            d_x = left(tl.load(d_row + index * draft_v, mask=known, other=-INF).to(tl.float32), index, d_cuts)
            draft_probs = tl.exp(d_x * inverse - lse_draft)
        u = uniform(tl.load(seed + b), tl.load(position + b) + j, ACCEPT)
        below = u * draft_probs.to(tl.float64) < tl.exp(t_x * inverse - lse).to(tl.float64)
        accepted = valid & known & below
    n = tl.min(tl.where(accepted, KP, j), axis=0)
    end, rejected = j == n, n < count
    sound = at(end, (known & (lse_draft > -INF) & (lse_draft < INF)).to(tl.int32)) > 0
    target_valid = at(end, valid.to(tl.int32)) > 0
    sampled = target_valid & (greedy == 0)
    mode = tl.where(sampled, tl.where(rejected & sound, RESIDUAL if HAS_DRAFT else ONE_HOT, TARGET), DONE)
    share, lse_t, lse_d = 1.0, at(end, lse), at(end, lse_draft)
    t_end = target + row_offset(target_starts, b, n, target_b, target_k, PACKED)
    t_cut = load_cut(t_values, t_lasts, row_number(target_starts, b, n, K + 1, PACKED), True)
    d_end, m_row, finishes = draft, mass, part == 0
    d_cut = load_cut(None, None, n, True)
    if HAS_DRAFT:
        d_cut = load_cut(d_values, d_lasts, row_number(draft_starts, b, n, K, PACKED), rejected)
        d_end = draft + row_offset(draft_starts, b, n, draft_b, draft_k, PACKED)
        m_row = mass + b * NC
        if mode == RESIDUAL:
            store_mass(
                t_end, target_v, t_cut, d_end, draft_v, d_cut, inverse, lse_t, lse_d, share, m_row, part,
                V, NC, PER, CHUNK,
            )  # fmt: skip
            finishes = arrives_last(arrivals + b, tl.num_programs(1))
    if finishes:
        token = tl.where(target_valid, at(end, best), 0)
        state = tl.where(target_valid, tl.where(sampled & rejected & (sound == 0), 2, 0), 1)
        if mode != DONE:
            draws = at(end, uniform(tl.load(seed + b), tl.load(position + b) + j, PURPOSE))
            cells = (b * (K + 1) + n) * NC
            token, broken = draw(
                t_end, target_v, t_cut, d_end, draft_v, d_cut, t_max + cells, t_sum + cells, m_row, mode,
                at(end, index), inverse, at(end, top), lse_t, lse_d, share, draws,
                V, NC, HAS_DRAFT, NCP, CHUNK,
            )  # fmt: skip
            state = tl.where(broken, 2, state)
        store_row(out, num_accepted, status, b, K, x, n, token, state, KP)
        if lses is not None:
            tl.store(lses + b, tl.where(target_valid, lse_t, float("nan")))
            tl.store(tops + b, tl.where(target_valid, 1.0 / at(end, total), float("nan")))
