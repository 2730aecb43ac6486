"""What becomes of finished requests: statistics and replay records go into storage.

A full or slow disk never stops serving: learning pauses, the reason stands in `status`, and it goes on by
itself when a write succeeds again.
"""

from __future__ import annotations

import logging
import threading
import time
import unicodedata
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache

import torch

from moedraft.core import ReplayRecord, RequestStats, Sequence, StorageError
from moedraft.storage.store import Store

GATHER_SECONDS = 0.1  # after the first request to be written: those that end meanwhile share its transaction
MOST = 1000  # requests that wait to be written, about 30 MB; what comes then is not recorded
FLUSH_SECONDS = 10.0

log = logging.getLogger(__name__)

SCRIPTS = {
    "LATIN": "latin",
    "CYRILLIC": "cyrillic",
    "CJK": "han",
    "HIRAGANA": "kana",
    "KATAKANA": "kana",
    "HANGUL": "hangul",
    "ARABIC": "arabic",
    "GREEK": "greek",
    "DEVANAGARI": "devanagari",
}


@lru_cache(maxsize=4096)
def _script_of_letter(letter: str) -> str:
    return SCRIPTS.get(unicodedata.name(letter, "").split(" ")[0], "other")


def script_of(text: str) -> str:
    """The writing system of most letters, "other" where none is known. Kana anywhere means Japanese."""
    names = Counter[str]()
    for letter, count in Counter(text[:2000]).items():
        if letter.isalpha():
            names[_script_of_letter(letter)] += count
    if names["kana"] > 0.05 * names.total():
        return "kana"
    return names.most_common(1)[0][0] if names.total() else "other"


class Recorder:
    """An engine sink: statistics of every finished request, a replay record of those captured.

    After `record_beside` a thread of its own writes them, those of a tenth of a second in one transaction,
    and the engine waits for no disk. `close` it then.
    """

    def __init__(self, store: Store, target_id: str) -> None:
        self.store = store
        self.target_id = target_id
        self.status = "learning"  # or "paused: <reason>"
        self._thread: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()  # of `_box` and `_job`
        self._box: list[Sequence] = []  # ended, not yet written
        self._job: Future[None] | None = None  # the last one that was to empty it
        self._hurry = threading.Event()

    def __call__(self, sequence: Sequence) -> None:
        if sequence.finish_reason in ("abort", "error") or not sequence.num_generated:
            return
        if self._thread is None:
            self._write([sequence])
            return
        with self._lock:
            if len(self._box) < MOST:
                self._box.append(sequence)
                if len(self._box) == 1:
                    self._job = self._thread.submit(self._write_box)
                return
        self._pause("the disk is slower than the requests")

    def record_beside(self) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "moedraft-recorder", initializer=torch.get_num_threads)

    def flush(self) -> None:
        """Returns when what has ended before is written down, or could not be.

        Raises StorageError where that takes longer than FLUSH_SECONDS.
        """
        with self._lock:
            job = self._job
        if job is None:
            return
        self._hurry.set()
        try:
            job.result(FLUSH_SECONDS)
        except TimeoutError:
            raise StorageError(f"The home {self.store.home.path} takes no records; try again.") from None
        finally:
            self._hurry.clear()

    def close(self) -> None:
        """Write what is there, and end the thread. A second call does nothing."""
        self._hurry.set()
        if self._thread is not None:
            self._thread.shutdown()

    def _write_box(self) -> None:
        self._hurry.wait(GATHER_SECONDS)
        with self._lock:
            batch, self._box = self._box, []
        try:
            self._write(batch)
        except Exception:
            log.exception("%d requests were not recorded.", len(batch))

    def _write(self, batch: list[Sequence]) -> None:
        try:
            self.store.replay.add([replay_record(one, self.target_id) for one in batch if one.captured])
            self.store.requests.add([request_stats(one) for one in batch])
        except StorageError as error:
            self._pause(str(error))
            return
        if self.status != "learning":
            log.warning("Learning goes on: records can be stored again.")
        self.status = "learning"

    def _pause(self, reason: str) -> None:
        if self.status == "learning":
            log.warning("Learning is paused: %s", reason)
        self.status = f"paused: {reason}"


def replay_record(sequence: Sequence, target_id: str) -> ReplayRecord:
    """Position i of the top-k belongs to answer token i; what was verified past the end is dropped."""
    count = sequence.num_generated
    captured = [top() for top in sequence.captured]
    ids = torch.cat([ids for ids, _ in captured])[:count]
    logprobs = torch.cat([logprobs for _, logprobs in captured])[:count]
    return ReplayRecord(
        domain=sequence.expert,
        expert=sequence.expert,
        adapter_version=sequence.adapter_version,
        target_id=target_id,
        token_ids=list(sequence.token_ids),
        num_prompt_tokens=sequence.num_prompt_tokens,
        topk_ids=ids.tolist(),
        topk_logprobs=logprobs.tolist(),
        rejected=[i for i in sequence.rejected if i < count],
        drafted=sequence.drafted,
        accepted=sequence.accepted,
        created_at=ended_at(sequence),
    )


def request_stats(sequence: Sequence) -> RequestStats:
    finished = sequence.finished_at or time.monotonic()
    return RequestStats(
        request_id=sequence.request_id,
        expert=sequence.expert,
        adapter_version=sequence.adapter_version,
        lang=script_of(sequence.prompt),
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_tokens=sequence.num_generated,
        num_steps=sequence.num_steps,
        num_drafts=sequence.num_drafts,
        num_draft_tokens=sequence.drafted,
        num_accepted_tokens=sequence.accepted,
        seconds=finished - sequence.arrived_at,
        finish_reason=sequence.finish_reason or "",
        confidence=sequence.confidence,
        time_to_first_token=sequence.first_token_at and sequence.first_token_at - sequence.arrived_at,
        drafted_at=list(sequence.drafted_at),
        accepted_at=list(sequence.accepted_at),
        num_lookup_tokens=sequence.looked_up,
        num_accepted_lookup_tokens=sequence.lookup_accepted,
        created_at=ended_at(sequence),
    )


def ended_at(sequence: Sequence) -> float:
    """Seconds since the epoch; it may be written down later."""
    now = time.monotonic()
    return time.time() - (now - (sequence.finished_at or now))
