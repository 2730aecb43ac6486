"""Folders that a command writes as a whole, in place of what it wrote before. Nothing else is deleted."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

from moedraft.core import InvalidRequest


def check_replaceable(folder: Path, files: Collection[str]) -> None:
    """Raise InvalidRequest unless `folder` can be made, is empty, or holds some of these files alone."""
    if not folder.exists():
        parent = next(path for path in folder.parents if path.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise InvalidRequest(f"{folder} cannot be made: {parent} is no folder that can be written to.")
        return
    if not folder.is_dir():
        raise InvalidRequest(f"{folder} is a file; name a folder.")
    try:
        names = sorted(path.name for path in folder.iterdir() if path.name not in files or path.is_dir())
    except OSError as error:
        raise InvalidRequest(f"{folder} cannot be read: {error.strerror}.") from error
    if names:
        raise InvalidRequest(
            f"{folder} holds other things, {names[0]} for one, which are left alone; name a new or "
            "an empty folder."
        )
    if folder.is_mount() or not os.access(folder.parent, os.W_OK | os.X_OK):
        raise InvalidRequest(f"{folder} cannot be replaced as a whole; name a folder inside it.")


def replace_folder(folder: Path, files: Collection[str], write: Callable[[Path], None]) -> None:
    """Have `write` fill a new folder with these files, and put it in the place of `folder`.

    The old one is moved aside before and deleted after the new one has taken its place, so that one of them
    is there at any moment. Raises InvalidRequest as `check_replaceable`, and OSError; then all is as before.
    """
    check_replaceable(folder, files)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    old, new = scratch / "old", scratch / "new"
    try:
        new.mkdir()
        write(new)
        for path in (*new.iterdir(), new):
            sync(path)
        check_replaceable(folder, files)  # something may have come into it meanwhile
        exchange(folder, old, new)
        sync(folder.parent)
    finally:
        remove(new, files)
        if folder.exists():
            remove(old, files)
        with suppress(OSError):
            scratch.rmdir()


def exchange(folder: Path, old: Path, new: Path) -> None:
    """Rename `folder`, where there is one, to `old`, and `new` to `folder`; or change nothing."""
    if folder.exists():
        folder.rename(old)
    try:
        new.rename(folder)
    except BaseException:
        if old.exists():
            old.rename(folder)
        raise


def remove(folder: Path, files: Collection[str]) -> None:
    """Delete these files, and the folder where it holds nothing else."""
    for name in files:
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
