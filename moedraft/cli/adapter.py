"""`moedraft adapter`: lists versions of experts, changes which one is live, and exports them for PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moedraft.cli.common import (
    HomeOption,
    JsonOption,
    check_expert,
    emit,
    moment,
    note_missing,
    print_table,
    rate,
    reading,
    say,
    settings_for,
    writing,
)
from moedraft.cli.remote import Remote, ServerOption, given_server, owner_of
from moedraft.config import Settings
from moedraft.core import InvalidRequest

app = typer.Typer(help="Versions of experts: list, promote, roll back, export.")
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A domain, or `shared`.")]


@app.command("list")
def list_(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Only this expert's.")] = None,
    home: HomeOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List adapter versions, oldest first."""
    versions = _versions(settings_for(ctx, home=home), given_server(server), name)
    if as_json:
        emit({"adapters": versions})
        return
    keys = ("domain", "version", "state", "parent")
    rows = [
        (*(one[key] for key in keys), rate(one["acceptance"]), moment(one["created_at"])) for one in versions
    ]
    print_table("Adapters", ["expert", "version", "state", "parent", "acceptance", "created"], rows)


@app.command()
def promote(
    ctx: typer.Context,
    name: NameArgument,
    version: Annotated[int, typer.Argument(min=0, metavar="VERSION", help="0: untrained.")],
    home: HomeOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make VERSION the one that serves, after checking its files."""
    from moedraft.insight.inventory import live_version
    from moedraft.storage import changes

    settings = settings_for(ctx, home=home)
    remote = owner_of(settings, server)
    if remote is not None:
        live = remote.post("admin", "adapters", name, "promote", data={"version": version})
    else:
        with writing(settings) as store:
            check_expert(store, name)
            live = live_version(name, changes.promote(store, name, version))
    _show_live(live, as_json)


@app.command()
def rollback(
    ctx: typer.Context,
    name: NameArgument,
    home: HomeOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Go back to the version that the live one was made from."""
    from moedraft.insight.inventory import live_version
    from moedraft.storage import changes

    settings = settings_for(ctx, home=home)
    remote = owner_of(settings, server)
    if remote is not None:
        live = remote.post("admin", "adapters", name, "rollback")
    else:
        with writing(settings) as store:
            check_expert(store, name)
            live = live_version(name, changes.rollback(store, name))
    _show_live(live, as_json)


@app.command()
def export(
    ctx: typer.Context,
    name: NameArgument,
    out: Annotated[Path, typer.Option(metavar="DIR", help="A new or empty folder.")],
    expert_only: Annotated[
        bool, typer.Option("--expert-only", help="Without the shared adapter that the expert stands on.")
    ] = False,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the live version as a folder that PEFT loads over the plain draft base."""
    from moedraft.distill.export import export_adapter

    with reading(settings_for(ctx, home=home)) as store:
        check_expert(store, name)
        if store is None:
            raise InvalidRequest(f"{name!r} was never trained; there is nothing to export.")
        done = export_adapter(store, name, out, expert_only=expert_only)
    if as_json:
        emit({"name": name, "path": str(done.path), "versions": done.versions, "base_hash": done.base_hash})
        return
    parts = " + ".join(f"{part} version {version}" for part, version in done.versions.items())
    say(f"{parts} → {done.path} (draft base {done.base_hash})")


def _versions(settings: Settings, remote: Remote | None, name: str | None) -> list[dict[str, Any]]:
    from moedraft.insight import inventory

    if remote is not None:
        found: list[dict[str, Any]] = remote.get("admin", "adapters", name=name)["adapters"]
        return found
    with reading(settings) as store:
        if name is not None:
            check_expert(store, name)
        if store is None:
            note_missing(settings)
        return inventory.adapters(store, name) if store else []


def _show_live(live: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit(live)
        return
    name, version = live["domain"], live["version"]
    say(f"{name}: version {version} is live" if version else f"{name}: the untrained expert is live")
