"""What lies between the products of a decoder layer, in compiled functions. The plain twins: `plain.py`.

Rows are filled up with zeros to a number that products have code for, so that nothing is copied for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moedraft.cache import SlotLayer
from moedraft.cpu.compiled import BITS, add_norm, gate, take_back, turn
from moedraft.cpu.steady.attention import attend, places_of
from moedraft.cpu.steady.plain import Turns
from moedraft.cpu.steady.spans import Span

Filled = Callable[[int], int]  # rows → how many are multiplied


class FusedNorm:
    """The sum over layers in float32, and its RMS norm in the precision of the products."""

    def __init__(self, norm: Any, dtype: torch.dtype, filled: Filled) -> None:
        self.weight, self.epsilon = norm.weight.detach().float().contiguous(), float(norm.variance_epsilon)
        self.dtype, self.filled = dtype, filled
        self._call, self._zeros = add_norm(dtype, torch.float32), (BITS[dtype], BITS[torch.float32])

    def __call__(
        self, hidden: torch.Tensor, added: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `PlainNorm`'s, with the norm of rows of zeros at the end; `added` may have more rows, too."""
        rows, size = hidden.shape
        filled = self.filled(rows)
        sums = hidden if added is None else torch.empty_like(hidden)
        normed = torch.empty(filled, size, dtype=self.dtype)
        self._call(
            *self._zeros,
            hidden.data_ptr(),
            0 if added is None else added.data_ptr(),
            self.weight.data_ptr(),
            sums.data_ptr(),
            normed.data_ptr(),
            rows,
            filled,
            size,
            self.epsilon,
        )
        return sums, normed


class FusedGate:
    """As `plain_gate`, rounded once."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._call, self._zero = gate(dtype), BITS[dtype]

    def __call__(self, joined: torch.Tensor) -> torch.Tensor:
        rows, size = joined.shape[0], joined.shape[1] // 2
        out, first = joined.new_empty(rows, size), joined.data_ptr()
        second = first + size * joined.itemsize
        self._call(self._zero, first, second, out.data_ptr(), rows, size, 2 * size)
        return out


class FusedMixing:
    """Turns queries and keys by their positions, stores keys and values, and attends."""

    def __init__(self, config: Any, rotary: Any, dtype: torch.dtype, apart: bool, filled: Filled) -> None:
        """apart: as `Arrangement`'s."""
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.rotary, self.apart, self.filled = rotary, apart, filled
        self._turn, self._take_back, self._zero = turn(dtype), take_back(dtype), BITS[dtype]

    def turns(self, hidden: torch.Tensor, positions: torch.Tensor) -> Turns:
        """Cosines and sines, float32 [N, head_dim / 2]."""
        cos, sin = (turn[0].float() for turn in self.rotary(hidden, positions[None]))
        half = cos.shape[-1] // 2
        return cos[:, :half].contiguous(), sin[:, :half].contiguous()

    def __call__(
        self, joined: torch.Tensor, turns: Turns, spans: list[Span], store: SlotLayer
    ) -> torch.Tensor:
        """As `PlainMixing`'s; `joined` and the result may have more rows than there are tokens."""
        size = 2 * turns[0].shape[1]
        if not store.is_initialized:
            like = joined.new_empty(1, self.kv_heads, 1, size)
            store.lazy_initialization(like, like)
        out = joined.new_empty(self.filled(spans[-1].end), self.heads * size)
        for span in spans:
            filled = len(out) if span is spans[-1] else span.end
            self._mix(span, joined, turns, store, out[span.first : filled])
        return out

    def _mix(
        self, span: Span, joined: torch.Tensor, turns: Turns, store: SlotLayer, out: torch.Tensor
    ) -> None:
        """The attention output of one part's rows, into `out`, whose other rows become zeros."""
        (batch, width), read, rows = span.packing.shape, span.bias.shape[-1], span.end - span.first
        apart, places = places_of(width, self.heads // self.kv_heads, self.apart)
        half = turns[0].shape[1]
        joined, cos, sin = (span.of(each) for each in (joined, *turns))
        queries = joined.new_zeros(batch, self.kv_heads, places, 2 * half)
        where, first, head = span.places.data_ptr(), span.cursor.first, 2 * half * joined.itemsize
        made_of = [joined.data_ptr() + heads * head for heads in (0, self.heads, self.heads + self.kv_heads)]
        turned_by = cos.data_ptr(), sin.data_ptr(), 0
        written_to = [each.data_ptr() for each in (queries, store.keys, store.values)]
        wide, sizes = joined.shape[1], (self.heads, self.kv_heads, half, store.capacity, apart, places)
        read_at = where, span.positions.data_ptr()
        self._turn(
            self._zero, *made_of, wide, wide, *turned_by, *read_at, *written_to, rows, width, first, *sizes
        )
        keys, values = (stored[first : first + batch, :, :read] for stored in (store.keys, store.values))
        mixed = attend(queries, keys, values, span.bias, width if self.apart else 1)
        between = self.heads, self.kv_heads, 2 * half, apart, *mixed.stride()[:3]
        self._take_back(self._zero, mixed.data_ptr(), where, out.data_ptr(), rows, len(out), width, *between)
