"""`moedraft replay`: shows, exports and deletes the records that experts learn from."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from moedraft.cli.common import (
    HomeOption,
    JsonOption,
    check_expert,
    emit,
    note_left,
    note_missing,
    print_table,
    reading,
    say,
    settings_for,
    writing,
)
from moedraft.cli.remote import ServerOption, given_server, owner_of
from moedraft.core import InvalidRequest, StorageError

app = typer.Typer(help="The replay that experts learn from: show, purge, export.")
NameArgument = Annotated[
    str | None, typer.Argument(metavar="[NAME]", help="A domain, or `shared`: prompts that fitted none.")
]


@app.command()
def show(
    ctx: typer.Context, home: HomeOption = None, server: ServerOption = None, as_json: JsonOption = False
) -> None:
    """Show how many records each domain has, and what is kept of features."""
    from moedraft.insight.inventory import replay

    settings, remote = settings_for(ctx, home=home), given_server(server)
    if remote is not None:
        found = remote.get("admin", "replay")
    else:
        with reading(settings) as store:
            if store is None:
                note_missing(settings)
            found = replay(store) if store else {"records": {}, "feature_bytes": 0}
    if as_json:
        emit(found)
        return
    print_table("Replay", ["domain", "records"], list(found["records"].items()))
    if found["feature_bytes"]:
        say(f"Features kept with them: {found['feature_bytes'] / 2**20:.1f} MB.")


@app.command()
def purge(
    ctx: typer.Context,
    name: NameArgument = None,
    everything: Annotated[bool, typer.Option("--all", help="The records of all domains.")] = False,
    home: HomeOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete the records of a domain, their bytes overwritten. What adapters learned from them stays."""
    from moedraft.storage.changes import left_of_deleted
    from moedraft.storage.changes import purge as purge_records

    if (name is None) != everything:
        raise InvalidRequest("Give either the name of a domain or --all.")
    settings = settings_for(ctx, home=home)
    remote = owner_of(settings, server)
    if remote is not None:
        done = remote.post("admin", "replay", "purge", data={"domain": name})
    else:
        with writing(settings) as store:
            count = purge_records(store, name)
            done = {"domain": name, "purged": count, **left_of_deleted(store)}
    if as_json:
        emit(done)
        return
    say(f"{done['purged']} records of {name or 'all domains'} are deleted.")
    note_left(done)


def private(path: str, flags: int) -> int:
    """An opener of files that only their owner may read: token ids can be turned back into text."""
    return os.open(path, flags, 0o600)


@app.command()
def export(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option(metavar="FILE", help="A new file of JSON lines.")],
    name: NameArgument = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write records as JSON lines, oldest first: token ids and the target's top-k at each position."""
    settings = settings_for(ctx, home=home)
    with reading(settings) as store:
        if store is None:
            raise StorageError(f"There is no home at {settings.home}.")
        if name is not None:
            check_expert(store, name)
        records = store.replay.records(name, newest_first=False)
        with open(out, "x", encoding="utf-8", opener=private) as file:
            try:
                file.writelines(json.dumps(asdict(record)) + "\n" for record in records)
                file.flush()
            except BaseException:
                out.unlink()  # a partial file could be taken for a complete one
                raise
    if as_json:
        emit({"domain": name, "exported": len(records), "path": str(out)})
    else:
        say(f"{len(records)} records → {out}")
