"""What an operator may see and do in a home, as plain data: the same for the routes and the command line.

Knows stores only; registering and removing domains, which take a router, are in `engine.admin`.
"""

from __future__ import annotations

from typing import Any

from moedraft.core import DOMAIN_NAME, SHARED, AdapterVersion, Domain, UnknownName
from moedraft.storage.store import Store

Data = dict[str, Any]


def domains(store: Store) -> list[Data]:
    """In the order of registration, without their examples."""
    return [{**summary(domain), **_state(store, domain.name)} for domain in store.registry.domains()]


def domain(store: Store, name: str) -> Data:
    """One domain with its examples. Raises InvalidRequest where there is none of that name."""
    found = find_domain(store, name)
    return {**summary(found), "examples": list(found.examples), **_state(store, name)}


def summary(domain: Domain) -> Data:
    return {
        "name": domain.name,
        "description": domain.description,
        "examples": len(domain.examples),
        "created_at": domain.created_at,
    }


def adapters(store: Store, name: str | None = None) -> list[Data]:
    """All versions, or those of one expert, oldest first. Raises InvalidRequest for a name unknown."""
    if name is not None:
        check_expert(store, name)
    return [_version(version) for version in store.registry.versions(name)]


def promote(store: Store, name: str, version: int) -> Data:
    """Make `version` live, its files checked; 0 is the untrained expert. Raises InvalidRequest."""
    check_expert(store, name)
    found = [one for one in store.registry.versions(name) if one.version == version]
    if found:
        store.adapters.load(found[0])
    return _live(name, store.registry.promote(name, version))


def rollback(store: Store, name: str) -> Data:
    """Back to what the live version was made from. Raises InvalidRequest where nothing is live."""
    check_expert(store, name)
    return _live(name, store.registry.rollback(name))


def replay(store: Store) -> dict[str, int]:
    """Records by domain: `shared`, whose prompts fitted none, and every registered one."""
    sizes = store.replay.sizes()
    names = dict.fromkeys([SHARED, *(domain.name for domain in store.registry.domains()), *sizes])
    return {name: sizes.get(name, 0) for name in names}


def purge(store: Store, name: str | None) -> int:
    """Delete the records of `name`, or all; how many there were. Raises InvalidRequest."""
    if name is not None:
        check_expert(store, name)
    return store.replay.purge(name)


def check_expert(store: Store, name: str) -> None:
    if name != SHARED:
        find_domain(store, name)


def find_domain(store: Store, name: str) -> Domain:
    if not DOMAIN_NAME.fullmatch(name):
        raise UnknownName("there is no domain of that name: it is no slug.")
    return store.registry.domain(name)


def _state(store: Store, name: str) -> Data:
    live = store.registry.live(name)
    return {
        "version": live.version if live else 0,
        "updates": store.registry.updates(name),
        "replay_size": store.replay.count(name),
    }


def _version(version: AdapterVersion) -> Data:
    """Without its path, which is nobody's business."""
    return {
        "domain": version.domain,
        "version": version.version,
        "state": version.state,
        "parent": version.parent,
        "acceptance": version.acceptance,
        "created_at": version.created_at,
        "base_hash": version.base_hash,
    }


def _live(name: str, live: AdapterVersion | None) -> Data:
    return {"domain": name, "version": live.version if live else 0}
