"""The target's most likely tokens wherever a token was emitted: what the draft is to learn.

Picking sixteen of some thousand costs a few hundredths of a small model's step. The logits of several rounds
are put together and gone through at once, by a thread of its own where there is one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from moedraft.core import TopK

BATCH_BYTES = 8_000_000  # logits that are gone through together


class Batch:
    """Logits of some rounds, until somebody asks what the most likely tokens are. For any thread."""

    def __init__(self, topk: int) -> None:
        self.topk = topk
        self.bytes = 0
        self._logits: list[torch.Tensor] = []
        self._rows = 0
        self._top: TopK | None = None
        self._lock = threading.Lock()

    def add(self, logits: torch.Tensor) -> int | None:
        """[n, V] → the number of its first row; None where somebody goes, or went, through the batch."""
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


class Capture:
    """Keeps the top `topk`. After `work_beside` at most two batches of logits wait; `close` it then."""

    def __init__(self, topk: int) -> None:
        self.topk = topk
        self._batch = Batch(topk)
        self._thread: ThreadPoolExecutor | None = None
        self._job: Future[TopK] | None = None

    def keep(self, logits: torch.Tensor, counts: list[int]) -> list[Callable[[], TopK]]:
        """[Σ counts, V], a copy that is ours → for each count a function that gives its rows' top-k."""
        first = self._batch.add(logits)
        if first is None:  # a request ended, and was written down
            self._batch = Batch(self.topk)
            first = self._batch.add(logits)
        assert first is not None
        kept: list[Callable[[], TopK]] = []
        for count in counts:
            kept.append(partial(self._batch.rows, first, count))
            first += count
        if self._batch.bytes >= BATCH_BYTES:
            self._go_through()
        return kept

    def _go_through(self) -> None:
        batch, self._batch = self._batch, Batch(self.topk)
        if self._thread is None:
            batch.top()
            return
        if self._job is not None:
            wait([self._job])  # it is slower than the engine
        self._job = self._thread.submit(batch.top)

    def work_beside(self) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "moedraft-capture", initializer=torch.get_num_threads)

    def close(self) -> None:
        """End the thread. A second call does nothing."""
        if self._thread is not None:
            self._thread.shutdown()
