"""Which sequence is in which slot: first come, first served. The slots in use are 0 … B−1, without a gap.

Slots 0 … num_ready−1 hold sequences that decode, the slots after them those whose prompt is still being
read. When a sequence ends or becomes ready, a callback swaps slots in both caches to keep this order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice

from moedraft.core import Sequence


class Scheduler:
    """`swap(a, b, length)` exchanges two slots in all caches; their longer text has `length` tokens."""

    def __init__(self, slots: int, swap: Callable[[int, int, int], None]) -> None:
        self.slots = slots
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # index = slot
        self.num_ready = 0
        self._swap = swap

    @property
    def ready(self) -> list[Sequence]:
        return self.running[: self.num_ready]

    @property
    def reading(self) -> list[Sequence]:
        return self.running[self.num_ready :]

    def admit(self) -> list[Sequence]:
        """Give free slots to waiting sequences, and return these."""
        new = []
        while self.waiting and len(self.running) < self.slots:
            sequence = self.waiting.popleft()
            sequence.slot = len(self.running)
            self.running.append(sequence)
            new.append(sequence)
        return new

    def to_ask_for(self, new: list[Sequence]) -> list[Sequence]:
        """Sequences for whose expert the selector should be asked now; each is returned once.

        Where one that was just admitted is among them, so are those that wait next: prompts that are routed
        together cost less than half as much as one by one, and these have their expert from the first token.
        """
        if all(row.asked for row in new):
            return []
        unknown = [row for row in (*new, *islice(self.waiting, self.slots)) if not row.asked]
        for row in unknown:
            row.asked = True
        return unknown

    def pieces(self, most: int) -> list[tuple[Sequence, int]]:
        """How many tokens of each prompt to read in this step, about `most` in all.

        Each unread prompt gets an equal share, and what a short one does not need goes to the longer ones.
        At least one token of each is read, so that no prompt keeps another waiting. The last token of a
        prompt is not read here: the first round of decoding feeds it.
        """
        rests = [one.num_prompt_tokens - 1 - one.target_cached for one in self.reading]
        counts = list(rests)
        for place, index in enumerate(sorted(range(len(rests)), key=rests.__getitem__)):
            counts[index] = min(rests[index], max(1, most // (len(rests) - place)))
            most -= counts[index]
        return list(zip(self.reading, counts, strict=True))

    def mark_ready(self, sequence: Sequence) -> None:
        """Let this sequence, whose prompt has been read, take part in the rounds from now on."""
        self._exchange(sequence.slot, self.num_ready)
        self.num_ready += 1

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from its slot or from the queue."""
        if sequence.slot < 0:
            self.waiting.remove(sequence)
            return
        if sequence.slot < self.num_ready:
            self.num_ready -= 1
            self._exchange(sequence.slot, self.num_ready)
        self._exchange(sequence.slot, len(self.running) - 1)
        self.running.pop()
        sequence.slot = -1

    def __contains__(self, sequence: Sequence) -> bool:
        return any(one is sequence for one in (*self.running, *self.waiting))

    def clear(self) -> None:
        """Free all slots without swapping anything; used after a failure that left them inconsistent."""
        self.running.clear()
        self.num_ready = 0

    def _exchange(self, a: int, b: int) -> None:
        if a == b:
            return
        first, second = self.running[a], self.running[b]
        self._swap(a, b, max(len(first.token_ids), len(second.token_ids)))
        first.slot, second.slot = b, a
        self.running[a], self.running[b] = second, first
