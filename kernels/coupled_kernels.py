"""The two kernels of coupled sampling, which `coupled.py` launches and describes."""
# ruff: noqa: N803 (Triton's compile-time constants are written in capitals)
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from .philox import COUPLED
from .primitives import (
    BIG,
    GREEDY,
    INF,
    at,
    best_tokens,
    drafted_tokens,
    finite_or_zero,
    left,
    load_cut,
    row_number,
    row_offset,
    statistics,
    store_row,
)

PURPOSE: tl.constexpr = tl.constexpr(COUPLED)


@triton.jit
def gumbel(seed, position, first, SIZE: tl.constexpr):
    """philox.gumbel of the tokens first … first + SIZE − 1, float64 [SIZE]. first and SIZE divide by 4."""
    fourth = first // 4 + tl.arange(0, SIZE // 4)
    zero = fourth - fourth
    low = (position & 0xFFFFFFFF).to(tl.uint32) + zero.to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32) + zero.to(tl.uint32)
    words = tl.philox(seed, low, high, (zero + PURPOSE).to(tl.uint32), fourth.to(tl.uint32))
    word0, word1, word2, word3 = words
    word = tl.interleave(tl.interleave(word0, word2), tl.interleave(word1, word3))
    u = (word.to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
    return -tl.log(-tl.log(u))


@triton.jit(do_not_specialize=["K"])
def sweep_coupled(
    logits, stride_b, stride_k, stride_v, starts, values, lasts, counts, temperature, seed, position,
    maxima, arguments, scaled, sums, V, NC, K,
    PER: tl.constexpr, WANT_LSE: tl.constexpr, HAS_COUNTS: tl.constexpr, PACKED: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (B·(K+1) rows, programs per row). Of each chunk the best of logits/temperature + noise, and which.

    maxima float64 [rows, NC] is +inf where the chunk holds a NaN. scaled, sums: for the log-sum-exp.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, j = row // (K + 1), row % (K + 1)
    wanted = K + 1
    if HAS_COUNTS:
        wanted = tl.load(counts + b).to(tl.int32) + 1
    if j < wanted:
        value = tl.load(temperature + b).to(tl.float64)
        greedy = (value > GREEDY) == 0
        divisor = tl.where(greedy, 1.0, value)
        source = logits + row_offset(starts, b, j, stride_b, stride_k, PACKED)
        cut = load_cut(values, lasts, row_number(starts, b, j, K + 1, PACKED), True)
        for step in tl.static_range(PER):
            chunk = part * PER + step
            if chunk < NC:
                offsets = chunk * CHUNK + tl.arange(0, CHUNK)
                x = tl.load(source + offsets.to(tl.int64) * stride_v, mask=offsets < V, other=-INF)
                wide = left(x.to(tl.float64), offsets, cut) / divisor
                score = wide
                if (greedy == 0) & (tl.max(wide, axis=0) > -INF):  # a filter leaves whole chunks empty
                    score += gumbel(tl.load(seed + b), tl.load(position + b) + j, chunk * CHUNK, CHUNK)
                best = tl.max(score, axis=0)
                whole = tl.max(tl.where(score == score, 0, 1), axis=0) == 0
                tl.store(maxima + row * NC + chunk, tl.where(whole, best, INF))
                tl.store(arguments + row * NC + chunk, tl.min(tl.where(score == best, offsets, BIG), axis=0))
                if WANT_LSE:
                    narrow = wide.to(tl.float32)
                    top = tl.max(narrow, axis=0)
                    tl.store(scaled + row * NC + chunk, top)
                    total = tl.sum(tl.exp(narrow - finite_or_zero(top)), axis=0)
                    tl.store(sums + row * NC + chunk, total)


@triton.jit(do_not_specialize=["K"])
def choose(
    tokens, counts, maxima, arguments, scaled, sums, lses, tops, out, num_accepted, status, V, NC, K,
    WANT_LSE: tl.constexpr, HAS_COUNTS: tl.constexpr, KP: tl.constexpr, NCP: tl.constexpr,
):  # fmt: skip
    """Grid (B). Drafted tokens are kept as long as they are the target's choices; one more is its own."""
    b = tl.program_id(0).to(tl.int64)
    j, chunks = tl.arange(0, KP), tl.arange(0, NCP)
    x, count = drafted_tokens(tokens, counts, b, K, HAS_COUNTS, KP)
    wanted, first = j <= count, b * (K + 1)
    cells = (first + j)[:, None] * NC + chunks[None, :]
    scores = tl.load(maxima + cells, mask=wanted[:, None] & (chunks < NC)[None, :], other=-INF)
    top = tl.max(scores, axis=1)
    valid = (top > -INF) & (top < INF)
    best = best_tokens(arguments, scores, first, wanted, NC, KP, NCP)
    n = tl.min(tl.where(valid & (j < count) & (x == best), KP, j), axis=0)
    target_valid = at(j == n, valid.to(tl.int32)) > 0
    token = tl.where(target_valid, at(j == n, best), 0)
    store_row(out, num_accepted, status, b, K, x, n, token, tl.where(target_valid, 0, 1), KP)
    if WANT_LSE:
        _, sound, highest, total = statistics(scaled, sums, first, wanted, NC, KP, NCP)
        lse = tl.where(sound & valid, highest + tl.log(total), float("nan"))
        tl.store(lses + b, at(j == n, lse))
        tl.store(tops + b, at(j == n, tl.where(sound & valid, 1.0 / total, float("nan"))))
