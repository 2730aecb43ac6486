"""Domains, adapter versions and which of them is live. Knows rows only; `adapters` knows the files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, delete, insert, select, update

from moedraft.core import DOMAIN_NAME, SHARED, AdapterVersion, Domain, InvalidRequest, StorageError
from moedraft.storage.db import Home
from moedraft.storage.records import trainer_file
from moedraft.storage.tables import adapter_versions, domains, experts, meta, replay
from moedraft.storage.versions.version_rows import (
    CHOSEN,
    GENERATION,
    NOTHING_ELSE,
    PIN,
    PURGES,
    UNADAPTED,
    Also,
    Follower,
    ancestors_of,
    counter,
    domain_exists,
    find_version,
    insert_version,
    last_version,
    live_version,
    names_under,
    put_back,
    raise_counter,
    raise_generation,
    reject_version,
    retire_live,
    set_live,
    set_unadapted,
    take_experts_back,
    unknown_domain,
)

_domain, _version, _state = adapter_versions.c.domain, adapter_versions.c.version, adapter_versions.c.state


@dataclass(frozen=True)
class Changed:
    """The result of a promotion or a rollback."""

    live: AdapterVersion | None  # what serves now; None: the untrained adapter
    experts: tuple[Follower, ...] = ()  # that had been trained on a later shared adapter than this one
    adapted: tuple[str, ...] = ()  # domains that the base alone drafted for, and adapters draft for now


def check_expert_name(name: str) -> str:
    """`name` itself where it is SHARED or a domain's name; InvalidRequest otherwise."""
    return name if name == SHARED else check_domain_name(name)


def check_domain_name(name: str) -> str:
    """`name` itself, or InvalidRequest where it is no slug or is reserved."""
    if not DOMAIN_NAME.fullmatch(name):
        raise InvalidRequest(
            f"domain name {name!r} must be 1-64 of a-z, 0-9, '_' and '-', beginning with a letter or digit."
        )
    if name == SHARED:
        raise InvalidRequest(f"the name {SHARED!r} belongs to the shared adapter; choose another.")
    return name


