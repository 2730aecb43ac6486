"""Which records are held out: never trained on, so that the gate can judge updates by them.

About one prompt in eight, by a hash of its tokens. By the hash alone a domain of sixteen records has none in
one case of eight, and the gate would decide on its traffic without seeing it. So where a domain has fewer
than its share, its next prompt is held out as well. That is decided once, when a record is stored: what was
trained on does not become held out, and copies of a prompt stay on one side, in whichever domain, while one
of them is kept.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, func, select

from moedraft.core import ReplayRecord
from moedraft.storage.tables import replay

EVERY = 8  # one prompt of this many is held out
FIRST = 3  # prompts of a domain, of which one is held out at the latest


def is_held_out(record: ReplayRecord) -> bool:
    """Whether this record only measures updates; where storage has not decided that, by its prompt alone."""
    if record.held_out is not None:
        return record.held_out
    ids = ",".join(map(str, record.token_ids[: record.num_prompt_tokens]))
    return zlib.crc32(ids.encode()) % EVERY == 0


def share(prompts: int) -> int:
    """How many of so many prompts of a domain are held out at least."""
    return max(0, prompts + EVERY - FIRST) // EVERY


def hold_out(connection: Connection, rows: Sequence[dict[str, Any]], records: Sequence[ReplayRecord]) -> None:
    """Decide which of these records are held out, and say so in the rows of the table that are to be added.

    rows: of the records, in their order, with the domains under which they are stored.
    """
    counts: dict[str, dict[bool, int]] = {}
    decided: dict[int, bool] = {}
    for row, record in zip(rows, records, strict=True):
        domain, prompt = row["domain"], row["prompt"]
        if prompt not in decided and (copies := _copies(connection, prompt)):
            decided[prompt] = is_held_out(record) if copies[0] is None else copies[0]
        if prompt not in decided:
            if domain not in counts:
                counts[domain] = _counts(connection, domain)
            known = counts[domain]
            behind = record.held_out is None and known[True] < share(known[True] + known[False] + 1)
            decided[prompt] = behind or is_held_out(record)
            known[decided[prompt]] += 1
        row["held_out"] = decided[prompt]


def _counts(connection: Connection, domain: str) -> dict[bool, int]:
    """How many prompts of the domain are trained on (False) and held out (True), of those decided on."""
    query = select(replay.c.held_out, func.count(replay.c.prompt.distinct())).group_by(replay.c.held_out)
    found = {row[0]: row[1] for row in connection.execute(query.where(replay.c.domain == domain))}
    return {side: found.get(side, 0) for side in (False, True)}


def _copies(connection: Connection, prompt: int) -> list[bool | None]:
    """What was decided on a record with this prompt, if there is one; None for one from before that."""
    query = select(replay.c.held_out).where(replay.c.prompt == prompt).order_by(replay.c.held_out.desc())
    return list(connection.scalars(query.limit(1)))
