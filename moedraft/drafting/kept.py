"""Keeps what a feature drafter reads of the target while a request runs.

`StateKeeper` keeps all of it, for the trainer; `ReadStates` the newest part, for comparing the experts.
"""

from __future__ import annotations

import torch

from moedraft.core import Sequence

HALF = torch.bfloat16  # the range of float32: states of some targets pass what float16 can hold
MOST_BYTES = 128_000_000  # of all requests that run
KEPT = 48  # of each row, the states read last that are kept for comparing the experts

Read = list[tuple[Sequence, int, int]]  # by row: the first entry that was read, and how many


class StateKeeper:
    """Appends the fused states that are read to `Sequence.states`, in half precision, on their device.

    All running requests together keep at most `limit_bytes`. A request that would pass that keeps nothing,
    nor does one whose states are not whole: the trainer computes its states again.
    """

    def __init__(self, width: int, limit_bytes: int = MOST_BYTES) -> None:
        """width: the size H of one state. limit_bytes: for the states of all running requests together."""
        self.limit_bytes = limit_bytes
        self._entry_bytes = width * HALF.itemsize
        self._entries: dict[str, int] = {}  # by running request, how many entries it keeps
        self._total = 0  # of these
        self._given_up: set[str] = set()

    @property
    def bytes(self) -> int:
        """The size of the states that are kept for all running requests."""
        return self._total * self._entry_bytes

    def keep(self, read: Read, fused: torch.Tensor) -> None:
        """fused [B, T, H], a row for each of `read`."""
        half = fused.to(HALF)
        for b, (row, start, count) in enumerate(read):
            if count and row.capture and row.request_id not in self._given_up:
                self._append(row, start, half[b, :count])

    def finish(self, row: Sequence, rest: torch.Tensor) -> None:
        """Complete the states of a request that has ended.

        rest [n, H]: states of the positions behind those that were read, at least up to the last but one.
        Afterwards `row.states` covers every position but the last, or it is empty.
        """
        left = len(row.token_ids) - 1 - self._entries.get(row.request_id, 0)
        if row.capture and row.request_id not in self._given_up and 0 <= left <= len(rest):
            row.states.append(rest[:left].to(HALF, copy=True))
        else:
            row.states = []
        self._forget(row)
        self._given_up.discard(row.request_id)

    def _append(self, row: Sequence, start: int, states: torch.Tensor) -> None:
        known = self._entries.get(row.request_id, 0)
        if start != known or self.bytes + len(states) * self._entry_bytes > self.limit_bytes:
            row.states = []
            self._forget(row)
            self._given_up.add(row.request_id)
            return
        row.states.append(states.clone())  # a view would keep the whole batch alive
        self._entries[row.request_id] = known + len(states)
        self._total += len(states)

    def _forget(self, row: Sequence) -> None:
        self._total -= self._entries.pop(row.request_id, 0)


class ReadStates:
    """The fused features that were read last, `most` entries of each row at least, by request."""

    def __init__(self, most: int = KEPT) -> None:
        self.most = most
        self._kept: dict[str, tuple[int, torch.Tensor]] = {}  # the first entry, and states [n, H] from it on

    def keep(self, read: Read, fused: torch.Tensor) -> None:
        """fused [B, T, H], a row for each of `read`."""
        for b, (row, start, count) in enumerate(read):
            if not count:
                continue
            first, before = self._kept.get(row.request_id, (start, fused[b, :0]))
            if first + len(before) != start:  # the drafter reads the text again
                first, before = start, fused[b, :0]
            states = torch.cat([before, fused[b, :count]])
            drop = len(states) - self.most if len(states) > 2 * self.most else 0
            self._kept[row.request_id] = (first + drop, states[drop:])

    def span(self, row: Sequence) -> tuple[int, int]:
        """The first entry that is kept, and the one behind the last."""
        first, states = self._kept.get(row.request_id, (0, ()))
        return first, first + len(states)

    def of(self, row: Sequence, first: int, end: int) -> torch.Tensor:
        """States [end − first, H] of entries that are kept."""
        begin, states = self._kept[row.request_id]
        return states[first - begin : end - begin]

    def forget(self, row: Sequence) -> None:
        self._kept.pop(row.request_id, None)
