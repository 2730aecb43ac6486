"""Records that came since an update and that no adapter has been trained on, to measure adapters by."""

from __future__ import annotations

from collections.abc import Callable

from moedraft.core import ReplayRecord
from moedraft.distill.judging.held_out import LEAST_JUDGED, USABLE
from moedraft.storage.filing import filed
from moedraft.storage.retention.holding import is_held_out
from moedraft.storage.retention.shares import Held, of_many
from moedraft.storage.store import TARGET_ID, Store

MOST = 32  # new records that are measured before an update
LOOKED_AT = 4 * MOST  # newest records of which these are chosen
REMEMBERED = 512  # of the newest records that an update knew of, those whose prompts count as trained on


def fresh_records(
    store: Store, first: int, known: set[int], concerns: Callable[[str], bool]
) -> dict[str, list[ReplayRecord]]:
    """The records from id `first` on, by domain, one of each prompt; of a client no more than of all others.

    known: hashes of prompts that are not new; those that are found are added. concerns: whether records of a
    domain are wanted. None are held out: by these the next candidate is judged itself.
    """
    new: dict[int, ReplayRecord] = {}
    target, moved = store.registry.get_meta(TARGET_ID), filed(store.registry)
    for record in store.replay.newest(LOOKED_AT, first, target):
        prompt = prompt_of(record)
        left_out = prompt in known or record.id in moved or is_held_out(record)
        if concerns(record.domain) and not left_out and len(record.topk_ids) >= USABLE:
            known.add(prompt)
            new[record.id] = record
    held = [Held(one.id, one.source, one.pinned) for one in new.values()]
    found: dict[str, list[ReplayRecord]] = {}
    for number in of_many(held, MOST, LEAST_JUDGED):
        found.setdefault(new[number].domain, []).append(new[number])
    return found


def prompt_of(record: ReplayRecord) -> int:
    """A hash of its prompt's tokens."""
    return hash(tuple(record.token_ids[: record.num_prompt_tokens]))
