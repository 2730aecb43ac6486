"""The replay buffers: what the target answered, a bounded number of records per domain.

The shared adapter has no second copy: its buffer is the records of all domains, drawn evenly by
`sample_stratified`. Records whose prompt fitted no domain are stored under the domain "shared".
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Select, delete, func, insert, select

from moedraft.core import SHARED, InvalidRequest, KeptStates, ReplayRecord, StorageError
from moedraft.storage.db import Home
from moedraft.storage.records import trainer_file
from moedraft.storage.records.codec import shares_of
from moedraft.storage.records.replay_rows import answers_in, decoded, row_of
from moedraft.storage.records.states import PIECE, add_states, read_states, size_of_states, trim_states
from moedraft.storage.retention.eviction import POLICIES, Policy, evict
from moedraft.storage.retention.holding import hold_out
from moedraft.storage.retention.shares import (
    LEAST_TAUGHT,
    Held,
    draw,
    even_shares,
    few_copies,
    of_many,
    one_of_each_prompt,
    within_shares,
)
from moedraft.storage.tables import domains, replay, replay_states
from moedraft.storage.versions.version_rows import PURGES, raise_counter

if TYPE_CHECKING:
    import torch

CHUNK = 32  # rows of a sample that are in memory at once

log = logging.getLogger(__name__)


class Compared(NamedTuple):
    """How the drafts of one answer stood by the evidence alone."""

    id: int
    source: str
    heard: dict[str, float]


class ReplayBuffer:
    """At most `capacity` records per domain. All methods raise StorageError where the home fails.

    `policy` says which records of a full domain are kept. "fifo": the newest. "reservoir": a uniform sample
    of all that ever came; each record draws a random number once, and those with the smallest numbers stay
    (Vitter's reservoir by random keys). "hardest": those with the smallest share of accepted draft tokens,
    the newer of two with the same share; records without any draft are removed first. "stratified": the
    newest of each client, as many of one as of another where they have so many. No client fills a
    buffer alone where others have records, whatever the policy: see `shares`. Nor does one prompt: where
    it comes again to a full domain, only the newest COPIES of its client's records with it stay, and as
    many are given by `sample`, `sample_stratified` and `newest`. `seed` makes the reservoir's
    draws repeatable. Features kept with the records take at most `states_bytes`; 0: none are added.
    """

    def __init__(
        self,
        home: Home,
        capacity: int,
        policy: Policy = "fifo",
        seed: int | None = None,
        states_bytes: int = 0,
    ) -> None:
        if policy not in POLICIES:
            raise InvalidRequest(f"replay policy {policy!r} must be one of {', '.join(POLICIES)}.")
        if capacity < 1:
            raise InvalidRequest(f"replay capacity must be >= 1, not {capacity}.")
        self._home = home
        self.capacity = capacity
        self._policy = policy
        self._states_bytes = states_bytes
        # With the seed alone, the draws after a restart would repeat those of the records that are kept.
        self._random = Random() if seed is None else Random(f"{seed}:{self.last_id()}")

    def add(self, records: Sequence[ReplayRecord], states: Sequence[KeptStates | None] = ()) -> None:
        """Store all of `records` or none. Once this returns they survive the end of this process.

        A record of a domain that is not registered (any more) is stored under "shared". `states` are those
        of the records, in their order, where there are any. Raises InvalidRequest for a record that is
        malformed, StorageFull for a full disk.
        """
        rows = [row_of(record, self._random.random()) for record in records]
        if not rows:
            return
        with self._home.write() as connection:
            known = {SHARED, *connection.scalars(select(domains.c.name))}
            for row in rows:
                row["domain"] = row["domain"] if row["domain"] in known else SHARED
            hold_out(connection, rows, records)
            stored = insert(replay).returning(replay.c.id, sort_by_parameter_order=True)
            ids = connection.scalars(stored, rows).all()
            kept = {number: one for number, one in zip(ids, states, strict=False) if one is not None}
            add_states(connection, kept, self._states_bytes)
            for domain in {row["domain"] for row in rows}:
                added = {(row["source"], row["prompt"]) for row in rows}
                evict(connection, domain, self.capacity, self._policy, added)
        if kept and self._states_bytes:
            self._trim()

    def trim_states(self) -> None:
        """Drop the features above the bound, the oldest first, all where that is 0; for a server's start."""
        self._trim()
        self._home.checkpoint(wait=False)  # until then the journal still holds them

    def _trim(self) -> None:
        """What cannot be dropped now is dropped later; until then no more are added."""
        try:
            trim_states(self._home, self._states_bytes)
        except StorageError as error:
            log.warning("Features above the bound cannot be deleted now: %s", error)

    def records(
        self,
        domain: str | None = None,
        limit: int | None = None,
        newest_first: bool = True,
        min_id: int | None = None,
    ) -> list[ReplayRecord]:
        """Records of `domain` (None: of all) with an id of at least `min_id`, at most `limit`."""
        query = _of(select(replay), domain).order_by(replay.c.id.desc() if newest_first else replay.c.id)
        if min_id is not None:
            query = query.where(replay.c.id >= min_id)
        with self._home.read() as connection:
            rows = connection.execute(query.limit(limit)).all()
        return list(decoded(rows))

    def answers(
        self, domain: str, limit: int, min_id: int = 0, target_id: str | None = None
    ) -> list[NDArray[np.int32]]:
        """The tokens of the newest `limit` answers of `domain` with an id of at least `min_id`, newest first.

        With `target_id` only that target's. Nothing else of the records is decoded, which takes a fraction of
        the time.
        """
        query = _of(select(replay.c.payload, replay.c.num_prompt_tokens), domain)
        query = query.where(replay.c.id >= min_id).order_by(replay.c.id.desc())
        if target_id is not None:
            query = query.where(replay.c.target_id == target_id)
        with self._home.read() as connection:
            return list(answers_in(connection.execute(query.limit(limit)).all()))

    def unclaimed(self, limit: int) -> list[ReplayRecord]:
        """The newest records of no domain, as far as `shares` allow; none whose client asked for "shared"."""
        held = [one for one in self._held(SHARED, None).get(SHARED, []) if not one.pinned]
        return list(self._fetched(within_shares(held[::-1], limit)))

    def compared(self, limit: int | None = None) -> list[Compared]:
        """The newest `limit` records of whose answers the drafts were compared, newest first; None: all."""
        columns = replay.c.id, replay.c.source, replay.c.heard
        query = select(*columns).where(replay.c.heard.is_not(None)).order_by(replay.c.id.desc())
        with self._home.read() as connection:
            rows = connection.execute(query.limit(limit)).all()
        return [Compared(row.id, row.source, shares_of(row.heard)) for row in rows]

    def sample(
        self, domain: str | None, n: int, seed: int, target_id: str | None = None
    ) -> Iterator[ReplayRecord]:
        """`n` different records of `domain` (None: of all), drawn as `shares` says; all if there are fewer.

        With `target_id` only records of that target are drawn. They are read while the iterator advances.
        """
        held = [one for some in self._drawable(domain, target_id).values() for one in some]
        return self._fetched(draw(held, n, Random(seed)))

    def sample_stratified(self, n: int, seed: int, target_id: str | None = None) -> Iterator[ReplayRecord]:
        """As `sample` of all domains, with equal shares. Small domains give all they have."""
        random, chosen = Random(seed), list[int]()
        held = self._drawable(None, target_id)
        for domain, share in even_shares({name: len(held[name]) for name in held}, n).items():
            chosen += draw(held[domain], share, random)
        random.shuffle(chosen)
        return self._fetched(chosen)

    def newest(
        self, n: int, min_id: int, target_id: str | None = None, domain: str | None = None
    ) -> Iterator[ReplayRecord]:
        """The newest `n` records of `domain` (None: of all) from `min_id` on, as far as `shares` allow."""
        held = [one for some in self._drawable(domain, target_id, min_id).values() for one in some]
        held.sort(key=lambda one: -one.id)
        return self._fetched(of_many(held, n, LEAST_TAUGHT))

    def since(self, domain: str, min_id: int, target_id: str | None = None) -> Iterator[ReplayRecord]:
        """The records of `domain` with an id of at least `min_id`, oldest first, read as it advances."""
        return self._fetched([one.id for one in self._held(domain, target_id, min_id).get(domain, [])])

    def by_ids(self, ids: Sequence[int]) -> Iterator[ReplayRecord]:
        """The records with these ids, in that order; those that are no longer there are left out."""
        return self._fetched(list(ids))

    def states(self, records: Sequence[ReplayRecord], base_hash: str) -> dict[int, torch.Tensor]:
        """By the record's id, the states [tokens − 1, H] that a drafter of this base has left with it."""
        with self._home.read() as connection:
            return read_states(connection, [record.id for record in records], base_hash)

    def states_size(self) -> int:
        """Bytes of the features that are kept with the records."""
        with self._home.read() as connection:
            return size_of_states(connection)

    def count(self, domain: str | None = None) -> int:
        with self._home.read() as connection:
            return connection.scalar(_of(select(func.count()).select_from(replay), domain)) or 0

    def sizes(self) -> dict[str, int]:
        """Records per domain; a domain without any is left out."""
        query = select(replay.c.domain, func.count()).group_by(replay.c.domain).order_by(replay.c.domain)
        with self._home.read() as connection:
            return {row[0]: row[1] for row in connection.execute(query)}

    def traffic(self, of_late: int, least: int, without: Collection[int] = ()) -> dict[str, float]:
        """The share of each domain: half by all records that are kept, half by the newest `of_late`.

        Of these one of each prompt counts, none with the ids `without`, and a client's as far as the shares
        allow. least: as in `shares.of_many`.
        """
        held = self._held(None, None)
        newest = {name: one_of_each_prompt(reversed(some)) for name, some in held.items()}
        domain_of = {one.id: name for name, some in newest.items() for one in some if one.id not in without}
        found = sorted((one for some in newest.values() for one in some if one.id in domain_of), reverse=True)
        late = Counter(domain_of[number] for number in of_many(found, of_late, least))
        sizes = {name: len(some) for name, some in held.items()}
        parts = [{name: one / sum(some.values()) for name, one in some.items()} for some in (sizes, late)]
        return {name: sum(part.get(name, 0.0) for part in parts) / 2 for name in sizes}

    def counts_since(self, domain: str | None, since_id: int) -> int:
        """How many records of `domain` (None: of all) are kept that came after the one with `since_id`."""
        query = _of(select(func.count()).select_from(replay).where(replay.c.id > since_id), domain)
        with self._home.read() as connection:
            return connection.scalar(query) or 0

    def last_id(self, domain: str | None = None) -> int:
        """The id of the newest record of `domain` (None: of all); 0 without any. Ids are never reused."""
        with self._home.read() as connection:
            return connection.scalar(_of(select(func.max(replay.c.id)), domain)) or 0

    def purge(self, domain: str | None = None) -> int:
        """Delete the records of `domain` (None: of all). Returns how many.

        Their bytes are overwritten, unless `Home.erasing` is true afterwards because of a reader. They go in
        pieces, as in `trim_states`: where the disk fails in the middle, the newer ones are still there.
        """
        trainer_file.remove(self._home.path)
        last, count, more = self.last_id(domain), 0, True
        while more:
            with self._home.write(durable=True) as connection:
                chosen = delete(replay).where(replay.c.id.in_(_first_piece(domain, last)))
                count += connection.execute(chosen).rowcount
                left = _of(select(replay.c.id).where(replay.c.id <= last), domain).limit(1)
                more = connection.scalar(left) is not None
                raise_counter(connection, PURGES)
            self._home.checkpoint(wait=not more)  # until then the journal still holds them
        trainer_file.remove(self._home.path)  # once more: a trainer may have written it meanwhile
        return count

    def _drawable(self, domain: str | None, target_id: str | None, min_id: int = 0) -> dict[str, list[Held]]:
        """As `_held`, without all but the newest copies of a prompt."""
        held = self._held(domain, target_id, min_id)
        return {name: few_copies(reversed(some))[::-1] for name, some in held.items()}

    def _held(self, domain: str | None, target_id: str | None, min_id: int = 0) -> dict[str, list[Held]]:
        """What the shares depend on in the records, by domain, oldest first."""
        columns = (replay.c.domain, replay.c.id, replay.c.source, replay.c.pinned, replay.c.prompt)
        query = _of(select(*columns), domain).where(replay.c.id >= min_id).order_by(replay.c.id)
        if target_id is not None:
            query = query.where(replay.c.target_id == target_id)
        held: dict[str, list[Held]] = {}
        with self._home.read() as connection:
            for name, *record in connection.execute(query):
                held.setdefault(name, []).append(Held(*record))
        return held

    def _fetched(self, ids: list[int]) -> Iterator[ReplayRecord]:
        """The records of `ids`, in that order; one that was evicted meanwhile is left out."""
        for start in range(0, len(ids), CHUNK):
            chunk = ids[start : start + CHUNK]
            with self._home.read() as connection:
                rows = connection.execute(select(replay).where(replay.c.id.in_(chunk))).all()
            found = {row.id: row for row in rows}
            yield from decoded(found[number] for number in chunk if number in found)


def _first_piece(domain: str | None, last: int) -> Select[Any]:
    """The oldest ids up to `last`, with PIECE bytes of payloads and features together, about."""
    size = func.length(replay.c.payload) + func.coalesce(replay_states.c.size, 0)
    older = func.sum(size).over(order_by=replay.c.id) - size
    both = replay.outerjoin(replay_states, replay_states.c.record == replay.c.id)
    query = select(replay.c.id, older.label("older")).select_from(both).where(replay.c.id <= last)
    held = _of(query, domain).subquery()
    return select(held.c.id).where(held.c.older < PIECE)


def _of(query: Select[Any], domain: str | None) -> Select[Any]:
    return query if domain is None else query.where(replay.c.domain == domain)
