"""What the verification kernels share: row addresses, Philox, the statistics of a chunk, the inverse CDF.

Every row is cut into chunks of a width that depends on the vocabulary alone. Sums are taken within each chunk
first and over the chunks then. So a row's numbers are the same to the last bit in any batch, and however its
chunks are spread over programs.
"""
# ruff: noqa: N803 (Triton's compile-time constants are written in capitals)
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

BIG: tl.constexpr = tl.constexpr(2147483647)
INF: tl.constexpr = tl.constexpr(float("inf"))
GREEDY: tl.constexpr = tl.constexpr(1e-5)  # reference.GREEDY_BELOW
ACCEPT: tl.constexpr = tl.constexpr(2)  # philox.ACCEPT


@triton.jit
def row_offset(starts, b, j, stride_b, stride_k, PACKED: tl.constexpr, WIDE: tl.constexpr = tl.int64):
    """Offset of row j of sequence b, in elements. It has 64 bits because B·K·V can exceed 2^31."""
    if PACKED:
        return (tl.load(starts + b).to(WIDE) + j) * stride_k
    return b.to(WIDE) * stride_b + j.to(WIDE) * stride_k


@triton.jit
def uniform(seed, position, PURPOSE: tl.constexpr):
    """philox.uniform: float64 in (0, 1) from 46 bits; seed int64 scalar, position int64 block."""
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = low - low
    word0, word1, _, _ = tl.philox(seed, low, high, zero + PURPOSE, zero)
    return ((word0 >> 9).to(tl.float64) * 8388608.0 + (word1 >> 9).to(tl.float64) + 0.5) * (
        1.0 / 70368744177664.0
    )


@triton.jit
def temperature_of(temperature, b):
    """(greedy, 1/temperature) of sequence b. NaN and negative temperatures are greedy; greedy rows get 1."""
    value = tl.load(temperature + b).to(tl.float32)
    greedy = (value > GREEDY) == 0
    return greedy, 1.0 / tl.where(greedy, 1.0, value)


@triton.jit
def finite_or_zero(x):
    return tl.where((x > -INF) & (x < INF), x, 0.0)


@triton.jit
def load_chunk(row, offsets, stride_v, V):
    """float32 logits of a chunk, -inf behind the vocabulary's end."""
    return tl.load(row + offsets.to(tl.int64) * stride_v, mask=offsets < V, other=-INF).to(tl.float32)


@triton.jit
def sum_chunks(values, ROWS: tl.constexpr, CHUNKS: tl.constexpr):
    """Sums of [ROWS, CHUNKS] over the chunks, neighbours first: always in this order.

    The order of tl.sum follows the layout of the block, which depends on the number of rows, and with it on
    how many tokens were drafted. CHUNKS is a power of two.
    """
    if CHUNKS == 1:
        total = tl.reshape(values, [ROWS])
    else:  # the compiler goes on behind a `return`
        even, odd = tl.split(tl.reshape(values, [ROWS, CHUNKS // 2, 2]))
        total = sum_chunks(even + odd, ROWS, CHUNKS // 2)
    return total


@triton.jit
def combine(maxima, sums, ROWS: tl.constexpr, CHUNKS: tl.constexpr):
    """(valid, maximum, sum of e^(x − maximum)) of each row from those of its chunks, [ROWS, CHUNKS].

    A row with a NaN or a +inf, or of nothing but -inf, is not valid.
    """
    maximum = tl.max(maxima, axis=1)
    safe = finite_or_zero(maximum)
    total = sum_chunks(sums * tl.exp(maxima - safe[:, None]), ROWS, CHUNKS)
    valid = (maximum > -INF) & (maximum < INF) & (total == total)
    return valid, safe, tl.where(valid, total, 1.0)


@triton.jit
def at(selected, values):
    """The only selected entry of a block, as a scalar."""
    return tl.sum(tl.where(selected, values, 0), axis=0)


@triton.jit
def pick(weights, index, threshold):
    """First index whose running sum exceeds threshold (float64), and the sum before it.

    An entry of weight zero is never chosen: it was filtered out. It has to be excluded explicitly, because a
    running sum computed in parallel is not monotone.
    """
    wide = weights.to(tl.float64)
    running = tl.cumsum(wide, axis=0)
    first = tl.min(tl.where((running > threshold) & (weights > 0), index, BIG), axis=0)
    last = tl.max(tl.where(weights > 0, index, 0), axis=0)
    chosen = tl.minimum(first, last)  # rounding may leave the threshold above the last sum
    return chosen, tl.sum(tl.where(index < chosen, wide, 0.0), axis=0)
