"""Writes the statistics and the replay records of finished requests into storage.

A full or slow disk never stops serving: learning pauses, `state` says why, and it goes on by itself when a
write succeeds again.
"""

from __future__ import annotations

import logging
import threading
import time
import unicodedata
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import torch

from moedraft.core import KeptStates, ReplayRecord, RequestStats, Sequence, StorageError
from moedraft.cpu.threads import compute_alone
from moedraft.learning_state import LearningKind, LearningState, paused
from moedraft.storage.last_target import note_target
from moedraft.storage.store import Store

GATHER_SECONDS = 0.1  # how long a write waits for more requests to share its transaction
MOST = 1000  # requests that may wait to be written, usually about 30 MB; further ones are not recorded
MOST_BYTES = 100_000_000  # of waiting requests, unless there is only one; writing takes six times as much
NUMBER_BYTES = 36  # bytes of a token id in a list
TOPK_BYTES = 12  # bytes of each of a token's k alternatives, as tensors
LOGPROB_BYTES = 120  # bytes of each alternative that was asked for with the answer
USUAL_TOPK = 16  # the assumed k until the first record shows it
FLUSH_SECONDS = 10.0

log = logging.getLogger(__name__)

LEARNING = LearningState(LearningKind.LEARNING)

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

    After `record_beside` a thread writes them, so that the engine never waits for the disk; the requests of
    a tenth of a second share a transaction. The owner then has to call `close`.
    """

    def __init__(self, store: Store, target_id: str, base_hash: str = "", tokenizer: Any = None) -> None:
        """base_hash: of the draft base, for the states that its drafter keeps; tokenizer: the target's."""
        self.store = store
        self.target_id, self.base_hash = target_id, base_hash
        self._tokenizer = tokenizer  # until the home knows whose its records are
        self.state = LEARNING  # or paused, with the reason
        self._thread: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()  # of `_box` and `_job`
        self._box: list[Sequence] = []  # ended, not yet written
        self._bytes = 0  # of these, estimated
        self._topk = USUAL_TOPK
        self._job: Future[None] | None = None  # the write that was submitted last
        self._hurry = threading.Event()

    def __call__(self, sequence: Sequence) -> None:
        if not sequence.counted or sequence.finish_reason in ("abort", "error") or not sequence.num_generated:
            return
        if self._thread is None:
            self._write([sequence])
            return
        size = size_of(sequence, self._topk)
        with self._lock:
            if sequence.states and self._bytes + size > MOST_BYTES:
                sequence.states = []  # the trainer can compute them; what else is kept cannot be had again
                size = size_of(sequence, self._topk)
            if not self._box or (len(self._box) < MOST and self._bytes + size <= MOST_BYTES):
                self._box.append(sequence)
                self._bytes += size
                if len(self._box) == 1:
                    self._job = self._thread.submit(self._write_box)
                return
        self._pause("the disk is slower than the requests")

    def record_beside(self) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "moedraft-recorder", initializer=compute_alone)

    def flush(self) -> None:
        """Wait until all requests that have ended are written, or could not be written.

        Raises StorageError if that takes longer than FLUSH_SECONDS.
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
            batch, self._box, self._bytes = self._box, [], 0
        self._write(batch)

    def _write(self, batch: list[Sequence]) -> None:
        """Write a batch; never raises. If one request gives no valid record, the others are still written."""
        captured = [one for one in batch if one.captured]
        try:
            lost = add_all(self._add_records, captured)
            uncounted = add_all(self._add_stats, batch)
        except StorageError as error:
            self._pause(str(error))
            return
        if faults := lost + uncounted:
            log.error("%d records could not be made.", len(faults), exc_info=faults[0])
        if len(lost) == len(captured) > 0 or len(uncounted) == len(batch):
            self._pause(f"records cannot be made ({type(faults[0]).__name__})")
            return
        if self.state.is_paused:
            log.warning("Learning goes on: records can be stored again.")
        self.state = LEARNING

    def _add_records(self, batch: list[Sequence]) -> None:
        if self._tokenizer is not None:
            note_target(self.store.registry, self.target_id, self._tokenizer)
            self._tokenizer = None
        records = [replay_record(one, self.target_id) for one in batch]
        self._topk = len(records[0].topk_ids[0])
        self.store.replay.add(records, [kept_states(one, self.base_hash) for one in batch])

    def _add_stats(self, batch: list[Sequence]) -> None:
        self.store.requests.add([request_stats(one) for one in batch])

    def _pause(self, reason: str) -> None:
        if not self.state.is_paused:
            log.warning("Learning is paused: %s", reason)
        self.state = paused(reason)


def size_of(sequence: Sequence, topk: int = USUAL_TOPK) -> int:
    """About how many bytes a finished sequence keeps in memory while it waits to be written."""
    alternatives = len(sequence.logprobs) * (1 + (sequence.params.logprobs or 0))
    size = NUMBER_BYTES * len(sequence.token_ids) + LOGPROB_BYTES * alternatives
    size += sum(part.nbytes for part in sequence.states)
    return size + (TOPK_BYTES * topk * sequence.num_generated if sequence.captured else 0)


def add_all(add: Callable[[list[Sequence]], None], batch: list[Sequence]) -> list[Exception]:
    """Add all in one transaction or, if that fails, each in its own; returns the errors of those that fail.

    Raises StorageError.
    """
    try:
        if batch:
            add(batch)
    except StorageError:
        raise
    except Exception as error:
        if len(batch) == 1:
            return [error]
        return [fault for one in batch for fault in add_all(add, [one])]
    return []


def replay_record(sequence: Sequence, target_id: str) -> ReplayRecord:
    """The record of a finished sequence: position i of its top-k belongs to token i of the answer.

    Tokens that were verified but lie behind the end of the answer are left out.
    """
    count = sequence.num_generated
    captured = [rows.top() for rows in sequence.captured]
    ids = torch.cat([ids for ids, _ in captured])[:count]
    logprobs = torch.cat([logprobs for _, logprobs in captured])[:count]
    return ReplayRecord(
        domain=sequence.domain,
        expert=sequence.expert,
        adapter_version=sequence.adapter_version,
        target_id=target_id,
        token_ids=list(sequence.token_ids),
        num_prompt_tokens=sequence.num_prompt_tokens,
        topk_ids=ids.tolist(),
        topk_logprobs=logprobs.tolist(),
        rejected=[i for i in sequence.rejected if i < count],
        drafted=sequence.speculation.num_draft_tokens,
        accepted=sequence.speculation.num_accepted_tokens,
        created_at=ended_at(sequence),
        source=sequence.source,
        pinned=sequence.pinned,
        weights=sequence.weights,
        heard=sequence.heard,
        temperature=sequence.params.temperature,
    )


def kept_states(sequence: Sequence, base_hash: str) -> KeptStates | None:
    """What the drafter has read of the target, where that was kept."""
    return KeptStates(base_hash, torch.cat(sequence.states).cpu()) if sequence.states else None


def request_stats(sequence: Sequence) -> RequestStats:
    finished = sequence.finished_at or time.monotonic()
    return RequestStats(
        request_id=sequence.request_id,
        expert=sequence.domain,
        adapter_version=sequence.adapter_version,
        lang=script_of(sequence.prompt),
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_tokens=sequence.num_generated,
        speculation=sequence.speculation,
        seconds=finished - sequence.arrived_at,
        finish_reason=sequence.finish_reason or "",
        confidence=sequence.confidence,
        time_to_first_token=sequence.first_token_at and sequence.first_token_at - sequence.arrived_at,
        created_at=ended_at(sequence),
        overruled=sequence.overruled,
    )


def ended_at(sequence: Sequence) -> float:
    """When the sequence ended, in seconds since the epoch; it may be recorded some time later."""
    now = time.monotonic()
    return time.time() - (now - (sequence.finished_at or now))
