"""`moedraft adapter`: lists versions of experts, changes or pins the live one, and exports them for PEFT."""

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

app = typer.Typer(help="Versions of experts: list, promote, roll back, pin, export.")
GAINS = ("gain", "80 % between", "over base", "surely likelier")
DECIDED = ("at", "decision", "began with", "on shared", *GAINS, "records", "serves")
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A domain, or `shared`.")]


@app.command("list")
def list_(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Only this expert's.")] = None,
    domain: Annotated[str | None, typer.Option(metavar="NAME", help="The same as NAME.")] = None,
    home: HomeOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List adapter versions, oldest first; those of one expert with what the gate decided on its updates."""
    if name and domain and name != domain:
        raise InvalidRequest(f"name one expert: {name!r} or, with --domain, {domain!r}.")
    name = name or domain
    found = _versions(settings_for(ctx, home=home), given_server(server), name)
    if as_json:
        emit(found)
        return
    rows = [_version(one) for one in found["adapters"]]
    print_table("Adapters", ["expert", "version", "state", "parent", "acceptance", "created"], rows)
    if name is not None and found["updates"]:
        print_table(f"Updates of {name}", list(DECIDED), [_decided(one) for one in found["updates"]])
        for one in found["updates"]:
            if one.get("reason"):
                say(f"{moment(one['created_at'])}: {one['reason']}")


def _version(one: dict[str, Any]) -> tuple[Any, ...]:
    """A version as a row."""
    pinned = ", pinned" if one["pinned"] else ""
    base = ", but the draft base serves" if one.get("unadapted") else ""  # an older server does not say
    state, acceptance = f"{one['state']}{pinned}{base}", rate(one["acceptance"])
    return one["domain"], one["version"], state, one["parent"], acceptance, moment(one["created_at"])


def _decided(update: dict[str, Any]) -> tuple[str, ...]:
    """An update as a row. Gains are in tokens per step of the target; "–": the gate did not go by it."""
    low, high = _signed(update["gain_low"]), _signed(update["gain_high"])
    return (
        moment(update["created_at"]),
        update["decision"] or "–",
        *("–" if update[key] is None else str(update[key]) for key in ("parent", "stood_on")),
        _signed(update["gain"]),
        "–" if update["gain_low"] is None else f"{low} … {high}",
        _signed(update.get("static_gain")),
        "–" if update.get("witness") is None else f"{update['witness']:.1%}",
        "–" if update["records"] is None else str(update["records"]),
        str(update["version"]),
    )


def _signed(gain: float | None) -> str:
    return "–" if gain is None else f"{gain:+.3f}".replace("-", "−")


@app.command()
def promote(
    ctx: typer.Context,
    name: NameArgument,
    version: Annotated[int, typer.Argument(min=0, max=2**31 - 1, metavar="VERSION", help="0: untrained.")],
    home: HomeOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make VERSION the one that serves, after checking its files."""
    from moedraft.insight.inventory import changed
    from moedraft.storage import changes

    settings = settings_for(ctx, home=home)
    remote = owner_of(settings, server)
    if remote is not None:
        live = remote.post("admin", "adapters", name, "promote", data={"version": version})
    else:
        with writing(settings) as store:
            check_expert(store, name)
            live = changed(name, changes.promote(store, name, version))
    _show_live(live, as_json)


@app.command()
def rollback(
    ctx: typer.Context,
    name: NameArgument,
    home: HomeOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Go back to the version that the live one was made from; of `shared`, experts trained on it follow."""
    from moedraft.insight.inventory import changed
    from moedraft.storage import changes

    settings = settings_for(ctx, home=home)
    remote = owner_of(settings, server)
    if remote is not None:
        live = remote.post("admin", "adapters", name, "rollback")
    else:
        with writing(settings) as store:
            check_expert(store, name)
            live = changed(name, changes.rollback(store, name))
    _show_live(live, as_json)


@app.command()
def pin(
    ctx: typer.Context,
    name: NameArgument,
    home: HomeOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep the live version: no update is published for NAME until `unpin`."""
    _pin(settings_for(ctx, home=home), server, name, True, as_json)


@app.command()
def unpin(
    ctx: typer.Context,
    name: NameArgument,
    home: HomeOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let updates be published for NAME again."""
    _pin(settings_for(ctx, home=home), server, name, False, as_json)


def _pin(settings: Settings, server: str | None, name: str, pinned: bool, as_json: bool) -> None:
    from moedraft.storage import changes

    remote = owner_of(settings, server)
    if remote is not None:
        remote.post("admin", "adapters", name, "pin" if pinned else "unpin")
    else:
        with writing(settings) as store:
            check_expert(store, name)
            changes.pin(store, name, pinned)
    if as_json:
        emit({"domain": name, "pinned": pinned})
    else:
        say(f"{name}: pinned to the version that is live" if pinned else f"{name}: no longer pinned")


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


def _versions(settings: Settings, remote: Remote | None, name: str | None) -> dict[str, Any]:
    """The versions under "adapters", and the last updates under "updates"."""
    from moedraft.insight import inventory

    if remote is not None:
        return remote.get("admin", "adapters", name=name)
    with reading(settings) as store:
        if name is not None:
            check_expert(store, name)
        if store is None:
            note_missing(settings)
            return {"adapters": [], "updates": []}
        return {"adapters": inventory.adapters(store, name), "updates": inventory.decisions(store, name)}


def _show_live(live: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit(live)
        return
    name, version = live["domain"], live["version"]
    say(f"{name}: version {version} is live" if version else f"{name}: the untrained expert is live")
    for one in live.get("experts", []):
        say(_followed(one))
    for one in live.get("adapted", []):
        say(f"{one}: adapters draft for it again, since a person chose; the draft base alone did until now")


def _followed(expert: dict[str, Any]) -> str:
    """A sentence on what an expert that was trained on a later shared adapter does now."""
    name, before, now = expert["domain"], expert["before"], expert["version"]
    if expert["pinned"]:
        return f"{name}: stays at version {before}, which was trained on a later shared adapter: it is pinned"
    back = f"back to version {now}" if now else "back to the untrained expert"
    return f"{name}: {back}, because version {before} was trained on a later shared adapter"
