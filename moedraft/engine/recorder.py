"""What becomes of finished requests: statistics and replay records go into storage.

A full disk never stops serving: learning pauses, the reason stands in `status`, and it goes on by itself
when a write succeeds again.
"""

from __future__ import annotations

import logging
import time
import unicodedata
from collections import Counter

import torch

from moedraft.core import ReplayRecord, RequestStats, Sequence, StorageError
from moedraft.storage.store import Store

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


def script_of(text: str) -> str:
    """The writing system of most letters, "other" where none is known. Kana anywhere means Japanese."""
    letters = [c for c in text[:2000] if c.isalpha()]
    names = Counter(SCRIPTS.get(unicodedata.name(c, "").split(" ")[0], "other") for c in letters)
    if names["kana"] > 0.05 * len(letters):
        return "kana"
    return names.most_common(1)[0][0] if names else "other"


class Recorder:
    """An engine sink: statistics of every finished request, a replay record of those captured."""

    def __init__(self, store: Store, target_id: str) -> None:
        self.store = store
        self.target_id = target_id
        self.status = "learning"  # or "paused: <reason>"

    def __call__(self, sequence: Sequence) -> None:
        if sequence.finish_reason in ("abort", "error") or not sequence.num_generated:
            return
        try:
            if sequence.captured:
                self.store.replay.add([replay_record(sequence, self.target_id)])
            self.store.requests.add([request_stats(sequence)])
            if self.status != "learning":
                log.warning("Learning goes on: records can be stored again.")
            self.status = "learning"
        except StorageError as error:
            if self.status == "learning":
                log.warning("Learning is paused: %s", error)
            self.status = f"paused: {error}"


def replay_record(sequence: Sequence, target_id: str) -> ReplayRecord:
    """Position i of the top-k belongs to answer token i; what was verified past the end is dropped."""
    count = sequence.num_generated
    ids = torch.cat([ids for ids, _ in sequence.captured])[:count]
    logprobs = torch.cat([logprobs for _, logprobs in sequence.captured])[:count]
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
    )
