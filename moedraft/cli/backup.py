"""`moedraft backup` and `moedraft restore`: a home as one file, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moedraft.cli.common import HomeOption, JsonOption, busy, emit, note, say, settings_for
from moedraft.config import CONFIG_FILE


def backup(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file, for its owner only.")],
    keys: Annotated[bool, typer.Option("--keys", help="With the keys (their hashes).")] = False,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy domains, replay, statistics, adapters and settings into one file, also beside a running server.

    Keys stay out, so that restoring cannot bring back revoked ones, unless `--keys` is given.
    """
    from moedraft.storage.backup import make_backup
    from moedraft.storage.keys import KEYS_FILE, KeyFile

    path = settings_for(ctx, home=home).home
    extras = [CONFIG_FILE, *([KEYS_FILE] if keys else [])]
    closed = KeyFile(path).path.exists()
    with busy("Copying"):
        made = make_backup(path, file, extras, {"closed": closed})
    if as_json:
        emit({"path": str(file), "bytes": file.stat().st_size, **_told(made)})
        return
    say(f"{made['versions']} adapter versions and the database → {file}")
    if made["missing"]:
        note(f"Not there, or not whole, and left out: {', '.join(f'{d} v{v}' for d, v in made['missing'])}.")
    if closed and not keys:
        note("The keys are not in it; after `moedraft restore` make new ones.")


def restore(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `moedraft backup` made.")],
    keys: Annotated[
        bool, typer.Option("--keys", help="Its keys too, those that were revoked since included.")
    ] = False,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a new home of a backup. Where the old one had keys, the new one is closed until it has one."""
    from moedraft.storage.backup import restore_backup
    from moedraft.storage.keys import KEYS_FILE, KeyFile

    path = settings_for(ctx, home=home).home
    with busy("Restoring"):
        made = restore_backup(file, path, () if keys else (KEYS_FILE,), _keep_closed)
    if as_json:
        emit({"home": str(path), "keys": len(KeyFile(path).keys()), **_told(made)})
        return
    say(f"{made['versions']} adapter versions and the database → {path}")
    if (path / KEYS_FILE).exists() and not KeyFile(path).keys():
        note("It has no keys and lets nobody in; make one with `moedraft key create`.")


def _keep_closed(folder: Path, made: dict[str, Any]) -> None:
    """Make sure that the new home of one that had keys is never open to everybody, not for a moment."""
    from moedraft.storage.keys import KEYS_FILE, KeyFile

    if (made["note"] or {}).get("closed") and not (folder / KEYS_FILE).exists():
        KeyFile(folder).close()


def _told(made: dict[str, object]) -> dict[str, object]:
    return {name: made[name] for name in ("made_at", "versions", "missing")}
