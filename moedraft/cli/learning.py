"""`moedraft learning`: shows, pauses and resumes the training that a server does."""

from __future__ import annotations

from typing import Any

import typer

from moedraft.cli.common import HomeOption, JsonOption, emit, say, settings_for
from moedraft.cli.remote import Remote, ServerOption, owner_of
from moedraft.core import InvalidRequest

JUDGED = ("promote", "along", "keep", "discard")  # decisions on a candidate that an update made

app = typer.Typer(help="A running server's learning: show, pause, resume.")


@app.command()
def show(
    ctx: typer.Context, home: HomeOption = None, server: ServerOption = None, as_json: JsonOption = False
) -> None:
    """Show what the trainer does now, and why it waits."""
    _print(_server(ctx, home, server).get("admin", "learning"), as_json)


@app.command()
def pause(
    ctx: typer.Context, home: HomeOption = None, server: ServerOption = None, as_json: JsonOption = False
) -> None:
    """Begin no update, and let one that is running wait, until `resume`. Requests are kept meanwhile."""
    _print(_server(ctx, home, server).post("admin", "learning", "pause"), as_json)


@app.command()
def resume(
    ctx: typer.Context, home: HomeOption = None, server: ServerOption = None, as_json: JsonOption = False
) -> None:
    """Learn again."""
    _print(_server(ctx, home, server).post("admin", "learning", "resume"), as_json)


def _server(ctx: typer.Context, home: Any, server: str | None) -> Remote:
    remote = owner_of(settings_for(ctx, home=home), server)
    if remote is None:
        raise InvalidRequest("No server runs on this home; without one, only `moedraft distill` learns.")
    return remote


def _print(state: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit(state)
    elif not state["enabled"]:
        say(_beside(state))
    else:
        why = f" ({state['waits']})" if state["waits"] else ""
        held = "paused, " if state["paused"] else ""
        judged = sum(state.get("decisions", {}).get(one, 0) for one in JUDGED)
        done = f"{state['updates']} versions published{f' of {judged} candidates' if judged else ''}"
        say(f"Learning is {held}{state['status']}{why}; {done} since the server's start.")


def _beside(state: dict[str, Any]) -> str:
    """Of a server that does not learn itself; an older one says no more."""
    if "follower" not in state:
        return "This server runs without learning."
    pid, held = state["follower"], ", and learning is paused" if state["paused"] else ""
    number = f" (pid {pid})" if pid else ""
    beside = "no other process learns" if pid is None else f"another process{number} learns"
    return f"This server runs without learning; {beside} for its home{held}."
