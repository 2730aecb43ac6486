"""The rows of adapter versions within one transaction: finding them, and making one live or rolled back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from sqlalchemy import Connection, delete, func, insert, select, update

from moedraft.core import SHARED, AdapterVersion, InvalidRequest, UnknownName
from moedraft.storage.tables import adapter_versions, counters, domains, experts, meta, replay

PIN = "pinned:"  # with a name: the meta key that exists while this adapter is pinned
GENERATION = "generation"  # the counter of changes of what serves
CHOSEN = "chosen:"  # with a name: the meta key with the version of this adapter that a person made live last
PURGES = "purges"  # the counter of deletions of replay records that somebody asked for
UNADAPTED = "unadapted:"  # with a name: the one that exists while the draft base alone drafts for it

_domain, _version, _state = adapter_versions.c.domain, adapter_versions.c.version, adapter_versions.c.state


@dataclass(frozen=True)
class Follower:
    """An expert that was trained on a later shared adapter than the one that serves now."""

    domain: str
    before: int  # the version that was live
    version: int  # that is live now; 0: the untrained expert
    pinned: bool  # a person wants it to stay, so it did


def unknown_domain(name: str) -> UnknownName:
    return UnknownName(f"There is no domain named '{name}'; `moedraft domain list` shows those there are.")


def domain_exists(connection: Connection, name: str) -> bool:
    return connection.scalar(select(domains.c.name).where(domains.c.name == name)) is not None


def last_version(connection: Connection, domain: str) -> int:
    """The number given to a version of `domain` last. Raises InvalidRequest for an unknown name."""
    if domain != SHARED and not domain_exists(connection, domain):
        raise unknown_domain(domain)
    return int(
        connection.execute(select(experts.c.last_version).where(experts.c.name == domain)).scalar_one()
    )


def find_version(connection: Connection, domain: str, version: int) -> AdapterVersion | None:
    query = select(adapter_versions).where(_domain == domain, _version == version)
    row = connection.execute(query).one_or_none()
    return None if row is None else AdapterVersion(**row._mapping)


def live_version(connection: Connection, domain: str) -> AdapterVersion | None:
    query = select(adapter_versions).where(_domain == domain, _state == "live")
    row = connection.execute(query).one_or_none()
    return None if row is None else AdapterVersion(**row._mapping)


def ancestors_of(connection: Connection, version: AdapterVersion) -> list[AdapterVersion]:
    """Ancestors that were not rolled back, nearest first; up to a damaged row, whose parent is no older."""
    found = []
    while version.parent < version.version:
        parent = find_version(connection, version.domain, version.parent)
        if parent is None:
            break
        if parent.state != "rolled_back":
            found.append(parent)
        version = parent
    return found


def reject_version(connection: Connection, version: AdapterVersion) -> AdapterVersion | None:
    set_state(connection, version, "rolled_back")
    if version.state == "live":
        kept = (_domain == version.domain) & (_state != "rolled_back")
        other = select(_version).where(kept, adapter_versions.c.base_hash != version.base_hash)
        newest = connection.scalar(other.order_by(_version.desc()).limit(1))
        found = None if newest is None else find_version(connection, version.domain, newest)
        set_live(connection, next(iter(ancestors_of(connection, version)), found))
        raise_generation(connection)
    return live_version(connection, version.domain)


def set_state(connection: Connection, version: AdapterVersion, state: str) -> None:
    chosen = (_domain == version.domain) & (_version == version.version)
    connection.execute(update(adapter_versions).where(chosen).values(state=state))


@dataclass(frozen=True)
class Also:
    """What a publication changes beside the versions it makes live, in the same transaction."""

    untrained: Mapping[str, int] = field(default_factory=dict)  # experts reset to none, with what is live
    unadapted: Collection[str] | None = None  # the domains the draft base alone drafts for; None: as before
    purges: int | None = None  # how often records had been purged when the candidates learned; None: unknown


NOTHING_ELSE = Also()


def set_live(connection: Connection, version: AdapterVersion | None) -> None:
    if version is not None:
        set_state(connection, version, "live")


def retire_live(connection: Connection, domain: str) -> None:
    if (live := live_version(connection, domain)) is not None:
        set_state(connection, live, "retired")


def names_under(connection: Connection, prefix: str) -> frozenset[str]:
    """The names for which a meta key of this kind exists."""
    keys = connection.scalars(select(meta.c.key).where(meta.c.key.startswith(prefix)))
    return frozenset(key.removeprefix(prefix) for key in keys)


def set_unadapted(connection: Connection, names: Collection[str]) -> None:
    """Have the draft base alone draft for these domains, and for no others; unknown ones are left out."""
    known = {name for name in names if domain_exists(connection, name)}
    if names_under(connection, UNADAPTED) != known:
        connection.execute(delete(meta).where(meta.c.key.startswith(UNADAPTED)))
        for name in sorted(known):
            connection.execute(insert(meta).values(key=UNADAPTED + name, value="1"))
        raise_generation(connection)


def raise_generation(connection: Connection) -> None:
    raise_counter(connection, GENERATION)


def counter(connection: Connection, name: str) -> int:
    return connection.scalar(select(counters.c.value).where(counters.c.name == name)) or 0


def raise_counter(connection: Connection, name: str) -> None:
    query = update(counters).where(counters.c.name == name)
    if not connection.execute(query.values(value=counters.c.value + 1)).rowcount:
        connection.execute(insert(counters).values(name=name, value=1))


def insert_version(connection: Connection, version: AdapterVersion) -> AdapterVersion:
    """Add the row and return it as stored; a live one replaces the former live one. Raises InvalidRequest."""
    last = last_version(connection, version.domain)
    known = find_version(connection, version.domain, version.version)
    if known is not None or version.version < max(last, 1):
        raise InvalidRequest(f"Version {version.version} of '{version.domain}' was given before.")
    if not 0 <= version.parent < version.version:
        raise InvalidRequest(f"Version {version.version} cannot descend from {version.parent}.")
    if version.state == "live":
        retire_live(connection, version.domain)
    version = replace(version, last_record=connection.scalar(select(func.max(replay.c.id))) or 0)
    connection.execute(insert(adapter_versions).values(vars(version)))
    counts = {"last_version": version.version, "updates": experts.c.updates + 1}
    connection.execute(update(experts).where(experts.c.name == version.domain).values(counts))
    return version


def put_back(connection: Connection, domain: str, number: int) -> None:
    """Roll version `number` back: the untrained expert serves. Raises InvalidRequest if it is not live."""
    if (live := live_version(connection, domain)) is None or live.version != number:
        raise InvalidRequest(f"the live version of '{domain}' was changed meanwhile.")
    set_state(connection, live, "rolled_back")


def take_experts_back(
    connection: Connection, before: AdapterVersion | None, now: AdapterVersion | None
) -> tuple[Follower, ...]:
    """Experts that were trained on a later shared adapter than `now` go back to a version that was not.

    before: the shared adapter that served until now; only experts of its draft base go back. Those stay of
    which it is not known on which shared adapter they were trained.
    """
    if before is None:
        return ()
    number = 0 if now is None else now.version
    later = (adapter_versions.c.base_hash == before.base_hash) & (adapter_versions.c.stood_on > number)
    query = select(_domain, _version).where(_domain != SHARED, _state == "live", later).order_by(_domain)
    pins = names_under(connection, PIN)
    moved = []
    for domain, version in connection.execute(query).all():
        pinned = domain in pins
        now_live = version if pinned else _step_back(connection, domain, version, number)
        moved.append(Follower(domain, version, now_live, pinned))
    if any(one.version != one.before for one in moved):
        raise_generation(connection)
    return tuple(moved)


def _step_back(connection: Connection, domain: str, version: int, shared: int) -> int:
    """Make live the newest earlier version that was trained on `shared` or an older one; its number.

    `version` becomes rolled_back. 0: there is no such version, and the untrained expert serves.
    """
    live = find_version(connection, domain, version)
    assert live is not None
    set_state(connection, live, "rolled_back")
    columns = adapter_versions.c
    fits = (columns.base_hash == live.base_hash) & (columns.stood_on <= shared) & (_state != "rolled_back")
    query = select(_version).where(_domain == domain, _version < version, fits).order_by(_version.desc())
    number = connection.scalar(query.limit(1))
    if number is not None:
        set_live(connection, find_version(connection, domain, number))
    return number or 0
