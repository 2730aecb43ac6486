"""What an operator may change in a home: which version of an expert serves, and which records are kept.

Registering and removing domains is not here, because it needs a router.
"""

from __future__ import annotations

import json
from typing import Any

from moedraft.core import DOMAIN_NAME, SHARED, Domain, InvalidRequest, UnknownName
from moedraft.storage.db import DATABASE
from moedraft.storage.registry import Changed, Registry
from moedraft.storage.store import Store
from moedraft.storage.versions.version_rows import PIN

REFIT = "router_refit"  # meta key: what the router's last fit on prompts of the traffic came to
PURGES_SEEN = "purges"  # in it: `Registry.purges` before the prompts were read


def promote(store: Store, name: str, version: int, base_hash: str | None = None) -> Changed:
    """Check the files of `version` and make it the one that serves; 0 is the untrained expert.

    Where that is an earlier shared adapter, experts that were trained on a later one go back to versions that
    were not. base_hash: of the draft base that serves, if one does. Raises InvalidRequest.
    """
    check_expert(store, name)
    found = [one for one in store.registry.versions(name) if one.version == version]
    if found:
        if base_hash not in (None, found[0].base_hash):
            raise InvalidRequest(
                f"Version {version} of '{name}' was trained for another draft base ({found[0].base_hash}) "
                f"than the one that serves ({base_hash})."
            )
        store.adapters.load(found[0])
    with store.home.folder_lock:
        return store.registry.change(name, version, chosen=True)


def rollback(store: Store, name: str) -> Changed:
    """Go back to the version that the live one was made from.

    Experts that were trained on a shared adapter are rolled back with it. Raises InvalidRequest where no
    version is live.
    """
    check_expert(store, name)
    with store.home.folder_lock:
        return store.registry.change(name, None, chosen=True)


def purge(store: Store, name: str | None) -> int:
    """Delete the records of `name`, or all (None). Returns how many there were. Raises InvalidRequest."""
    if name is not None:
        check_expert(store, name)
    return store.replay.purge(name)


def last_refit(registry: Registry) -> dict[str, Any]:
    """What the router's last fit on prompts of the traffic came to; empty while it knows examples alone.

    "labels": by domain, on how many prompts of the traffic the router is fitted now.
    """
    found: dict[str, Any] = json.loads(registry.get_meta(REFIT) or "{}")
    return found


def knows_deleted(registry: Registry) -> bool:
    """Whether the router may be fitted on prompts that were deleted since."""
    last = last_refit(registry)
    return bool(last) and last.get(PURGES_SEEN, 0) != registry.purges()


def left_of_deleted(store: Store) -> dict[str, Any]:
    """What a deletion did not reach yet, for its answer.

    `overwritten`: the bytes are overwritten; where not, a reader is in the way, and it is tried again.
    `router`: the router is not fitted on them; where it is, the next start fits it again.
    `copies`: names of the databases kept in the home from before upgrades, which no deletion reaches.
    """
    copies = sorted(path.name for path in store.home.path.glob(f"{DATABASE}.[0-9]*"))
    forgotten = not knows_deleted(store.registry)
    return {"overwritten": not store.home.erasing, "router": forgotten, "copies": copies}


def check_expert(store: Store, name: str) -> None:
    """Raises InvalidRequest where `name` is neither a registered domain nor `shared`."""
    if name != SHARED:
        find_domain(store, name)


def find_domain(store: Store, name: str) -> Domain:
    """Raises UnknownName where no domain of that name is registered."""
    if not DOMAIN_NAME.fullmatch(name):
        raise UnknownName("there is no domain of that name: it is no slug.")
    return store.registry.domain(name)


# -- pins ----------------------------------------------------------------------------------------


def pin(store: Store, name: str, pinned: bool = True) -> None:
    """Keep `name` at the version that serves: no update is published for it until it is unpinned.

    It serves even where the draft base alone drafted before, and a pinned shared adapter serves the domains
    without a version of their own. A person may still promote another version or
    roll back. Raises InvalidRequest.
    """
    check_expert(store, name)
    with store.home.folder_lock:
        if pinned:
            aside = store.registry.unadapted() - {name}
            if name == SHARED:  # it is published no more, so nothing else would end what stands for these
                aside = frozenset(one for one in aside if store.registry.live(one) is not None)
            store.registry.set_unadapted(aside)
        store.registry.set_meta(PIN + name, "1" if pinned else None)


def is_pinned(registry: Registry, name: str) -> bool:
    return registry.get_meta(PIN + name) is not None


def check_not_pinned(registry: Registry, name: str) -> None:
    """Raises InvalidRequest where `name` gets no new version."""
    if is_pinned(registry, name):
        raise InvalidRequest(f"'{name}' is pinned to its version; `moedraft adapter unpin {name}` frees it.")
