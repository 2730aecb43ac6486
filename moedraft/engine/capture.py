"""Keeps the target's most likely tokens at each position of an answer: what the draft is to learn.

Sorting them out in every round would cost a small model some percent of its speed. So the logits of several
rounds are collected in a stack, and the stack is searched at once, in a server by a thread of its own.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moedraft.cpu.threads import compute_alone

if TYPE_CHECKING:
    from moedraft.core import Sequence, TopK

BATCH_BYTES = 8_000_000  # a stack with this many bytes of logits is searched


class LogitStack:
    """Logits of some rounds, replaced by their most likely tokens when these are asked for. Thread-safe."""

    def __init__(self, topk: int) -> None:
        self.topk = topk
        self.bytes = 0
        self._logits: list[torch.Tensor] = []
        self._rows = 0
        self._top: TopK | None = None
        self._lock = threading.Lock()

    def add(self, logits: torch.Tensor) -> int | None:
        """Append logits [n, V] and return the index of their first row; None if the search has begun."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            if self._top is not None:
                return None
            first = self._rows
            self._logits.append(logits)
            self._rows += len(logits)
            self.bytes += logits.nbytes
            return first
        finally:
            self._lock.release()

    @torch.inference_mode()
    def top(self) -> TopK:
        """The most likely tokens of all rows. The first call computes them and frees the logits."""
        with self._lock:
            if self._top is None:
                logits = torch.cat(self._logits).float()
                logprobs, ids = logits.log_softmax(-1).topk(min(self.topk, logits.shape[-1]), dim=-1)
                self._top = ids.cpu(), logprobs.cpu()
                self._logits = []
            return self._top

    @property
    def searched(self) -> bool:
        """Whether the most likely tokens are known, and the logits freed."""
        return self._top is not None

    def rows(self, first: int, count: int) -> TopK:
        """The most likely tokens of some rows."""
        ids, logprobs = self.top()
        return ids[first : first + count], logprobs[first : first + count]


@dataclass(frozen=True)
class Captured:
    """Some rows of a stack: those of one sequence in one round."""

    stack: LogitStack
    first: int
    count: int

    @property
    def searched(self) -> bool:
        """Whether the most likely tokens are known, and the logits freed."""
        return self.stack.searched

    def top(self) -> TopK:
        return self.stack.rows(self.first, self.count)


class Capture:
    """Keeps the `topk` most likely tokens at each position.

    After `work_beside` a thread searches the full stacks, of which at most two exist at a time; the owner
    then has to call `close`.
    """

    def __init__(self, topk: int) -> None:
        self.topk = topk
        self._stack = LogitStack(topk)
        self._thread: ThreadPoolExecutor | None = None
        self._job: Future[TopK] | None = None

    def keep(
        self, sequences: list[Sequence], logits: torch.Tensor, accepted: list[int]
    ) -> dict[int, Captured]:
        """Keep logits [B, K+1, V] at the emitted positions of the rows that may be learned from.

        Returns, by row, what gives their most likely tokens later.
        """
        wanted = [b for b, row in enumerate(sequences) if row.capture]
        if not wanted:
            return {}
        counts = [accepted[b] + 1 for b in wanted]
        chosen = torch.cat([logits[b, :count] for b, count in zip(wanted, counts, strict=True)])
        return dict(zip(wanted, self.stack(chosen, counts), strict=True))

    def stack(self, logits: torch.Tensor, counts: list[int]) -> list[Captured]:
        """Put logits [Σ counts, V] on the stack, which keeps the tensor itself; for each count, its rows."""
        first = self._stack.add(logits)
        if first is None:  # a finished request was recorded, so this stack has been searched already
            self._stack = LogitStack(self.topk)
            first = self._stack.add(logits)
        assert first is not None
        kept: list[Captured] = []
        for count in counts:
            kept.append(Captured(self._stack, first, count))
            first += count
        if self._stack.bytes >= BATCH_BYTES:
            self._search()
        return kept

    def _search(self) -> None:
        """Search the full stack, here or in the thread, and begin a new one."""
        stack, self._stack = self._stack, LogitStack(self.topk)
        if self._thread is None:
            stack.top()
            return
        if self._job is not None:
            wait([self._job])  # the thread is slower than the engine; more stacks would take more memory
        self._job = self._thread.submit(stack.top)

    def work_beside(self) -> None:
        """Search full stacks in a thread from now on."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "moedraft-capture", initializer=compute_alone)

    def close(self) -> None:
        """End the thread. A second call does nothing."""
        if self._thread is not None:
            self._thread.shutdown()
