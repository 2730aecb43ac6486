"""What the verification kernels share: addresses, Philox, the statistics of a row, the inverse CDF, results.

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

# how the last token of a row is found
DONE = tl.constexpr(0)  # nothing to draw: a greedy row, or an invalid one, which gets a placeholder
TARGET = tl.constexpr(1)  # draw from the target's row
ONE_HOT = tl.constexpr(2)  # draw from the target's row without the token that was drafted
RESIDUAL = tl.constexpr(3)  # draw from max(0, share·target − draft)


@triton.jit
def row_offset(starts, b, j, stride_b, stride_k, PACKED: tl.constexpr, WIDE: tl.constexpr = tl.int64):
    """Offset of row j of sequence b, in elements. It has 64 bits because B·K·V can exceed 2^31."""
    if PACKED:
        return (tl.load(starts + b).to(WIDE) + j) * stride_k
    return b.to(WIDE) * stride_b + j.to(WIDE) * stride_k


@triton.jit
def row_number(starts, b, j, PER, PACKED: tl.constexpr):
    """Row j of sequence b, counted through all sequences; PER: rows of each where they are not packed."""
    if PACKED:
        return tl.load(starts + b).to(tl.int64) + j
    return b * PER + j


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
def load_cut(values, lasts, rows, wanted):
    """What filters leave of these rows, (value, last): everything where there are no cuts, or not wanted."""
    value, last = -INF, BIG
    if values is not None:
        value = tl.load(values + rows, mask=wanted, other=-INF)
        last = tl.load(lasts + rows, mask=wanted, other=BIG)
    return value, last


@triton.jit
def left(x, tokens, cut):
    """Logits x of these tokens, -inf for those that a filter excludes. A NaN stays."""
    narrow = x.to(tl.float32)  # as the filters have seen them
    return tl.where((narrow < cut[0]) | ((narrow == cut[0]) & (tokens > cut[1])), -INF, x)


@triton.jit
def load_chunk(row, offsets, stride_v, V):
    """float32 logits of a chunk, -inf behind the vocabulary's end."""
    return tl.load(row + offsets.to(tl.int64) * stride_v, mask=offsets < V, other=-INF).to(tl.float32)


