"""`moedraft stats`: what each expert did, and what waits to be learned. Reads only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from moedraft.cli.common import (
    HomeOption,
    JsonOption,
    emit,
    note_missing,
    print_table,
    rate,
    reading,
    say,
    settings_for,
)
from moedraft.core import SHARED

if TYPE_CHECKING:
    from moedraft.storage.requests import ExpertStats
    from moedraft.storage.store import Store

MEASURED = (
    "acceptance_rate",
    "recent_acceptance_rate",
    "first_acceptance_rate",
    "mean_acceptance_length",
)


def stats(ctx: typer.Context, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Show requests, acceptance, replay and versions of every expert.

    The replay of `shared` is that of all domains: the shared adapter learns from all traffic.
    """
    settings = settings_for(ctx, home=home)
    with reading(settings) as store:
        if store is None:
            note_missing(settings)
        data = {
            "experts": {} if store is None else experts_of(store),
            "learning": learning_of(store, settings.update_every),
        }
    if as_json:
        emit(data)
        return
    columns = ["expert", "requests", "tokens", "acceptance", "recent", "first", "length", "replay"]
    print_table(
        "Experts", [*columns, "updates", "version"], [_row(*item) for item in data["experts"].items()]
    )
    say(f"Learning: {data['learning']['status']}")


def experts_of(store: Store) -> dict[str, dict[str, Any]]:
    """Numbers by name: `shared`, then all registered domains, then removed ones that served."""
    served, sizes = store.requests.summary(), store.replay.sizes()
    sizes[SHARED] = sum(sizes.values())
    registered = [domain.name for domain in store.registry.domains()]
    names = dict.fromkeys([SHARED, *registered, *served])
    return {name: _expert(store, name, served.get(name), sizes.get(name, 0)) for name in names}


def _expert(store: Store, name: str, served: ExpertStats | None, replay_size: int) -> dict[str, Any]:
    live = store.registry.live(name)
    return {
        "requests": served.requests if served else 0,
        "tokens": served.tokens if served else 0,
        **{key: getattr(served, key) if served else None for key in MEASURED},
        "replay_size": replay_size,
        "updates": store.registry.updates(name),
        "version": live.version if live else 0,
    }


def learning_of(store: Store | None, update_every: int) -> dict[str, Any]:
    """Who has how many records that it has not learned from, and for whom that is enough."""
    from moedraft.distill.loop import news

    new_records = news(store) if store else {}
    due = [name for name, count in new_records.items() if count >= update_every]
    return {
        "status": f"due: {', '.join(due)}" if due else "waiting for records",
        "due": due,
        "records": store.replay.count() if store else 0,
        "new_records": new_records,
        "update_every": update_every,
    }


def _row(name: str, data: dict[str, Any]) -> list[object]:
    rates = [rate(data[key]) for key in MEASURED]
    counts = [data["replay_size"], data["updates"], data["version"]]
    return [name, data["requests"], data["tokens"], *rates, *counts]
