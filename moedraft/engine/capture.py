"""The target's most likely tokens wherever a token was emitted: what the draft is to learn.

Picking sixteen of some thousand costs a few hundredths of a small model's step. The logits of several rounds
are put together and gone through at once, by a thread of its own where there is one.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from moedraft.core import Sequence, TopK

BATCH_BYTES = 8_000_000  # logits that are gone through together


class LogitStack:
    """Logits of some rounds, until somebody asks what the most likely tokens are. For any thread."""

    def __init__(self, topk: int) -> None:
        self.topk = topk
        self.bytes = 0
        self._logits: list[torch.Tensor] = []
        self._rows = 0
        self._top: TopK | None = None
        self._lock = threading.Lock()

    def add(self, logits: torch.Tensor) -> int | None:
        """[n, V] → the number of its first row; None once somebody began to go through the stack."""
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
        """Of all rows. The logits are let go of."""
        with self._lock:
            if self._top is None:
                logits = torch.cat(self._logits).float()
                logprobs, ids = logits.log_softmax(-1).topk(min(self.topk, logits.shape[-1]), dim=-1)
                self._top = ids.cpu(), logprobs.cpu()
                self._logits = []
            return self._top

    def rows(self, first: int, count: int) -> TopK:
        ids, logprobs = self.top()
        return ids[first : first + count], logprobs[first : first + count]


@dataclass(frozen=True)
class Captured:
    """Some rows of a stack: those of one sequence in one round."""

    stack: LogitStack
    first: int
    count: int

    def top(self) -> TopK:
        return self.stack.rows(self.first, self.count)


class Capture:
    """Keeps the top `topk`. After `work_beside` at most two stacks of logits wait; `close` it then."""

    def __init__(self, topk: int) -> None:
        self.topk = topk
        self._stack = LogitStack(topk)
        self._thread: ThreadPoolExecutor | None = None
        self._job: Future[TopK] | None = None

    def keep(
        self, sequences: list[Sequence], logits: torch.Tensor, accepted: list[int]
    ) -> dict[int, Captured]:
        """By row that may be learned from: of logits [B, K+1, V], the positions where a token was emitted."""
        wanted = [b for b, row in enumerate(sequences) if row.capture]
        if not wanted:
            return {}
        counts = [accepted[b] + 1 for b in wanted]
        chosen = torch.cat([logits[b, :count] for b, count in zip(wanted, counts, strict=True)])
        return dict(zip(wanted, self.stack(chosen, counts), strict=True))

    def stack(self, logits: torch.Tensor, counts: list[int]) -> list[Captured]:
        """[Σ counts, V], a copy that is ours → for each count, its rows."""
        first = self._stack.add(logits)
        if first is None:  # a request ended, and was written down
            self._stack = LogitStack(self.topk)
            first = self._stack.add(logits)
        assert first is not None
        kept: list[Captured] = []
        for count in counts:
            kept.append(Captured(self._stack, first, count))
            first += count
        if self._stack.bytes >= BATCH_BYTES:
            self._go_through()
        return kept

    def _go_through(self) -> None:
        stack, self._stack = self._stack, LogitStack(self.topk)
        if self._thread is None:
            stack.top()
            return
        if self._job is not None:
            wait([self._job])  # it is slower than the engine
        self._job = self._thread.submit(stack.top)

    def work_beside(self) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "moedraft-capture", initializer=torch.get_num_threads)

    def close(self) -> None:
        """End the thread. A second call does nothing."""
        if self._thread is not None:
            self._thread.shutdown()
