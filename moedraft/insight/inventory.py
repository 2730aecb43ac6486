"""The contents of a home as plain data: domains, experts, adapter versions, replay records.

The operator's routes and the command line show the same data, which is built here.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from moedraft.core import SHARED, AdapterVersion, Domain
from moedraft.insight.change import (
    Change,
    change_of_first_step_share,
    change_of_tokens_per_step,
    first_step_share,
    newest,
    tokens_per_step,
)
from moedraft.insight.coverage import coverage
from moedraft.storage.changes import check_expert, find_domain, is_pinned, last_refit
from moedraft.storage.registry import Changed
from moedraft.storage.requests import ExpertStats
from moedraft.storage.store import Store

Data = dict[str, Any]
RATES = (
    "acceptance_rate",
    "recent_acceptance_rate",
    "first_acceptance_rate",
    "mean_acceptance_length",
    "tokens_per_step",
    "first_step_share",
)


def domains(store: Store) -> list[Data]:
    """All domains in the order of their registration, without their examples."""
    return [{**summary(domain), **_state(store, domain.name)} for domain in store.registry.domains()]


def domain(store: Store, name: str) -> Data:
    """One domain with its examples. Raises InvalidRequest if it does not exist."""
    found = find_domain(store, name)
    refit = last_refit(store.registry)
    return {
        **summary(found),
        "examples": list(found.examples),
        "examples_from_traffic": refit.get("labels", {}).get(name, 0),
        **_state(store, name),
    }


def summary(domain: Domain) -> Data:
    return {
        "name": domain.name,
        "description": domain.description,
        "examples": len(domain.examples),
        "created_at": domain.created_at,
    }


def adapters(store: Store, name: str | None = None) -> list[Data]:
    """All versions, or those of one expert, oldest first. Raises InvalidRequest for an unknown name.

    unadapted: the draft base alone serves the domain now, although the version is live.
    """
    if name is not None:
        check_expert(store, name)
    versions = store.registry.versions(name)
    pinned = {one.domain for one in versions if is_pinned(store.registry, one.domain)}
    unadapted = store.registry.unadapted()
    return [
        {
            **_version(one),
            "pinned": one.state == "live" and one.domain in pinned,
            "unadapted": one.state == "live" and one.domain in unadapted,
        }
        for one in versions
    ]


def decisions(store: Store, name: str | None = None, limit: int = 50) -> list[Data]:
    """The last updates, of one expert or of all, oldest first, with what the gate decided on each.

    Values are None for updates that no gate has judged.
    """
    same = "created_at", "decision", "version", "parent", "stood_on", "gain", "gain_low", "gain_high"
    return [
        {
            "domain": one.expert,
            **{key: getattr(one, key) for key in (*same, "static_gain", "witness", "reason")},
            "records": one.gate_records,
        }
        for one in store.updates.recent(name, limit)
    ]


def replay(store: Store) -> Data:
    """The number of records by domain, and how many bytes of features are kept with them.

    `shared` has the records whose prompts fitted no domain.
    """
    sizes = store.replay.sizes()
    names = dict.fromkeys([SHARED, *(name for name, _ in store.registry.domain_names()), *sizes])
    records = {name: sizes.get(name, 0) for name in names}
    return {"records": records, "feature_bytes": store.replay.states_size()}


def experts(store: Store) -> dict[str, Data]:
    """Figures since the beginning for `shared`, the registered domains, and removed ones that once served.

    unadapted: the draft base alone serves the domain now, since it does better than any adapter.

    The replay size of `shared` counts all records, because the shared adapter learns from all traffic.
    """
    served, sizes = store.requests.summary(), store.replay.sizes()
    sizes[SHARED] = sum(sizes.values())
    registered = [name for name, _ in store.registry.domain_names()]
    names = dict.fromkeys([SHARED, *registered, *served])
    return {name: _expert(store, name, served.get(name), sizes.get(name, 0)) for name in names}


def _expert(store: Store, name: str, served: ExpertStats | None, replay_size: int) -> Data:
    return {
        "requests": served.requests if served else 0,
        "tokens": served.tokens if served else 0,
        **{key: getattr(served, key) if served else None for key in RATES},
        **_windows(served),
        "lookup_tokens": served.lookup_tokens if served else 0,
        "accepted_lookup_tokens": served.accepted_lookup_tokens if served else 0,
        "earlier_tokens": served.earlier_tokens if served else 0,
        "accepted_earlier_tokens": served.accepted_earlier_tokens if served else 0,
        "replay_size": replay_size,
        "updates": store.registry.updates(name),
        **_serving(store, name),
    }


def _serving(store: Store, name: str) -> Data:
    """What drafts for a domain, or for what fits none; see `views.serving`."""
    live = store.registry.live(name)
    return {
        "version": live.version if live else 0,
        "unadapted": name in store.registry.unadapted(),
        "pinned": is_pinned(store.registry, name),
    }


def _windows(served: ExpertStats | None) -> Data:
    """Both main figures of the last requests, and how they changed since the first ones."""
    window = newest(served)
    changes = {
        "tokens_per_step": change_of_tokens_per_step(served) if served else None,
        "first_step_share": change_of_first_step_share(served) if served else None,
    }
    return {
        "recent_tokens_per_step": tokens_per_step(window),
        "recent_first_step_share": first_step_share(window),
        **{f"{key}_change": _change(change) for key, change in changes.items()},
    }


def _change(change: Change | None) -> Data | None:
    """The change as plain data; low and high are the 95 % interval of the difference."""
    if change is None:
        return None
    return {"difference": change.difference, "low": change.low, "high": change.high}


def _state(store: Store, name: str) -> Data:
    """What serves the domain, and what is on its list."""
    guessed = coverage(store, name)
    return {
        **_serving(store, name),
        "updates": store.registry.updates(name),
        "replay_size": store.replay.count(name),
        "vocabulary": None if guessed is None else asdict(guessed),
    }


def _version(version: AdapterVersion) -> Data:
    """The version without its path, which clients of the server need not know."""
    return {
        "domain": version.domain,
        "version": version.version,
        "state": version.state,
        "parent": version.parent,
        "acceptance": version.acceptance,
        "created_at": version.created_at,
        "base_hash": version.base_hash,
    }


def changed(name: str, change: Changed) -> Data:
    """The version of expert `name` that serves now; 0 is the untrained expert.

    "experts" lists those that had been trained on a later shared adapter, with what each serves now;
    "adapted" the domains that the draft base alone served until now.
    """
    data: Data = {"domain": name, "version": change.live.version if change.live else 0}
    if change.experts:
        data["experts"] = [asdict(one) for one in change.experts]
    if change.adapted:
        data["adapted"] = list(change.adapted)
    return data
