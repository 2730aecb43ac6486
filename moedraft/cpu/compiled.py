"""Small operations of a decoder layer, each compiled into one function by Numba.

Between two products of a step PyTorch calls a dozen operations, each of a microsecond or two; with SmolLM2 on
two cores they took a quarter of a step. Here a norm with the sum before it is one call, and so are
turning queries and keys and storing keys and values, and the gate of an MLP. A token's numbers come from the
same instructions whatever else is computed with it: a row is computed by itself, on one thread.

The functions are given addresses and check nothing: `steady/fused.py` and `feature_layer.py` call them with
tensors that are contiguous and large enough. `zero` has the type of the model's numbers; those in bfloat16
are handled as their bits.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, njit, types
from numba.extending import intrinsic, overload

log = logging.getLogger(__name__)

BITS = {torch.bfloat16: np.uint16(0), torch.float32: np.float32(0)}  # what `zero` is, by precision
INTEGER, NUMBER = np.int64(0), np.float32(0)
QUIET = 0x7FC0  # a NaN in bfloat16


@intrinsic  # type: ignore[untyped-decorator]
def pointer(typing_context: Any, address: Any, zero: Any) -> Any:
    """An address as a pointer to numbers like `zero`, of which `carray` makes an array."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(zero)(address, zero), generate


def wide(value: Any) -> Any:
    """A stored number as float32."""


def as_stored(like: Any, value: Any) -> Any:
    """float32 → a number as the array `like` stores it: itself, or the bits of the nearest bfloat16."""


@overload(wide)  # type: ignore[untyped-decorator]
def _wide(value: Any) -> Any:
    def from_bits(value: Any) -> Any:
        return np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)

    def itself(value: Any) -> Any:
        return value

    return from_bits if isinstance(value, types.Integer) else itself


@overload(as_stored)  # type: ignore[untyped-decorator]
def _as_stored(like: Any, value: Any) -> Any:
    def rounded(like: Any, value: Any) -> Any:
        bits = np.float32(value).view(np.uint32)
        nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        return np.uint16(nearest) if value == value else np.uint16(QUIET)

    def itself(like: Any, value: Any) -> Any:
        return value

    return rounded if isinstance(like.dtype, types.Integer) else itself


def _norm(
    zero: Any, x: Any, chosen: Any, weight: Any, out: Any, rows: Any, known: Any, parts: Any, size: Any,
    step: Any, epsilon: Any,
) -> None:  # fmt: skip
    """RMS norm of each of `parts` parts of rows of x, [known, parts, size].

    chosen int64 [rows]: which rows of x these are, row 0 where there is no such row; address 0: the first
    ones. weight float32 [parts, size]. out: row i begins at i · `step`.
    """
    given = carray(pointer(x, zero), (known, parts, size))
    which = carray(pointer(chosen, INTEGER), (rows,))
    factors = carray(pointer(weight, NUMBER), (parts, size))
    normed = carray(pointer(out, zero), (rows * step,))
    for row in range(rows):
        of = which[row] if chosen != 0 else row
        of = of if 0 <= of < known else 0
        for part in range(parts):
            squares = np.float32(0)
            for i in range(size):
                squares += wide(given[of, part, i]) * wide(given[of, part, i])
            factor = np.float32(1) / np.sqrt(squares / np.float32(size) + np.float32(epsilon))
            to = normed[row * step + part * size : row * step + (part + 1) * size]
            for i in range(size):
                to[i] = as_stored(to, wide(given[of, part, i]) * factor * factors[part, i])


def _add_norm(
    zero: Any, stream: Any, hidden: Any, added: Any, weight: Any, sums: Any, out: Any, rows: Any, filled: Any,
    size: Any, epsilon: Any,
) -> None:  # fmt: skip
    """out = RMS norm of hidden + added, and sums = hidden + added; address 0: nothing is added.

    hidden, sums [rows, size], of numbers like `stream`; added [rows, size]; weight float32 [size]; out
    [filled, size], of which the last rows become zeros.
    """
    before = carray(pointer(hidden, stream), (rows, size))
    factors = carray(pointer(weight, NUMBER), (size,))
    after = carray(pointer(sums, stream), (rows, size))
    normed = carray(pointer(out, zero), (filled, size))
    if added != 0:
        more = carray(pointer(added, zero), (rows, size))
        for row in range(rows):
            for i in range(size):
                after[row, i] = as_stored(after, wide(before[row, i]) + wide(more[row, i]))
    else:
        after = before
    for row in range(rows):
        squares = np.float32(0)
        for i in range(size):
            squares += wide(after[row, i]) * wide(after[row, i])
        factor = np.float32(1) / np.sqrt(squares / np.float32(size) + np.float32(epsilon))
        for i in range(size):
            normed[row, i] = as_stored(normed, wide(after[row, i]) * factor * factors[i])
    for row in range(rows, filled):
        for i in range(size):
            normed[row, i] = zero


