"""`moedraft distill`: trains adapters on their replay, without serving meanwhile or beside a server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moedraft.cli.common import (
    DeviceOption,
    DraftOption,
    HomeOption,
    JsonOption,
    TargetOption,
    bar,
    busy,
    check_expert,
    emit,
    is_missing,
    note,
    rate,
    say,
    settings_for,
    writing,
)
from moedraft.config import DistillKind
from moedraft.core import SHARED, GateDecision, InvalidRequest, StorageError, UpdateRecord

if TYPE_CHECKING:
    from moedraft.config import Settings
    from moedraft.distill.loop import DistillLoop
    from moedraft.distill.messages import StateReport
    from moedraft.storage.store import Store

DECISIONS: dict[GateDecision, str] = {
    "promote": "published",
    "along": "published without a gain of its own",
    "keep": "to be trained on",
    "discard": "thrown away",
    "reset": "put back to no expert",
    "withdraw": "taken back",
}


def distill(
    ctx: typer.Context,
    domain: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="This one (or `shared`), even without enough new records; joint updates train all.",
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps per update.")] = None,
    kind: Annotated[
        DistillKind | None, typer.Option(help="What updates lower: forward KL, reverse KL, JSD or TVD.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on learning for a server with --no-learning, until SIGTERM.")
    ] = False,
    home: HomeOption = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train every adapter that has enough new records, or the one that is named."""
    settings = settings_for(
        ctx, home=home, target=target, draft=draft, device=device, distill_kind=kind, update_steps=steps
    )
    if follow:
        follow_server(settings, domain, as_json)
    else:
        train_now(settings, domain, as_json)


def train_now(settings: Settings, domain: str | None, as_json: bool) -> None:
    """Train what is due, or `domain`, and end."""
    from moedraft.distill.claim import learning_for

    with writing(settings) as store, learning_for(settings.home):
        if domain is not None:
            check_records(store, check_expert(store, domain))
            from moedraft.storage.changes import check_not_pinned

            check_not_pinned(store.registry, domain)
        with busy("Loading the draft base"):
            from moedraft.distill.assembly import build_loop

            loop = build_loop(settings, store)
        count, held_up = 0, loop.held_up()
        for made in run_updates(loop, domain, settings.update_steps):
            count += 1
            show(made, as_json)
        loop.end()
        if not count:
            note(held_up or f"Nothing is due: {loop.needs()}")


def follow_server(settings: Settings, domain: str | None, as_json: bool) -> None:
    """Learn for the server of this home until a signal, and say what is done whenever that changes."""
    if domain is not None:
        raise InvalidRequest("With --follow every adapter is trained; leave out --domain.")
    if is_missing(settings):
        raise StorageError(f"There is no moedraft home at {settings.home}; register a domain to make one.")
    from moedraft.distill.following.follow import follow

    said: dict[str, str | None] = {}

    def tell(report: StateReport) -> None:
        nonlocal said
        state = report.state()
        now = {"state": state.text, "waits": state.waits_for, "error": report.error}
        if now != said:
            emit(now) if as_json else say("; ".join(words for words in now.values() if words))
        said = now

    note("Loading the draft base …")
    follow(settings, tell)
    note("Stopped.")


def run_updates(loop: DistillLoop, name: str | None, steps: int) -> Iterator[UpdateRecord]:
    """Train the adapter `name`, or every adapter that has enough new records, one after another."""
    pending = [name] if name else iter(loop.due, None)
    for expert in pending:
        with bar(f"Training {expert}", steps) as advance:
            loop.run_once(expert, steps=steps, on_step=advance)
        yield from loop.outcomes
        if loop.state.is_paused:
            raise StorageError(f"The update failed: {loop.state.reason}")


def check_records(store: Store, name: str) -> None:
    """Raises InvalidRequest if there are no records that `name` could learn from."""
    if not store.replay.count(None if name == SHARED else name):
        raise InvalidRequest(
            f"There are no records to train {name!r} on; run `moedraft generate --learn` first."
        )


def show(made: UpdateRecord, as_json: bool) -> None:
    if as_json:
        emit(update_data(made))
        return
    published = made.version != made.parent
    gain = f"{rate(made.acceptance_before)} → {rate(made.acceptance_after)}"
    say(
        f"{made.expert} {'version' if published else 'stays at version'} {made.version}: {made.steps} steps "
        f"on {made.records} records, loss {made.loss:.3f}, held-out acceptance {gain}{_judged(made)}"
    )


def _judged(made: UpdateRecord) -> str:
    """What the gate decided, in words."""
    if made.decision is None:
        return ""
    found = "nothing to measure it by" if made.gain is None else f"{made.gain:+.3f} tokens per step"
    why = f". {made.reason}" if made.reason else ""
    return f"; {DECISIONS[made.decision]} ({found}, {made.gate_records} records){why}"


def update_data(made: UpdateRecord) -> dict[str, Any]:
    keys = ("expert", "version", "parent", "records", "steps", "loss")
    rates = ("acceptance_before", "acceptance_after")
    gate = ("decision", "gain", "gain_low", "gain_high", "gate_records", "stood_on", "static_gain", "witness")
    return {key: getattr(made, key) for key in (*keys, *rates, *gate, "reason")}
