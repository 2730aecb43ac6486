"""Domains, adapter versions and which of them is live. Knows rows only; `adapters` knows the files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select, update

from moedraft.core import (
    DOMAIN_NAME,
    SHARED,
    AdapterVersion,
    Domain,
    InvalidRequest,
    StorageError,
    UnknownName,
)
from moedraft.storage.db import Home
from moedraft.storage.tables import adapter_versions, counters, domains, experts, meta, replay

PIN = "pinned:"  # and a name: the meta key that exists while it gets no new version

_domain, _version, _state = adapter_versions.c.domain, adapter_versions.c.version, adapter_versions.c.state


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
            if _exists(connection, domain.name):
                raise InvalidRequest(
                    f"A domain named '{domain.name}' exists already; remove it first or choose another name."
                )
            if connection.scalar(select(experts.c.name).where(experts.c.name == domain.name)) is None:
                connection.execute(insert(experts).values(name=domain.name, last_version=0, updates=0))
            connection.execute(insert(domains).values(row))
            _raise_generation(connection)

    def domains(self) -> list[Domain]:
        """In the order of registration."""
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
            raise _unknown(name)
        return _domain_of(row)

    def remove_domain(self, name: str) -> None:
        """Removes the domain, its replay and the rows of its versions; `AdapterStore.remove` their folders.

        Statistics of its requests stay, and its version numbers are never given again.
        """
        with self._home.write(durable=True) as connection:
            if not _exists(connection, name):
                raise _unknown(name)
            for table in (replay, adapter_versions):
                connection.execute(delete(table).where(table.c.domain == name))
            connection.execute(delete(domains).where(domains.c.name == name))
            connection.execute(delete(meta).where(meta.c.key == PIN + name))
            connection.execute(update(experts).where(experts.c.name == name).values(updates=0))
            _raise_generation(connection)
        self._home.checkpoint()  # until then the journal holds its records still

    # --- adapter versions (`domain` is a domain's name or SHARED)

    def add_version(self, version: AdapterVersion) -> None:
        """Add the row. A live version replaces the former live one in the same transaction.

        Raises InvalidRequest for a number that was given before.
        """
        with self._home.write(durable=True) as connection:
            last = _last_version(connection, version.domain)
            known = _find(connection, version.domain, version.version)
            if known is not None or version.version < max(last, 1):
                raise InvalidRequest(f"Version {version.version} of '{version.domain}' was given before.")
            if not 0 <= version.parent < version.version:
                raise InvalidRequest(f"Version {version.version} cannot descend from {version.parent}.")
            if version.state == "live":
                _retire_live(connection, version.domain)
                _raise_generation(connection)
            connection.execute(insert(adapter_versions).values(vars(version)))
            counts = {"last_version": version.version, "updates": experts.c.updates + 1}
            connection.execute(update(experts).where(experts.c.name == version.domain).values(counts))

    def next_version(self, domain: str) -> int:
        """The number of the next version."""
        with self._home.read() as connection:
            return _last_version(connection, domain) + 1

    def reserve_version(self, domain: str) -> int:
        """Take a number that no other version of `domain` ever had or will have."""
        with self._home.write(durable=True) as connection:
            number = _last_version(connection, domain) + 1
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
            return _live(connection, domain)

    def lineage(self, domain: str, base_hash: str | None = None) -> list[AdapterVersion]:
        """The live version and its ancestors that were not rolled back, nearest first.

        With `base_hash`, those of that draft base; where the live one belongs to another, the line starts
        at the newest version of this base that was not rolled back. Empty where nothing is live.
        """
        with self._home.read() as connection:
            head = live = _live(connection, domain)
            if live is not None and base_hash not in (None, live.base_hash):
                kept = (_domain == domain) & (adapter_versions.c.base_hash == base_hash)
                query = select(_version).where(kept, _state != "rolled_back").order_by(_version.desc())
                newest = connection.scalar(query.limit(1))
                head = None if newest is None else _find(connection, domain, newest)
            if head is None:
                return []
            found = [head, *_ancestors(connection, head)]
        return [version for version in found if base_hash in (None, version.base_hash)]

    def promote(self, domain: str, version: int) -> AdapterVersion | None:
        """Make `version` (0: the untrained expert) live, retire the former one, and return the live one."""
        with self._home.write(durable=True) as connection:
            _last_version(connection, domain)
            found = _find(connection, domain, version)
            if found is None and version != 0:
                raise InvalidRequest(f"Domain '{domain}' has no adapter version {version}.")
            if found is None or found.state != "live":
                _retire_live(connection, domain)
                _set_live(connection, found)
                _raise_generation(connection)
            return _live(connection, domain)

    def rollback(self, domain: str) -> AdapterVersion | None:
        """Back to the parent of the live version, which becomes rolled_back. Returns what is live now.

        Ancestors that were rolled back themselves are skipped. Where none is left, the newest version of
        another draft base becomes live; where there is none either, the untrained expert serves.
        """
        with self._home.write(durable=True) as connection:
            live = _live(connection, domain)
            if live is None:
                raise InvalidRequest(f"'{domain}' has no live adapter version to roll back.")
            return _reject(connection, live)

    def reject(self, domain: str, version: int) -> AdapterVersion | None:
        """Mark `version` rolled_back. If it was live, an ancestor serves. Returns what is live now."""
        with self._home.write(durable=True) as connection:
            found = _find(connection, domain, version)
            if found is None:
                raise InvalidRequest(f"Domain '{domain}' has no adapter version {version}.")
            return _reject(connection, found)

    def forget_versions(self, domain: str, numbers: Iterable[int]) -> None:
        """Remove the rows of these versions. If the live one is among them, the untrained expert serves."""
        chosen = (_domain == domain) & _version.in_(list(numbers))
        with self._home.write(durable=True) as connection:
            if connection.scalar(select(_version).where(chosen, _state == "live")) is not None:
                _raise_generation(connection)
            connection.execute(delete(adapter_versions).where(chosen))

    # --- counters and notes

    def generation(self) -> int:
        """A number that grows whenever a domain or a live version changes. Asking for it is cheap."""
        writes = self._home.durable_writes
        if not self._home.writable or writes != self._generation[0]:
            with self._home.read() as connection:
                query = select(counters.c.value).where(counters.c.name == "generation")
                self._generation = writes, connection.scalar(query) or 0
        return self._generation[1]

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


def _unknown(name: str) -> UnknownName:
    return UnknownName(f"There is no domain named '{name}'; `moedraft domain list` shows those there are.")


def _domain_of(row: Row[Any]) -> Domain:
    examples = row.examples
    if not isinstance(examples, list) or not all(isinstance(example, str) for example in examples):
        raise StorageError(f"The examples of domain '{row.name}' are damaged; restore a backup.")
    return Domain(row.name, row.description, tuple(examples), row.created_at)


def _exists(connection: Connection, name: str) -> bool:
    return connection.scalar(select(domains.c.name).where(domains.c.name == name)) is not None


def _last_version(connection: Connection, domain: str) -> int:
    """Raises InvalidRequest where `domain` is neither registered nor SHARED."""
    if domain != SHARED and not _exists(connection, domain):
        raise _unknown(domain)
    return int(
        connection.execute(select(experts.c.last_version).where(experts.c.name == domain)).scalar_one()
    )


def _find(connection: Connection, domain: str, version: int) -> AdapterVersion | None:
    query = select(adapter_versions).where(_domain == domain, _version == version)
    row = connection.execute(query).one_or_none()
    return None if row is None else AdapterVersion(**row._mapping)


def _live(connection: Connection, domain: str) -> AdapterVersion | None:
    query = select(adapter_versions).where(_domain == domain, _state == "live")
    row = connection.execute(query).one_or_none()
    return None if row is None else AdapterVersion(**row._mapping)


def _ancestors(connection: Connection, version: AdapterVersion) -> list[AdapterVersion]:
    """Ancestors that were not rolled back, nearest first; up to a damaged row, whose parent is no older."""
    found = []
    while version.parent < version.version:
        parent = _find(connection, version.domain, version.parent)
        if parent is None:
            break
        if parent.state != "rolled_back":
            found.append(parent)
        version = parent
    return found


def _reject(connection: Connection, version: AdapterVersion) -> AdapterVersion | None:
    _set_state(connection, version, "rolled_back")
    if version.state == "live":
        kept = (_domain == version.domain) & (_state != "rolled_back")
        other = select(_version).where(kept, adapter_versions.c.base_hash != version.base_hash)
        newest = connection.scalar(other.order_by(_version.desc()).limit(1))
        found = None if newest is None else _find(connection, version.domain, newest)
        _set_live(connection, next(iter(_ancestors(connection, version)), found))
        _raise_generation(connection)
    return _live(connection, version.domain)


def _set_state(connection: Connection, version: AdapterVersion, state: str) -> None:
    chosen = (_domain == version.domain) & (_version == version.version)
    connection.execute(update(adapter_versions).where(chosen).values(state=state))


def _set_live(connection: Connection, version: AdapterVersion | None) -> None:
    if version is not None:
        _set_state(connection, version, "live")


def _retire_live(connection: Connection, domain: str) -> None:
    live = _live(connection, domain)
    if live is not None:
        _set_state(connection, live, "retired")


def _raise_generation(connection: Connection) -> None:
    query = update(counters).where(counters.c.name == "generation")
    connection.execute(query.values(value=counters.c.value + 1))