def _turn(
    zero: Any, asking: Any, making: Any, holding: Any, asking_step: Any, making_step: Any, cosines: Any,
    sines: Any, chosen: Any, places: Any, positions: Any, queries: Any, keys: Any, values: Any, rows: Any,
    width: Any, first: Any, heads: Any, kv_heads: Any, half: Any, capacity: Any, apart: Any, most: Any,
) -> None:  # fmt: skip
    """Turn queries and keys by their positions, lay the queries out for attention, store keys and values.

    asking [heads, 2 half] of the first row, and so on every `asking_step` numbers; making, the keys, and
    holding, the values, [kv_heads, 2 half], every `making_step` numbers. cosines, sines float32 [·, half];
    chosen int64 [rows]: which of them are a row's; address 0: its own. places int64 [rows]: slot · `width` +
    the number of the token among those of its slot, where slots are counted from `first` on; address 0:
    0, 1, 2, …; positions int64 [rows].
    queries [slots, kv_heads, most, 2 half]: a token's are `apart` places from the next one's. keys, values
    [slots, kv_heads, capacity, 2 half].
    """
    group = heads // kv_heads
    asks = carray(pointer(asking, zero), (rows * asking_step,))
    made = carray(pointer(making, zero), (rows * making_step,))
    holds = carray(pointer(holding, zero), (rows * making_step,))
    cos = carray(pointer(cosines, NUMBER), (1, half))
    sin = carray(pointer(sines, NUMBER), (1, half))
    which = carray(pointer(chosen, INTEGER), (rows,))
    place = carray(pointer(places, INTEGER), (rows,))
    position = carray(pointer(positions, INTEGER), (rows,))
    asked = carray(pointer(queries, zero), (1, kv_heads, most, 2, half))
    stored = carray(pointer(keys, zero), (1, kv_heads, capacity, 2, half))
    held = carray(pointer(values, zero), (1, kv_heads, capacity, 2, half))
    for row in range(rows):
        at = place[row] if places != 0 else row
        slot = at // width
        token = at - slot * width
        by = which[row] if chosen != 0 else row
        x = asks[row * asking_step :][: 2 * half * heads].reshape(heads, 2, half)
        y = made[row * making_step :][: 2 * half * kv_heads].reshape(kv_heads, 2, half)
        z = holds[row * making_step :][: 2 * half * kv_heads].reshape(kv_heads, 2, half)
        for head in range(heads):
            of = head // group
            to = asked[slot, of, token * apart + head - of * group]
            for i in range(half):
                a, b = wide(x[head, 0, i]), wide(x[head, 1, i])
                to[0, i] = as_stored(to, a * cos[by, i] - b * sin[by, i])
                to[1, i] = as_stored(to, b * cos[by, i] + a * sin[by, i])
        for head in range(kv_heads):
            to, kept = stored[first + slot, head, position[row]], held[first + slot, head, position[row]]
            for i in range(half):
                a, b = wide(y[head, 0, i]), wide(y[head, 1, i])
                to[0, i] = as_stored(to, a * cos[by, i] - b * sin[by, i])
                to[1, i] = as_stored(to, b * cos[by, i] + a * sin[by, i])
                kept[0, i], kept[1, i] = z[head, 0, i], z[head, 1, i]


