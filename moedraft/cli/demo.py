"""`moedraft demo`: experts learn from the shipped prompts for a few minutes, and the gain is reported."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from moedraft.cli.common import (
    DeviceOption,
    DraftOption,
    DtypeOption,
    HomeOption,
    JsonOption,
    TargetOption,
    emit,
    err,
    is_missing,
    settings_for,
)
from moedraft.core import InvalidRequest

if TYPE_CHECKING:
    from moedraft.showcase.demo import Demo
    from moedraft.showcase.report import Result


def demo(
    ctx: typer.Context,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="For picture and report (default: HOME/report).")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1, help="No update begins once the stream has taken that long.")
    ] = 180.0,
    home: HomeOption = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Register the shipped domains in a fresh home, serve a mixed stream and watch the experts learn."""
    from moedraft.showcase.demo import Demo, publish, summary
    from moedraft.system.build import opened

    chosen = home or (ctx.obj or {}).get("home") or Path(tempfile.mkdtemp(prefix="moedraft-demo-"))
    settings = settings_for(ctx, home=chosen, target=target, draft=draft, device=device, dtype=dtype)
    if not is_missing(settings):
        raise InvalidRequest(
            f"The demo needs a fresh home, and {settings.home} has one; name another folder."
        )
    if out:
        out.mkdir(parents=True, exist_ok=True)  # an unusable path should fail now, not after minutes
    began = time.monotonic()
    with opened(settings) as system:
        this = Demo(system, seconds)
        result, equal = watch(this)
    paths = publish(result, out or settings.home / "report")
    if as_json:
        emit(summary(result) | {"lossless": equal, **{name: str(path) for name, path in paths.items()}})
    else:
        show(result, Console(highlight=False))
        _show_paths(paths, settings.home, time.monotonic() - began)
    if not equal:
        raise typer.Exit(1)


def _show_paths(paths: dict[str, Path], home: Path, seconds: float) -> None:
    """Print where picture, report and home are, and the command to try next."""
    lines = {**{name: str(path) for name, path in paths.items()}, "home": str(home)}
    lines["took"] = f"{seconds:.0f} s"
    lines["next"] = f"moedraft bench --home {home}   compares with transformers"
    for name, line in lines.items():
        print(f"{name + ':':<10}{line}")


def watch(this: Demo) -> tuple[Result, bool]:
    """Run the demo under a live table on stderr; without a terminal, print lines instead."""
    phase = ""
    with Live(console=err, refresh_per_second=4, transient=True) as live:

        def on_phase(name: str) -> None:
            nonlocal phase
            phase = name
            live.console.print(f"[dim]{name} …[/]")

        def on_event(demo: Demo) -> None:
            if err.is_terminal:
                live.update(Group(live_table(demo), f"[dim]{phase}[/]"))

        this.on_phase, this.on_event = on_phase, on_event
        outcome = this.run()
        if err.is_terminal:
            live.console.print(live_table(this))
    return outcome


def live_table(this: Demo) -> Table:
    done = sum(view.requests for view in this.views.values())
    table = Table(title=f"{done} of {len(this.stream)} requests served, {len(this.updates)} updates")
    for name in ("expert", "requests", "acceptance at start", "now", "replay", "version"):
        table.add_column(name, justify="left" if name == "expert" else "right")
    for expert, requests, first, recent, replay, version in this.table():
        shares = ["" if share is None else f"{share:.2f}" for share in (first, recent)]
        table.add_row(expert, str(requests), *shares, str(replay), str(version))
    return table


def show(result: Result, console: Console) -> None:
    """Print the acceptance before and after, the speed against plain decoding, and what was checked."""
    table = Table(title="Held-out prompts: share of the target's tokens that the draft guesses right")
    for name in ("domain", "before", "after", "gain"):
        table.add_column(name, justify="left" if name == "domain" else "right")
    for row in result.rows:
        table.add_row(row.domain, f"{row.before:.3f}", f"{row.after:.3f}", f"{row.after - row.before:+.3f}")
    table.add_section()
    gain = f"{result.after - result.before:+.3f}"
    table.add_row("mean", f"{result.before:.3f}", f"{result.after:.3f}", gain, style="bold")
    console.print(table)
    base = result.speed["plain decoding"]
    for name, value in result.speed.items():
        console.print(f"{name:<16} {value:8.1f} tokens/s   {value / base:.2f} x plain")
    for name, fact in result.facts.items():
        console.print(f"{name}: {fact}")
