"""The states that are kept with replay records, a bounded number of bytes in all; the oldest go first.

A record's row here is deleted with the record itself, whoever deletes that. Knows no model.
"""

from __future__ import annotations

import logging
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sqlalchemy import Connection, Row, delete, func, insert, select

from moedraft.core import KeptStates
from moedraft.storage.db import Home
from moedraft.storage.tables import replay_states

HEADER = struct.Struct("<III")  # positions, width, crc32 of the rest: bfloat16, little-endian
HALF = torch.bfloat16
CHUNK = 32  # records whose states are in memory twice at once
PIECE = 2**24  # bytes that are deleted in one transaction, about
LARGEST_SHARE = 4  # one record may take this part of the bound

log = logging.getLogger(__name__)


def add_states(connection: Connection, found: Mapping[int, KeptStates], limit_bytes: int) -> None:
    """Keep states by their record's id. `trim_states` has to follow, after the transaction.

    Left out are those larger than a quarter of `limit_bytes`, which would empty the rest, and all where more
    than that is kept already: then it could not be trimmed.
    """
    if found and size_of_states(connection) <= limit_bytes:
        rows = [_row(number, kept) for number, kept in found.items()]
        if fitting := [row for row in rows if row["size"] <= limit_bytes // LARGEST_SHARE]:
            connection.execute(insert(replay_states), fitting)


def trim_states(home: Home, limit_bytes: int) -> None:
    """Drop the oldest states above `limit_bytes`. Raises StorageError; what was dropped until then is gone.

    What is dropped is overwritten, which takes as much room in the journal as it had itself. So it goes in
    pieces, with the journal emptied between them: else a full disk could not be freed.
    """
    size, record, excess = replay_states.c.size, replay_states.c.record, PIECE + 1
    while excess > PIECE:
        with home.write() as connection:
            excess = size_of_states(connection) - limit_bytes
            if excess <= 0:
                return
            older = func.sum(size).over(order_by=record) - size
            held = select(record, older.label("older")).subquery()
            oldest = select(held.c.record).where(held.c.older < min(excess, PIECE))
            connection.execute(delete(replay_states).where(record.in_(oldest)))
        if excess > PIECE:
            home.checkpoint(wait=False)


def read_states(connection: Connection, ids: Sequence[int], base_hash: str) -> dict[int, torch.Tensor]:
    """By record, the states [positions, H] that a drafter of this base has read, where they are kept."""
    found: dict[int, torch.Tensor] = {}
    for start in range(0, len(ids), CHUNK):
        wanted = replay_states.c.record.in_(ids[start : start + CHUNK])
        query = select(replay_states).where(wanted, replay_states.c.base_hash == base_hash)
        for row in connection.execute(query):
            states = _decoded(row)
            if states is None:
                log.warning("the features kept with replay record %d are damaged and skipped.", row.record)
            else:
                found[row.record] = states
    return found


def size_of_states(connection: Connection) -> int:
    """Bytes of all that is kept."""
    return connection.scalar(select(func.sum(replay_states.c.size))) or 0


def _row(record: int, kept: KeptStates) -> dict[str, Any]:
    states = kept.states.to("cpu", HALF).contiguous()
    body = states.view(torch.uint8).numpy().tobytes()
    payload = HEADER.pack(*states.shape, zlib.crc32(body)) + body
    return {"record": record, "base_hash": kept.base_hash, "size": len(payload), "payload": payload}


def _decoded(row: Row[tuple[object, ...]]) -> torch.Tensor | None:
    """The states of a row; None where its bytes are not what was written."""
    payload = bytes(row.payload)
    if len(payload) <= HEADER.size:
        return None
    positions, width, checksum = HEADER.unpack_from(payload)
    body = bytearray(payload[HEADER.size :])
    if len(body) != 2 * positions * width or zlib.crc32(body) != checksum:
        return None
    return torch.frombuffer(body, dtype=HALF).view(positions, width)