def _take_back(
    zero: Any, mixed: Any, places: Any, out: Any, rows: Any, filled: Any, width: Any, heads: Any,
    kv_heads: Any, size: Any, apart: Any, slots_apart: Any, heads_apart: Any, queries_apart: Any,
) -> None:  # fmt: skip
    """Attention's output, laid out as the queries were → out [filled, heads, size]; the last are zeros."""
    group = heads // kv_heads
    place = carray(pointer(places, INTEGER), (rows,))
    found = carray(pointer(mixed, zero), (1,))
    rest = carray(pointer(out, zero), (filled, heads, size))
    for row in range(rows):
        at = place[row] if places != 0 else row
        slot = at // width
        token = at - slot * width
        for head in range(heads):
            of = head // group
            query = token * apart + head - of * group
            begin = slot * slots_apart + of * heads_apart + query * queries_apart
            for i in range(size):
                rest[row, head, i] = found[begin + i]
    for row in range(rows, filled):
        for head in range(heads):
            for i in range(size):
                rest[row, head, i] = zero


@njit(fastmath={"contract", "nsz"})  # type: ignore[untyped-decorator]
def exponential(x: Any) -> Any:
    """e^x of a float32, with a relative error of some 1e-7, in operations that vectorise; 0 below e^−87."""
    scaled = x * np.float32(1.4426950408889634)
    scaled = np.float32(-126) if scaled < np.float32(-126) else scaled
    scaled = np.float32(127) if scaled > np.float32(127) else scaled
    whole = np.floor(scaled)
    rest = (scaled - whole) * np.float32(0.6931471805599453)
    power = np.float32(1 / 720) + rest * np.float32(1 / 5040)
    power = np.float32(1 / 120) + rest * power
    power = np.float32(1 / 24) + rest * power
    power = np.float32(1 / 6) + rest * power
    power = np.float32(1) + rest * (np.float32(1) + rest * (np.float32(0.5) + rest * power))
    return power * np.uint32(np.uint32(np.int32(whole) + np.int32(127)) << np.uint32(23)).view(np.float32)


def _gate(
    zero: Any, gates: Any, ups: Any, out: Any, rows: Any, size: Any, step: Any
) -> None:  # fmt: skip
    """out [rows, size] = SiLU of gates · ups, of which row i begins at i · `step`."""
    gate = carray(pointer(gates, zero), (rows * step,))
    up = carray(pointer(ups, zero), (rows * step,))
    mixed = carray(pointer(out, zero), (rows, size))
    for row in range(rows):
        one, other, to = gate[row * step :][:size], up[row * step :][:size], mixed[row]
        for i in range(size):
            x = wide(one[i])
            to[i] = as_stored(to, x / (np.float32(1) + exponential(-x)) * wide(other[i]))


def _compiled(function: Any, zeros: tuple[Any, ...], integers: int, numbers: int = 0) -> Any:
    """`function` compiled for such numbers, kept in a file for the next start where that is possible."""
    signature = types.void(
        *[types.uint16 if zero.itemsize == 2 else types.float32 for zero in zeros],
        *[types.int64] * integers,
        *[types.float64] * numbers,
    )
    options = {"fastmath": {"reassoc", "contract", "nsz"}, "error_model": "numpy", "nogil": True}
    try:
        made = njit(signature, cache=True, **options)(function)
        if _is_for(made, signature):  # two processes that compile at once may have mixed up their files
            return made
    except Exception as error:  # no folder that may be written to, a full disk, a damaged file
        log.warning("Compiled code cannot be kept, so every start compiles again: %s", error)
    made = njit(signature, **options)(function)
    if not _is_for(made, signature):
        raise RuntimeError("Numba is switched off (NUMBA_DISABLE_JIT).")
    return made


def _is_for(made: Any, signature: Any) -> bool:
    return [found.args for found in getattr(made, "nopython_signatures", ())] == [signature.args]


@cache
def norm(dtype: torch.dtype) -> Any:
    """`_norm` for a model in this precision."""
    return _compiled(_norm, (BITS[dtype],), 9, 1)


@cache
def add_norm(dtype: torch.dtype, stream: torch.dtype) -> Any:
    """`_add_norm` for products in one precision and a sum over layers in the other."""
    return _compiled(_add_norm, (BITS[dtype], BITS[stream]), 8, 1)


@cache
def turn(dtype: torch.dtype) -> Any:
    """`_turn` for a model in this precision."""
    return _compiled(_turn, (BITS[dtype],), 22)


@cache
def take_back(dtype: torch.dtype) -> Any:
    """`_take_back` for a model in this precision."""
    return _compiled(_take_back, (BITS[dtype],), 13)


@cache
def gate(dtype: torch.dtype) -> Any:
    """`_gate` for a model in this precision."""
    return _compiled(_gate, (BITS[dtype],), 6)
