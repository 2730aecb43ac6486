"""`moedraft adapter`: versions of experts; which one is live, and out to PEFT."""

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
from moedraft.core import AdapterVersion, InvalidRequest

app = typer.Typer(help="Versions of experts: list, promote, roll back, export.")
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A domain, or `shared`.")]


@app.command("list")
def list_(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Only this expert's.")] = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """List adapter versions, oldest first."""
    settings = settings_for(ctx, home=home)
    with reading(settings) as store:
        if name is not None:
            check_expert(store, name)
        if store is None:
            note_missing(settings)
        versions = store.registry.versions(name) if store else []
    if as_json:
        emit({"adapters": [_data(version) for version in versions]})
        return
    rows = [
        (v.domain, v.version, v.state, v.parent, rate(v.acceptance), moment(v.created_at)) for v in versions
    ]
    print_table("Adapters", ["expert", "version", "state", "parent", "acceptance", "created"], rows)


@app.command()
def promote(
    ctx: typer.Context,
    name: NameArgument,
    version: Annotated[int, typer.Argument(min=0, metavar="VERSION", help="0: untrained.")],
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make VERSION the one that serves, after checking its files."""
    with writing(settings_for(ctx, home=home)) as store:
        check_expert(store, name)
        found = [one for one in store.registry.versions(name) if one.version == version]
        if found:
            store.adapters.load(found[0])
        _show_live(name, store.registry.promote(name, version), as_json)


@app.command()
def rollback(
    ctx: typer.Context, name: NameArgument, home: HomeOption = None, as_json: JsonOption = False
) -> None:
    """Go back to the version that the live one was made from."""
    with writing(settings_for(ctx, home=home)) as store:
        check_expert(store, name)
        _show_live(name, store.registry.rollback(name), as_json)


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


def _data(version: AdapterVersion) -> dict[str, Any]:
    return {
        "domain": version.domain,
        "version": version.version,
        "state": version.state,
        "parent": version.parent,
        "acceptance": version.acceptance,
        "created_at": version.created_at,
        "base_hash": version.base_hash,
    }


def _show_live(name: str, live: AdapterVersion | None, as_json: bool) -> None:
    version = live.version if live else 0
    if as_json:
        emit({"domain": name, "version": version})
    else:
        say(f"{name}: version {version} is live" if live else f"{name}: the untrained expert is live")