class Registry:
    """What is registered. Every method is one transaction; every write survives a power cut.

    All methods raise StorageError where the home fails, and InvalidRequest for a name or version that
    is not there; nothing was changed then.
    """

    def __init__(self, home: Home) -> None:
        self._home = home
        self._generation = (-1, 0)  # (this home's number of writes, the generation after them)

    # --- domains

    def add_domain(self, domain: Domain) -> None:
        """Raises InvalidRequest where the name is taken or is no domain name."""
        check_domain_name(domain.name)
        row = {
            "name": domain.name,
            "description": domain.description,
            "examples": list(domain.examples),
            "created_at": domain.created_at,
        }
        with self._home.write(durable=True) as connection:
            if domain_exists(connection, domain.name):
                raise InvalidRequest(
                    f"A domain named '{domain.name}' exists already; remove it first or choose another name."
                )
            if connection.scalar(select(experts.c.name).where(experts.c.name == domain.name)) is None:
                connection.execute(insert(experts).values(name=domain.name, last_version=0, updates=0))
            connection.execute(insert(domains).values(row))
            raise_generation(connection)

    def domains(self) -> list[Domain]:
        """All domains, in the order of registration."""
        with self._home.read() as connection:
            rows = connection.execute(select(domains).order_by(domains.c.created_at, domains.c.name))
            return [_domain_of(row) for row in rows]

    def domain_names(self) -> list[tuple[str, float]]:
        """(name, created_at) in the order of registration; examples, which may be many, stay unread."""
        query = select(domains.c.name, domains.c.created_at)
        with self._home.read() as connection:
            rows = connection.execute(query.order_by(domains.c.created_at, domains.c.name))
            return [(row.name, row.created_at) for row in rows]

    def domain(self, name: str) -> Domain:
        with self._home.read() as connection:
            row = connection.execute(select(domains).where(domains.c.name == name)).one_or_none()
        if row is None:
            raise unknown_domain(name)
        return _domain_of(row)

    def remove_domain(self, name: str) -> None:
        """Removes the domain, its replay and its versions' rows; `AdapterStore.remove` removes the folders.

        Statistics of its requests stay, and its version numbers are never given again.
        """
        with self._home.write(durable=True) as connection:
            if not domain_exists(connection, name):
                raise unknown_domain(name)
            for table in (replay, adapter_versions):
                connection.execute(delete(table).where(table.c.domain == name))
            raise_counter(connection, PURGES)
            connection.execute(delete(domains).where(domains.c.name == name))
            keys = [PIN + name, CHOSEN + name, UNADAPTED + name]
            connection.execute(delete(meta).where(meta.c.key.in_(keys)))
            connection.execute(update(experts).where(experts.c.name == name).values(updates=0))
            raise_generation(connection)
        self._home.checkpoint()  # until then the journal holds its records still
        trainer_file.remove(self._home.path)

    # --- adapter versions (`domain` is a domain's name or SHARED)

    def add_version(self, version: AdapterVersion) -> None:
        """As `add_versions`, for one version."""
        self.add_versions([version])

    def add_versions(
        self, versions: Sequence[AdapterVersion], also: Also = NOTHING_ELSE
    ) -> list[AdapterVersion]:
        """Add the rows, all of them or none, and return them as stored. A live one replaces the former one.

        also: what else changes in this transaction. Raises InvalidRequest for a number that was given before,
        where another version is live than was meant, and where records were purged meanwhile.
        """
        with self._home.write(durable=True) as connection:
            if also.purges not in (None, counter(connection, PURGES)):
                raise InvalidRequest("records that the update may have learned from were purged meanwhile.")
            stored = [insert_version(connection, version) for version in versions]
            for name, number in also.untrained.items():
                put_back(connection, name, number)
            if also.unadapted is not None:
                set_unadapted(connection, also.unadapted)
            if also.untrained or any(version.state == "live" for version in versions):
                raise_generation(connection)
        return stored

    def next_version(self, domain: str) -> int:
        """The number of the next version."""
        with self._home.read() as connection:
            return last_version(connection, domain) + 1

    def reserve_version(self, domain: str) -> int:
        """Take a number that no other version of `domain` ever had or will have."""
        with self._home.write(durable=True) as connection:
            number = last_version(connection, domain) + 1
            connection.execute(update(experts).where(experts.c.name == domain).values(last_version=number))
            return number

    def versions(self, domain: str | None = None) -> list[AdapterVersion]:
        """All versions, or those of one domain; oldest first. Empty for a name that is unknown."""
        query = select(adapter_versions).order_by(_domain, _version)
        with self._home.read() as connection:
            rows = connection.execute(query if domain is None else query.where(_domain == domain))
            return [AdapterVersion(**row._mapping) for row in rows]

    def live(self, domain: str) -> AdapterVersion | None:
        """The live version, whatever its draft base; None: the untrained expert serves.

        What serves with a certain draft base is the first of `lineage(domain, base_hash)`.
        """
        with self._home.read() as connection:
            return live_version(connection, domain)

    def lineage(self, domain: str, base_hash: str | None = None) -> list[AdapterVersion]:
        """The live version and its ancestors that were not rolled back, nearest first.

        With `base_hash`, those of that draft base; where the live one belongs to another, the line starts
        at the newest version of this base that was not rolled back. Empty where nothing is live.
        """
        with self._home.read() as connection:
            head = live = live_version(connection, domain)
            if live is not None and base_hash not in (None, live.base_hash):
                kept = (_domain == domain) & (adapter_versions.c.base_hash == base_hash)
                query = select(_version).where(kept, _state != "rolled_back").order_by(_version.desc())
                newest = connection.scalar(query.limit(1))
                head = None if newest is None else find_version(connection, domain, newest)
            if head is None:
                return []
            found = [head, *ancestors_of(connection, head)]
        return [version for version in found if base_hash in (None, version.base_hash)]

    def promote(self, domain: str, version: int) -> AdapterVersion | None:
        """Make `version` (0: the untrained expert) live, retire the former one, and return the live one."""
        return self.change(domain, version).live

    def rollback(self, domain: str) -> AdapterVersion | None:
        """Back to the parent of the live version, which becomes rolled_back. Returns what is live now.

        Ancestors that were rolled back themselves are skipped. Where none is left, the newest version of
        another draft base becomes live; where there is none either, the untrained expert serves.
        """
        return self.change(domain, None).live

    def change(self, domain: str, version: int | None, *, chosen: bool = False) -> Changed:
        """`promote` where a version is given, `rollback` otherwise; experts go back with the shared adapter.

        chosen: whether a person wants it so; `is_chosen` tells that afterwards.

        An expert that was trained on a later shared adapter than the one that serves now goes back to its
        newest version that was not, in the same transaction. One that is pinned stays. The version that a
        person chose drafts, even where the draft base alone drafted before.
        """
        with self._home.write(durable=True) as connection:
            last_version(connection, domain)
            aside, adapted = names_under(connection, UNADAPTED), frozenset[str]()
            if chosen:
                adapted = aside if domain == SHARED else aside & {domain}
                set_unadapted(connection, aside - adapted)
            before = live_version(connection, domain)
            if version is not None:
                found = find_version(connection, domain, version)
                if found is None and version != 0:
                    raise InvalidRequest(f"Domain '{domain}' has no adapter version {version}.")
                if found is None or found.state != "live":
                    retire_live(connection, domain)
                    set_live(connection, found)
                    raise_generation(connection)
            elif before is None:
                raise InvalidRequest(f"'{domain}' has no live adapter version to roll back.")
            else:
                reject_version(connection, before)
            now = live_version(connection, domain)
            if chosen:
                connection.execute(delete(meta).where(meta.c.key == CHOSEN + domain))
                number = "0" if now is None else str(now.version)
                connection.execute(insert(meta).values(key=CHOSEN + domain, value=number))
            moved = take_experts_back(connection, before, now) if domain == SHARED else ()
            return Changed(now, moved, tuple(sorted(adapted)))

    def is_chosen(self, domain: str, version: int) -> bool:
        """Whether a person has made this live (0: the untrained expert), and nothing newer came since."""
        return self.get_meta(CHOSEN + domain) == str(version)

    def reject(self, domain: str, version: int) -> AdapterVersion | None:
        """Mark `version` rolled_back. If it was live, an ancestor serves. Returns what is live now."""
        with self._home.write(durable=True) as connection:
            found = find_version(connection, domain, version)
            if found is None:
                raise InvalidRequest(f"Domain '{domain}' has no adapter version {version}.")
            return reject_version(connection, found)

    def forget_versions(self, domain: str, numbers: Iterable[int]) -> None:
        """Remove the rows of these versions. If the live one is among them, the untrained expert serves."""
        chosen = (_domain == domain) & _version.in_(list(numbers))
        with self._home.write(durable=True) as connection:
            if connection.scalar(select(_version).where(chosen, _state == "live")) is not None:
                raise_generation(connection)
            connection.execute(delete(adapter_versions).where(chosen))

    def unadapted(self) -> frozenset[str]:
        """The domains for which the draft base alone drafts, since adapters would do worse."""
        with self._home.read() as connection:
            return names_under(connection, UNADAPTED)

    def set_unadapted(self, names: Collection[str]) -> None:
        """Have the draft base alone draft for these domains, and for no others; unknown ones are left out."""
        with self._home.write(durable=True) as connection:
            set_unadapted(connection, names)

    # --- counters and notes

    def generation(self) -> int:
        """A number that grows whenever a domain or a live version changes. Asking for it is cheap."""
        writes = self._home.durable_writes
        if not self._home.writable or writes != self._generation[0]:
            self._generation = writes, self._counter(GENERATION)
        return self._generation[1]

    def purges(self) -> int:
        """How often records were purged. Who finds another number may have learned from what is gone."""
        return self._counter(PURGES)

    def updates(self, domain: str) -> int:
        """How many versions were ever added for `domain`; 0 for a name that is unknown."""
        with self._home.read() as connection:
            return connection.scalar(select(experts.c.updates).where(experts.c.name == domain)) or 0

    def get_meta(self, key: str, default: str | None = None) -> str | None:
        with self._home.read() as connection:
            value = connection.scalar(select(meta.c.value).where(meta.c.key == key))
            return default if value is None else value

    def set_meta(self, key: str, value: str | None, *, durable: bool = True) -> None:
        """Keeps `value` under `key`; None removes it. Not `durable`: a power cut may lose it.

        What stands there already is not written again: a full disk is no reason to refuse it.
        """
        if durable and self.get_meta(key) == value:
            return
        with self._home.write(durable=durable) as connection:
            connection.execute(delete(meta).where(meta.c.key == key))
            if value is not None:
                connection.execute(insert(meta).values(key=key, value=value))

    def _counter(self, name: str) -> int:
        with self._home.read() as connection:
            return counter(connection, name)


def _domain_of(row: Row[Any]) -> Domain:
    examples = row.examples
    if not isinstance(examples, list) or not all(isinstance(example, str) for example in examples):
        raise StorageError(f"The examples of domain '{row.name}' are damaged; restore a backup.")
    return Domain(row.name, row.description, tuple(examples), row.created_at)
