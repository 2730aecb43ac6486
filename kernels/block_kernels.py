"""The kernel of block verification that comes after the sweep; `block.py` launches and describes it."""
# ruff: noqa: N803 (Triton's compile-time constants are written in capitals)
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from .philox import RESAMPLE
from .primitives import (
    ACCEPT,
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
    left,
    load_cut,
    row_number,
    row_offset,
    statistics,
    store_mass,
    store_row,
    sum_chunks,
    temperature_of,
    uniform,
)

DRAW: tl.constexpr = tl.constexpr(RESAMPLE)


@triton.jit
def kept_shares(ratio, K, KP: tl.constexpr):
    """p [KP]: p_0 = 1, p_i = min(1, p_(i-1)·ratio_(i-1)), and 0 from a NaN on. ratio [KP]: target / draft.

    One after the other, in every program alike, so that all of a sequence's programs hold the same numbers.
    """
    j = tl.arange(0, KP)
    shares = tl.full([KP], 1.0, tl.float32)
    share = tl.max(shares, axis=0)
    for i in range(K):
        product = share * at(j == i, ratio)
        share = tl.where(product < 1, product, tl.where(product >= 1, 1.0, 0.0))
        shares = tl.where(j == i + 1, share, shares)
    return shares


@triton.jit
def load_masses(mass, first, needed, NC, KP: tl.constexpr, NCP: tl.constexpr):
    """The residual's mass at each position [KP], 0 where it was not needed: the chunks' in one order."""
    chunks = tl.arange(0, NCP)
    cells = (first + tl.arange(0, KP))[:, None] * NC + chunks[None, :]
    inside = needed[:, None] & (chunks < NC)[None, :]
    # from the second cache: other programs have just stored them
    parts = tl.load(mass + cells, mask=inside, other=0.0, cache_modifier=".cg")
    return sum_chunks(parts, KP, NCP)


@triton.jit
def longest_accepted(shares, masses, limit, seed, position, KP: tl.constexpr):
    """The longest prefix whose random number falls below its chance h; 0 where none does.

    h_i = m_i / (m_i + 1 − p_i), with the residual's mass at the position after the prefix; at `limit` p_i.
    """
    j = tl.arange(0, KP)
    whole = shares >= 1
    chance = tl.where(whole, 1.0, masses / tl.where(whole, 1.0, masses + 1 - shares))
    chance = tl.where(j == limit, shares, chance)
    below = uniform(seed, position + j - 1, ACCEPT) < chance.to(tl.float64)
    return tl.max(tl.where(below & (j >= 1) & (j <= limit), j, 0), axis=0)


