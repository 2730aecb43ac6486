"""A replay record as a row of its table, and back."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from hashlib import blake2b
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Row

from moedraft.core import HOTTEST, ReplayRecord
from moedraft.storage.records.codec import DamagedPayload, answer_in, decode, encode, shares_of

log = logging.getLogger(__name__)


def row_of(record: ReplayRecord, draw: float) -> dict[str, Any]:
    """The table's row. draw: the record's random number, by which a reservoir keeps it or not."""
    return {
        "domain": record.domain,
        "expert": record.expert,
        "adapter_version": record.adapter_version,
        "target_id": record.target_id,
        "num_prompt_tokens": record.num_prompt_tokens,
        "drafted": record.drafted,
        "accepted": record.accepted,
        "created_at": record.created_at,
        "draw": draw,
        "payload": encode(record),
        "source": record.source,
        "pinned": record.pinned,
        "weights": json.dumps(record.weights) if record.weights else None,
        "heard": json.dumps(record.heard) if record.heard else None,
        "prompt": prompt_hash(record),
        "temperature": record.temperature,
    }


def temperature_of(stored: object) -> float:
    """A temperature as it was stored; 0 for anything that none can be."""
    known = isinstance(stored, int | float) and 0 <= stored <= HOTTEST  # false for NaN
    return float(cast(float, stored)) if known else 0.0


def prompt_hash(record: ReplayRecord) -> int:
    """A signed number of 64 bits that records of one prompt share; two others hardly ever do."""
    prompt = np.asarray(record.token_ids[: record.num_prompt_tokens], dtype="<i8")
    return int.from_bytes(blake2b(prompt.tobytes(), digest_size=8).digest(), "little", signed=True)


def decoded(rows: Iterable[Row[Any]]) -> Iterator[ReplayRecord]:
    """Records of `rows`; a damaged one is left out and logged."""
    for row in rows:
        try:
            payload = decode(row.payload, row.num_prompt_tokens)
        except DamagedPayload as error:
            log.warning("replay record %d of '%s' is damaged and skipped: %s", row.id, row.domain, error)
            continue
        yield ReplayRecord(
            domain=row.domain,
            expert=row.expert,
            adapter_version=row.adapter_version,
            target_id=row.target_id,
            num_prompt_tokens=row.num_prompt_tokens,
            drafted=row.drafted,
            accepted=row.accepted,
            created_at=row.created_at,
            source=row.source,
            pinned=row.pinned,
            weights=shares_of(row.weights),
            heard=shares_of(row.heard),
            held_out=row.held_out,
            temperature=temperature_of(row.temperature),
            id=row.id,
            **payload._asdict(),
        )


def answers_in(rows: Iterable[Row[Any]]) -> Iterator[NDArray[np.int32]]:
    """The answers' token ids; a damaged record is left out, and logged by those who learn from it."""
    for row in rows:
        with suppress(DamagedPayload):
            yield answer_in(row.payload, row.num_prompt_tokens)
