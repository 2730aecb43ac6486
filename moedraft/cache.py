"""A cache of keys and values with one slot for each running sequence.

Entries of rejected tokens stay until later tokens overwrite them; no sequence looks past its own end. A
forward works on a contiguous range of slots, so that reading the cache takes a view and never a copy. The
engine keeps its running sequences in the slots 0 … B−1 and swaps two slots when one of them leaves.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

GROWTH = 256  # positions that are added at least when the cache grows


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which the model's forward takes its cache.

    Older releases of transformers call it `past_key_values`; newer ones call it `cache`, and warn of the old
    name.
    """
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


@dataclass
class Cursor:
    """Where a forward writes and how far it reads."""

    first: int = 0  # the forward uses the slots first … last − 1
    last: int = 0
    start: int | None = 0  # the position of each row's first token; None: it differs between rows
    rows: torch.Tensor | None = None  # int64 [B, 1]; None where `start` is the same for all
    positions: torch.Tensor | None = None  # int64 [B, T]
    length: int = 0  # the positions 0 … length − 1 are read


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's cache. keys, values: [slots, heads, capacity, head_dim]."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, cursor: Cursor, slots: int, capacity: int) -> None:
        super().__init__()
        self.cursor = cursor
        self.slots = slots
        self.capacity = capacity

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        def empty(like: torch.Tensor) -> torch.Tensor:
            return like.new_zeros(self.slots, like.shape[1], self.capacity, like.shape[3])

        self.keys, self.values = empty(key_states), empty(value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [B, heads, T, head_dim] at the cursor; return all keys and values that are read."""
        return self.write(self.cursor, key_states, value_states)

    def write(
        self, at: Cursor, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `update`, at a cursor of the caller's own."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._put(at, self.keys, key_states), self._put(at, self.values, value_states)

    @staticmethod
    def _put(at: Cursor, store: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        rows = store[at.first : at.last]
        if at.start is not None:
            rows[:, :, at.start : at.start + states.shape[2]] = states
        else:
            rows[at.rows, :, at.positions] = states.transpose(1, 2)
        return rows[:, :, : at.length]

    def grow(self, capacity: int) -> None:
        if self.is_initialized:
            more = (0, 0, 0, capacity - self.capacity)
            keys, values = (torch.nn.functional.pad(store, more) for store in (self.keys, self.values))
            self.keys, self.values = keys, values  # both or, where memory does not suffice, neither
        self.capacity = capacity

    def swap(self, a: int, b: int, length: int) -> None:
        if self.is_initialized:
            for store in (self.keys, self.values):
                first, second = store[a, :, :length], store[b, :, :length]
                kept = first.clone()
                first.copy_(second)
                second.copy_(kept)

    def clear(self, slot: int) -> None:
        if self.is_initialized:
            self.keys[slot], self.values[slot] = 0, 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cursor.length, 0

    def get_seq_length(self) -> int:
        return max(self.cursor.length - 1, 0)

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):  # type: ignore[misc]
    """A transformers `Cache` over fixed slots, for models with full attention in every layer."""

    def __init__(self, num_layers: int, slots: int, capacity: int = GROWTH) -> None:
        self.cursor = Cursor()
        self.capacity = capacity
        self.slots = slots
        super().__init__(layers=[SlotLayer(self.cursor, slots, capacity) for _ in range(num_layers)])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The largest position of the tokens that are read. Raises NotImplementedError for a later layer.

        Models and masks ask for layer 0. Attention that asks for its own layer would take the answer for the
        position of every row, though each slot has another one.
        """
        if layer_idx:
            raise NotImplementedError("its attention takes positions from the length of the cache")
        return int(super().get_seq_length(layer_idx))

    def at(self, first: int, starts: list[int], width: int, device: torch.device) -> torch.Tensor:
        """Set the cursor for the next forward, as `cursor_at` makes it. Returns the positions."""
        vars(self.cursor).update(vars(self.cursor_at(first, starts, width, device)))
        assert self.cursor.positions is not None
        return self.cursor.positions

    def cursor_at(self, first: int, starts: list[int], width: int, device: torch.device) -> Cursor:
        """A cursor for `width` tokens in each of the slots first, first + 1 …

        starts: the position of each slot's first token. Grows the cache where it is too short.
        """
        count, length = len(starts), max(starts) + width
        if first < 0 or first + count > self.slots:
            raise IndexError(f"the cache has {self.slots} slots, not {first + count}.")
        self.reserve(length)
        steps = torch.arange(width, device=device)
        if all(start == starts[0] for start in starts):
            positions = (steps + starts[0]).expand(count, width)
            return Cursor(first, first + count, starts[0], None, positions, length)
        positions = torch.tensor(starts, device=device)[:, None] + steps
        rows = torch.arange(count, device=device)[:, None]
        return Cursor(first, first + count, None, rows, positions, length)

    def reserve(self, length: int) -> None:
        """Grow the cache where it has fewer positions than `length`."""
        if length > self.capacity:
            wanted = max(length, self.capacity + GROWTH, self.capacity * 3 // 2)
            self._grow(wanted + -wanted % GROWTH)

    def swap(self, a: int, b: int, length: int) -> None:
        """Exchange the first `length` positions of two slots."""
        for layer in self.layers:
            layer.swap(a, b, length)

    def clear(self, slot: int) -> None:
        """Set a slot to zeros.

        This is needed only where it may hold a NaN. Attention reads every row up to the longest row's end,
        with a weight of zero past the row's own end, and zero times NaN is NaN.
        """
        for layer in self.layers:
            layer.clear(slot)

    def _grow(self, capacity: int) -> None:
        for layer in self.layers:
            layer.grow(capacity)
        self.capacity = capacity
