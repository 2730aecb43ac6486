"""Register and remove domains: registry, router and adapters move together."""

from __future__ import annotations

import logging
import time
from typing import Any

from moedraft.core import Domain, InvalidRequest, MoedraftError
from moedraft.routing.router import Router
from moedraft.storage.changes import REFIT, left_of_deleted
from moedraft.storage.registry import check_domain_name
from moedraft.storage.store import Store

MIN_EXAMPLES = 8
LONGEST_EXAMPLE = 100_000  # letters
LONGEST_DESCRIPTION = 4_000

log = logging.getLogger(__name__)


def check_examples(name: str, examples: list[str]) -> list[str]:
    """The different, non-empty ones, stripped.

    Raises InvalidRequest for a bad name, for too few of them and for too long ones.
    """
    check_domain_name(name)
    if (longest := max(map(len, examples), default=0)) > LONGEST_EXAMPLE:
        raise InvalidRequest(
            f"an example of domain {name!r} has {longest} letters; at most {LONGEST_EXAMPLE} are taken."
        )
    distinct = list(dict.fromkeys(example.strip() for example in examples if example.strip()))
    if len(distinct) < MIN_EXAMPLES:
        raise InvalidRequest(
            f"domain {name!r} needs at least {MIN_EXAMPLES} different example prompts, got {len(distinct)}."
        )
    return distinct


def check_description(description: str) -> None:
    """Raises InvalidRequest where it is too long."""
    if len(description) > LONGEST_DESCRIPTION:
        raise InvalidRequest(
            f"a description has at most {LONGEST_DESCRIPTION} letters; this one has {len(description)}."
        )


def register_domain(
    store: Store, router: Router, name: str, examples: list[str], description: str = ""
) -> Domain:
    """Add a domain and refit the router. Raises InvalidRequest, having changed nothing.

    At least MIN_EXAMPLES different, non-empty example prompts are needed. Should the router fail to fit,
    the domain is taken out again.
    """
    domain = _add(store, name, examples, description)
    try:
        refit(store, router)
    except BaseException:
        store.registry.remove_domain(name)
        raise
    return domain


def register_all(store: Store, router: Router, examples: dict[str, list[str]]) -> None:
    """Add several domains and fit the router once. Raises InvalidRequest as `register_domain` does."""
    for name, prompts in examples.items():
        _add(store, name, prompts, "")
    refit(store, router)


def remove_domain(store: Store, router: Router, name: str) -> dict[str, Any]:
    """Forget a domain: its examples, replay, adapters. Returns `left_of_deleted`.

    Where the router cannot be fitted without it, it is removed all the same. Raises InvalidRequest for an
    unknown name.
    """
    store.registry.domain(name)
    store.replay.purge(name)  # in pieces, which needs less room than all at once
    store.adapters.remove(name)
    store.registry.remove_domain(name)
    fitted = True
    try:
        refit(store, router)
    except MoedraftError as error:
        log.warning("The domain is removed, but the router was not fitted without it: %s", error)
        fitted = False
    left = left_of_deleted(store)
    return {**left, "router": fitted and left["router"]}


def refit(store: Store, router: Router) -> None:
    """Fit the router on the examples of all registered domains, and on nothing else."""
    router.fit({domain.name: list(domain.examples) for domain in store.registry.domains()})
    store.registry.set_meta(REFIT, None)


def _add(store: Store, name: str, examples: list[str], description: str) -> Domain:
    check_description(description)
    domain = Domain(name, description, tuple(check_examples(name, examples)), time.time())
    store.registry.add_domain(domain)
    return domain
