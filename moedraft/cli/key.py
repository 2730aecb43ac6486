"""`moedraft key`: makes, lists and revokes the keys with which clients use the server."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from moedraft.cli.common import HomeOption, JsonOption, emit, moment, note, print_table, say, settings_for

app = typer.Typer(help="Keys of the server: create, list, revoke.")


@app.command()
def create(
    ctx: typer.Context,
    scope: Annotated[
        list[str],
        typer.Option(metavar="SCOPE", help="`infer`, `admin`, `metrics` or `dashboard`; repeatable."),
    ],
    name: Annotated[str, typer.Option(help="Whose it is, for the list.")] = "",
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a key and show it, this once. A server that runs knows it at once."""
    from moedraft.storage.keys import KeyFile

    keys = KeyFile(settings_for(ctx, home=home).home)
    was_open = not keys.path.exists()
    key, secret = keys.create(scope, name)
    try:
        told = {"id": key.id, "key": secret, "scopes": list(key.scopes), "name": key.name}
        emit(told) if as_json else say(secret)
        sys.stdout.flush()
    except (OSError, SystemExit):  # nobody has seen it, and nobody ever will
        keys.revoke(key.id)
        if was_open and not keys.keys():
            keys.path.unlink()  # without keys it would let nobody in
        raise
    if not as_json:
        note(f"Key {key.id} for {', '.join(key.scopes)}. It is stored nowhere: keep it now.")


@app.command("list")
def list_(ctx: typer.Context, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List the keys; what is kept of them opens nothing."""
    from moedraft.storage.keys import KeyFile

    keys = KeyFile(settings_for(ctx, home=home).home).keys()
    if as_json:
        emit({"keys": [{f: getattr(k, f) for f in ("id", "scopes", "name", "created_at")} for k in keys]})
        return
    shown = [(key.id, ", ".join(key.scopes), key.name, moment(key.created_at)) for key in keys]
    print_table("Keys", ["id", "scopes", "name", "created"], shown)


@app.command()
def revoke(
    ctx: typer.Context,
    key_id: Annotated[str, typer.Argument(metavar="ID", help="As `key list` shows it.")],
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a key worthless, at once."""
    from moedraft.storage.keys import KeyFile

    key = KeyFile(settings_for(ctx, home=home).home).revoke(key_id)
    if as_json:
        emit({"revoked": key.id})
    else:
        say(f"Key {key.id} is revoked.")