@triton.jit
def fours(values):
    """Sums of four neighbours each, which one thread holds: a running sum of them takes few registers."""
    return tl.sum(tl.reshape(values, [values.shape[0] // 4, 4]), axis=1)


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


@triton.jit
def drafted_tokens(tokens, counts, b, K, HAS_COUNTS: tl.constexpr, KP: tl.constexpr):
    """The tokens [KP] drafted for sequence b, then -1; and their number, which is the bonus row's."""
    j = tl.arange(0, KP)
    x = tl.load(tokens + b * K + j, mask=j < K, other=-1)
    if HAS_COUNTS:
        x = tl.where(j < tl.load(counts + b), x, -1)
    return x, tl.min(tl.where(x < 0, j, KP), axis=0)


@triton.jit
def statistics(maxima, sums, first, wanted, NC, KP: tl.constexpr, NCP: tl.constexpr):
    """(maxima of the chunks, valid, maximum, sum) of the KP rows from `first` on that are wanted."""
    chunks = tl.arange(0, NCP)
    cells = (first + tl.arange(0, KP))[:, None] * NC + chunks[None, :]
    inside = wanted[:, None] & (chunks < NC)[None, :]
    found = tl.load(maxima + cells, mask=inside, other=-INF)
    valid, top, total = combine(found, tl.load(sums + cells, mask=inside, other=0.0), KP, NCP)
    return found, valid, top, total


@triton.jit
def best_tokens(arguments, maxima, first, wanted, NC, KP: tl.constexpr, NCP: tl.constexpr):
    """The argmax of each of those rows, the lowest index on ties. maxima [KP, NCP]: those of the chunks."""
    chunks = tl.arange(0, NCP)
    cells = (first + tl.arange(0, KP))[:, None] * NC + chunks[None, :]
    inside = wanted[:, None] & (chunks < NC)[None, :]
    best = tl.load(arguments + cells, mask=inside, other=BIG)
    return tl.min(tl.where(maxima == tl.max(maxima, axis=1)[:, None], best, BIG), axis=1)


@triton.jit
def draft_scales(
    draft_lse, d_max, d_sum, b, K, drawn, NC,
    HAS_LSE: tl.constexpr, KP: tl.constexpr, NCP: tl.constexpr,
):  # fmt: skip
    """The log-sum-exps [KP] of the draft's rows, given or from the sweep; NaN for broken rows."""
    if HAS_LSE:
        lse = tl.load(draft_lse + b * K + tl.arange(0, KP), mask=drawn, other=0.0).to(tl.float32)
    else:
        _, valid, top, total = statistics(d_max, d_sum, b * K, drawn, NC, KP, NCP)
        lse = tl.where(valid, top + tl.log(total), float("nan"))
    return lse


@triton.jit
def residual(
    t_row, target_v, t_cut, d_row, draft_v, d_cut, offsets, inverse, lse_t, lse_d, share, V
):  # fmt: skip
    """share·target − draft of a chunk: below zero where the draft has more, NaN where a row is broken."""
    t_probs = tl.exp(left(load_chunk(t_row, offsets, target_v, V), offsets, t_cut) * inverse - lse_t)
    d_probs = tl.exp(left(load_chunk(d_row, offsets, draft_v, V), offsets, d_cut) * inverse - lse_d)
    return t_probs * share - d_probs


@triton.jit
def store_mass(
    t_row, target_v, t_cut, d_row, draft_v, d_cut, inverse, lse_t, lse_d, share, mass_row, part, V, NC,
    PER: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The residual's mass in each chunk of this program's part of one row."""
    for step in tl.static_range(PER):
        chunk = part * PER + step
        if chunk < NC:
            offsets = chunk * CHUNK + tl.arange(0, CHUNK)
            more = residual(
                t_row, target_v, t_cut, d_row, draft_v, d_cut, offsets, inverse, lse_t, lse_d, share, V
            )
            # not tl.maximum, which would drop a NaN
            tl.store(mass_row + chunk, tl.sum(tl.where(more < 0, 0.0, more), axis=0))


@triton.jit
def arrives_last(arrivals, expected):
    """Whether this program is the last of `expected`; if so, it sees all that the others have stored.

    The barrier puts the stores of all of a program's threads before the counter's step, which releases them,
    and which acquires those of the programs that have come before. Nobody waits for anybody. A launch before,
    or the last to arrive, sets the counter to zero, so that calls need no state between them.
    """
    tl.debug_barrier()
    before = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")
    return before == expected - 1


@triton.jit
def draw(
    t_row, target_v, t_cut, d_row, draft_v, d_cut, t_max, t_sum, mass_row, mode, x, inverse, top, lse_t,
    lse_d, share, u, V, NC, HAS_DRAFT: tl.constexpr, NCP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """(token, whether the residual holds a NaN): the inverse CDF in two levels, the chunk and then the token.

    t_row, d_row, t_max, t_sum, mass_row: where the row's logits and its chunks' numbers begin; t_cut, d_cut:
    what filters leave of them. x: the token
    that ONE_HOT leaves out. u: a random number. Where the residual is zero everywhere, or broken, the token
    is drawn from the target's row. The chunks' masses are added in the same order whichever program does it.
    """
    chunks = tl.arange(0, NCP)
    inside = chunks < NC
    target_mass = tl.load(t_sum + chunks, mask=inside, other=0.0)
    target_mass *= tl.exp(tl.load(t_max + chunks, mask=inside, other=-INF) - top)
    weights = target_mass
    if HAS_DRAFT:
        if mode == RESIDUAL:  # from the second cache: other programs have just stored it
            weights = tl.load(mass_row + chunks, mask=inside, other=0.0, cache_modifier=".cg")
    elif mode == ONE_HOT:  # only the drafted token's chunk differs: sum it again, without the token
        offsets = (x // CHUNK) * CHUNK + tl.arange(0, CHUNK)
        probs = tl.exp(left(load_chunk(t_row, offsets, target_v, V), offsets, t_cut) * inverse - top)
        weights = tl.where(chunks == x // CHUNK, tl.sum(tl.where(offsets == x, 0.0, probs), axis=0), weights)
    total = tl.sum(weights.to(tl.float64), axis=0)
    broken = total != total
    empty = (total > 0) == 0
    weights = tl.where(empty, target_mass, weights)
    total = tl.where(empty, tl.sum(target_mass.to(tl.float64), axis=0), total)
    mode = tl.where(empty, TARGET, mode)
    threshold = u * total
    chunk, before = pick(weights, chunks, threshold)
    offsets = chunk * CHUNK + tl.arange(0, CHUNK)
    probs = tl.exp(left(load_chunk(t_row, offsets, target_v, V), offsets, t_cut) * inverse - top)
    if HAS_DRAFT:
        if mode == RESIDUAL:
            more = residual(
                t_row, target_v, t_cut, d_row, draft_v, d_cut, offsets, inverse, lse_t, lse_d, share, V
            )
            probs = tl.maximum(more, 0.0)
    elif mode == ONE_HOT:
        probs = tl.where(offsets == x, 0.0, probs)
    token, _ = pick(probs, offsets, tl.maximum(threshold - before, 0.0))
    return token, broken


@triton.jit
def store_row(out, num_accepted, status, b, K, x, n, token, state, KP: tl.constexpr):
    """What a verification returns of sequence b: n drafted tokens x, one more, then -1; and the state."""
    j = tl.arange(0, KP)
    emitted = tl.where(j < n, x, tl.where(j == n, token.to(tl.int64), -1))
    tl.store(out + b * (K + 1) + j, emitted, mask=j <= K)
    tl.store(num_accepted + b, n)
    tl.store(status + b, state)