@triton.jit(do_not_specialize=["K"])
def judge(
    target, target_b, target_k, target_v, target_starts, draft, draft_b, draft_k, draft_v, draft_starts,
    t_values, t_lasts, d_values, d_lasts, tokens, counts, draft_lse, temperature, seed, position,
    t_max, t_sum, t_arg, d_max, d_sum, arrivals, mass, out, num_accepted, status, V, NC, K,
    PER: tl.constexpr, HAS_DRAFT: tl.constexpr, HAS_LSE: tl.constexpr, HAS_COUNTS: tl.constexpr,
    PACKED: tl.constexpr, KP: tl.constexpr, NCP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (B, programs per residual, K positions); (B, 1, 1) without draft_logits. mass [B·K, NC].

    Each program finds the kept shares and stores its part of one position's residual; the sequence's last
    one chooses the prefix, draws and stores.
    """
    b, part, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    greedy, inverse = temperature_of(temperature, b)
    j = tl.arange(0, KP)
    x, count = drafted_tokens(tokens, counts, b, K, HAS_COUNTS, KP)
    maxima, valid, top, total = statistics(t_max, t_sum, b * (K + 1), j <= count, NC, KP, NCP)
    lse = top + tl.log(total)
    sound = valid & (j < count) & (x < V)
    index = tl.where(sound, x, 0)
    lse_draft, likes, shares = tl.zeros_like(lse), tl.zeros_like(lse), tl.zeros_like(lse)
    finishes = (part == 0) & (i == 0)
    if greedy == 0:
        t_row = target + row_offset(target_starts, b, j, target_b, target_k, PACKED)
        t_cuts = load_cut(t_values, t_lasts, row_number(target_starts, b, j, K + 1, PACKED), sound)
        t_x = left(tl.load(t_row + index * target_v, mask=sound, other=-INF).to(tl.float32), index, t_cuts)
        likes = tl.exp(t_x * inverse - lse)
        ratio = likes
        if HAS_DRAFT:
            lse_draft = draft_scales(draft_lse, d_max, d_sum, b, K, j < count, NC, HAS_LSE, KP, NCP)
            d_row = draft + row_offset(draft_starts, b, j, draft_b, draft_k, PACKED)
            d_cuts = load_cut(d_values, d_lasts, row_number(draft_starts, b, j, K, PACKED), sound)
            d_x = left(tl.load(d_row + index * draft_v, mask=sound, other=0.0).to(tl.float32), index, d_cuts)
            ratio = likes / tl.exp(d_x * inverse - lse_draft)
        shares = kept_shares(ratio, K, KP)
        if HAS_DRAFT:
            here = j == i
            # where no share is left nothing will be accepted, drawn or asked about
            if at(here, (sound & (shares > 0)).to(tl.int32)) > 0:
                store_mass(
                    target + row_offset(target_starts, b, i, target_b, target_k, PACKED), target_v,
                    load_cut(t_values, t_lasts, row_number(target_starts, b, i, K + 1, PACKED), True),
                    draft + row_offset(draft_starts, b, i, draft_b, draft_k, PACKED), draft_v,
                    load_cut(d_values, d_lasts, row_number(draft_starts, b, i, K, PACKED), True),
                    inverse, at(here, lse), at(here, lse_draft), at(here, shares), mass + (b * K + i) * NC,
                    part, V, NC, PER, CHUNK,
                )  # fmt: skip
            finishes = arrives_last(arrivals + b, tl.num_programs(1) * tl.num_programs(2))
    if finishes:
        if greedy:
            best = best_tokens(t_arg, maxima, b * (K + 1), j <= count, NC, KP, NCP)
            n = tl.min(tl.where(sound & (index == best), KP, j), axis=0)
            limit = n
        else:
            best = tl.zeros_like(j)
            if HAS_DRAFT:
                masses = load_masses(mass, b * K, sound & (shares > 0), NC, KP, NCP)
            else:  # a certain draft has one token that the residual may lose
                masses = shares * (1 - likes) + tl.maximum(shares * likes - 1, 0.0)
            limit = tl.min(tl.where(sound & (masses == masses), KP, j), axis=0)
            n = longest_accepted(shares, masses, limit, tl.load(seed + b), tl.load(position + b), KP)
        end = j == n
        target_valid = at(end, valid.to(tl.int32)) > 0
        unsound = (greedy == 0) & (n == limit) & (n < count)
        state = tl.where(target_valid, tl.where(unsound, 2, 0), 1)
        token = tl.where(target_valid, at(end, best), 0)
        if target_valid & (greedy == 0):
            draws = at(end, uniform(tl.load(seed + b), tl.load(position + b) + j, DRAW))
            cells = (b * (K + 1) + n) * NC
            t_end = target + row_offset(target_starts, b, n, target_b, target_k, PACKED)
            t_cut = load_cut(t_values, t_lasts, row_number(target_starts, b, n, K + 1, PACKED), True)
            d_end, m_row, d_cut = draft, mass, load_cut(None, None, n, True)
            if HAS_DRAFT:
                d_cut = load_cut(d_values, d_lasts, row_number(draft_starts, b, n, K, PACKED), n < count)
                d_end = draft + row_offset(draft_starts, b, n, draft_b, draft_k, PACKED)
                m_row = mass + (b * K + n) * NC
            token, _ = draw(
                t_end, target_v, t_cut, d_end, draft_v, d_cut, t_max + cells, t_sum + cells, m_row,
                tl.where(n < limit, RESIDUAL if HAS_DRAFT else ONE_HOT, TARGET), at(end, index), inverse,
                at(end, top), at(end, lse), at(end, lse_draft), at(end, shares), draws,
                V, NC, HAS_DRAFT, NCP, CHUNK,
            )  # fmt: skip
        store_row(out, num_accepted, status, b, K, x, n, token, state, KP)
