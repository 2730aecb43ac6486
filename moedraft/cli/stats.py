"""`moedraft stats`: shows what each expert did and how many records wait to be learned. Changes nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moedraft.cli.common import (
    HomeOption,
    JsonOption,
    busy,
    emit,
    note,
    note_missing,
    print_table,
    rate,
    reading,
    say,
    serving_of,
    settings_for,
)
from moedraft.core import InvalidRequest, StorageError
from moedraft.learning_state import NO_RECORDS

if TYPE_CHECKING:
    from moedraft.config import Settings
    from moedraft.storage.store import Store

COLUMNS = (
    *("expert", "requests", "per step", "now", "change", "guessed right", "now", "change", "replay"),
    *("updates", "serves"),
)
FIGURES = ("tokens_per_step", "first_step_share")


Plot = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw the dashboard's charts into FILE (.png, .svg, .pdf)."),
]
Watch = Annotated[bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C.")]
Every = Annotated[float, typer.Option(min=0.1, max=1e5, metavar="SECONDS", help="Between looks of --watch.")]
Range = Annotated[str, typer.Option("--range", metavar="RANGE", help="Of --plot: 15m, 1h, 24h or all.")]


def stats(
    ctx: typer.Context,
    home: HomeOption = None,
    watch: Watch = False,
    every: Every = 2.0,
    plot: Plot = None,
    span: Range = "all",
    as_json: JsonOption = False,
) -> None:
    """Show requests, tokens per target step, first guesses right, replay and versions of all experts.

    First guesses are of a few tokens of the answers, whether these were drafted or not. Both figures are
    shown over all requests, over the last 50, and as the change from the first 20 to these, with its 95 %
    interval: a change smaller than what stands after ± may be chance.
    The replay of `shared` is that of all domains: the shared adapter learns from all traffic.
    """
    settings = settings_for(ctx, home=home)
    if plot is None and span != "all":
        raise InvalidRequest("--range is of the picture; name its file with --plot.")
    if plot is not None:
        _plot(settings, span, plot)
        if not watch:
            if as_json:
                emit({"plot": str(plot)})
            return
    if not watch:
        _show(_look(settings), as_json)
    elif as_json or not sys.stdout.isatty():
        _repeat(lambda: _show(_look(settings), as_json), every)
    else:
        _watch(settings, every)


def _look(settings: Settings) -> dict[str, Any]:
    """All figures to show, read now. Raises StorageError."""
    from moedraft.insight.inventory import experts

    with reading(settings) as store:
        if store is None:
            note_missing(settings)
        return {
            "experts": {} if store is None else experts(store),
            "learning": learning_of(store, settings),
            "engine": engine_of(store),
            "routing": routing_of(store),
        }


def routing_of(store: Store | None) -> dict[str, Any]:
    """Requests that the router decided, and what evidence made of them."""
    from moedraft.storage.requests import RoutingCounts

    return (RoutingCounts() if store is None else store.requests.routing())._asdict()


def _show(data: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit(data)
        return
    print_table("Experts", COLUMNS, [_row(*item) for item in data["experts"].items()])
    for line in _lines(data):
        say(line)


def _lines(data: dict[str, Any]) -> list[str]:
    from moedraft.insight.views import overruled

    lines = [f"Learning: {data['learning']['status']}"]
    routing = data["routing"]
    if routing["overruled"]:
        lines.append(f"Routing: evidence {overruled(routing)}")
    engine = data["engine"]
    if engine:
        lines.append(f"Server: {100 * engine['idle']:.0f} % idle, {engine['waiting']} waiting")
    return lines


def _repeat(show: Callable[[], None], every: float) -> None:
    """Call `show` every `every` seconds until Ctrl-C, the intended way to end it."""
    try:
        while True:
            show()
            sleep(every)
    except KeyboardInterrupt:
        return


def _watch(settings: Settings, every: float) -> None:
    """Show a table on the terminal that is updated in place."""
    from rich.console import Group
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    def screen() -> Group:
        data = _look(settings)
        table = Table(*COLUMNS, title="Experts", title_justify="left")
        for item in data["experts"].items():
            table.add_row(*(Text(str(cell)) for cell in _row(*item)))
        clock = f"{time.strftime('%H:%M:%S')}, every {every:g} s. Ctrl-C ends."
        return Group(table, *map(Text, [*_lines(data), clock]))

    with Live(auto_refresh=False) as live:
        _repeat(lambda: live.update(screen(), refresh=True), every)


def _plot(settings: Settings, span: str, path: Path) -> None:
    from moedraft.cli.plot import check_file, draw
    from moedraft.insight.observe import Observer
    from moedraft.insight.tables.spans import find_span

    check_file(path)
    found = find_span(span)
    with reading(settings) as store:
        if store is None:
            raise StorageError(f"There is no moedraft home at {settings.home}, so there is nothing to plot.")
        with busy("Drawing"):
            draw(Observer(store), found, path)
    note(f"Drawn: {path}")


def engine_of(store: Store | None) -> dict[str, Any] | None:
    """The server's load; None if no server of this home has reported it in the last seconds."""
    from moedraft.distill.pace.governor import STALE, read_load

    load = read_load(store.registry) if store else None
    if load is None or abs(time.time() - load.at) > STALE:
        return None
    return {"idle": load.idle, "waiting": load.waiting}


def learning_of(store: Store | None, settings: Settings) -> dict[str, Any]:
    """What updates wait for; of a home that is not there yet, that there are no records."""
    from moedraft.distill.pace.outlook import outlook

    if store is None:
        none = {"status": NO_RECORDS, "due": [], "records": 0, "new_records": {}}
        return none | dict.fromkeys(("update_every", "wanted"), settings.update_every)
    return outlook(store, settings)


def _row(name: str, data: dict[str, Any]) -> list[object]:
    figures = [
        cell
        for key in FIGURES
        for cell in (rate(data[key]), rate(data[f"recent_{key}"]), _change(data[f"{key}_change"]))
    ]
    return [name, data["requests"], *figures, data["replay_size"], data["updates"], serving_of(data)]


def _change(change: dict[str, float] | None) -> str:
    """The difference and half the width of its interval."""
    if change is None:
        return rate(None)
    return f"{change['difference']:+.2f} ± {(change['high'] - change['low']) / 2:.2f}"
