"""`moedraft distill`: trains adapters on their replay, without serving meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moedraft.cli.common import (
    DeviceOption,
    DraftOption,
    HomeOption,
    JsonOption,
    bar,
    busy,
    check_expert,
    emit,
    note,
    rate,
    say,
    settings_for,
    writing,
)
from moedraft.config import DistillKind
from moedraft.core import SHARED, InvalidRequest, StorageError

if TYPE_CHECKING:
    from moedraft.distill.loop import DistillLoop, Update
    from moedraft.storage.store import Store


def distill(
    ctx: typer.Context,
    domain: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="This one (or `shared`), even without enough new records."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps per update.")] = None,
    kind: Annotated[
        DistillKind | None, typer.Option(help="What updates lower: forward KL, reverse KL, JSD or TVD.")
    ] = None,
    home: HomeOption = None,
    draft: DraftOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train every adapter that has enough new records, or the one that is named."""
    settings = settings_for(ctx, home=home, draft=draft, device=device, distill_kind=kind)
    steps = steps or settings.update_steps
    with writing(settings) as store:
        if domain is not None:
            check_records(store, check_expert(store, domain))
        with busy("Loading the draft base"):
            from moedraft.distill.assembly import build_loop

            loop = build_loop(settings, store)
        count = 0
        for update in run_updates(loop, domain, steps):
            count += 1
            show(update, as_json)
    if not count:
        note(f"Nothing is due: an update takes {settings.update_every} new records of a domain.")


def run_updates(loop: DistillLoop, name: str | None, steps: int) -> Iterator[Update]:
    """Train the adapter `name`, or every adapter that has enough new records, one after another."""
    pending = [name] if name else iter(loop.due, None)
    for expert in pending:
        with bar(f"Training {expert}", steps) as advance:
            update = loop.run_once(expert, steps=steps, on_step=advance)
        if update is not None:
            yield update
        elif loop.state.is_paused:
            raise StorageError(f"Nothing could be stored: {loop.state.reason}")


def check_records(store: Store, name: str) -> None:
    """Raises InvalidRequest if there are no records that `name` could learn from."""
    if not store.replay.count(None if name == SHARED else name):
        raise InvalidRequest(
            f"There are no records to train {name!r} on; run `moedraft generate --learn` first."
        )


def show(update: Update, as_json: bool) -> None:
    if as_json:
        emit(update_data(update))
        return
    made = update.summary
    gain = f"{rate(made.acceptance_before)} → {rate(made.acceptance_after)}"
    say(
        f"{made.expert} version {update.version.version}: {made.steps} steps "
        f"on {made.records} records, loss {made.loss:.3f}, held-out top-1 agreement {gain}"
    )


def update_data(update: Update) -> dict[str, Any]:
    made = update.summary
    return {
        "expert": made.expert,
        "version": update.version.version,
        "parent": made.parent,
        "records": made.records,
        "steps": made.steps,
        "loss": made.loss,
        "acceptance_before": made.acceptance_before,
        "acceptance_after": made.acceptance_after,
    }
