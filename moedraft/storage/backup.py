"""Writes a home into one file and restores it: a copy of the database made in one step, and its adapters.

Safe while a server writes to the home. A backup lists its files with SHA-256, which is checked when it is
made and restored. Which other files of the home are included, such as its keys, is the caller's choice.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import sqlite3
import tarfile
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from moedraft.core import InvalidRequest, StorageError
from moedraft.folders import sync
from moedraft.storage.db import DATABASE, FULL, storage_errors
from moedraft.storage.versions.adapter_files import MANIFEST
from moedraft.storage.versions.adapters import FOLDER

CONTENTS = "backup.json"  # the first member: what the others are
FORMAT = 1
UNFINISHED = ".moedraft-unfinished-"  # the beginning of a temporary folder's name
CHUNK = 2**20  # bytes
MEMBER = re.compile(rf"[a-z]+\.(?:db|toml|json)|{FOLDER}/[a-z0-9_-]+/v[0-9]+/[A-Za-z0-9_][A-Za-z0-9_.-]*")
NO_BACKUP = (  # what reading something else than a backup raises
    tarfile.TarError, ValueError, KeyError, TypeError, AttributeError, RecursionError, EOFError,
    sqlite3.DatabaseError,
)  # fmt: skip
VERSIONS = "SELECT domain, version FROM adapter_versions ORDER BY domain, version"


def make_backup(home: Path, file: Path, extras: Collection[str] = (), note: Any = None) -> dict[str, Any]:
    """Write a new `file`, for its owner only; returns what it holds.

    `extras` are files of the home that go along where they are there; `note` is given back by `restore`.
    Raises InvalidRequest where `file` is there already, StorageError, and OSError for a `file` that cannot
    be written; nothing is left then.
    """
    if file.exists():
        raise InvalidRequest(f"{file} is there already; a backup overwrites nothing.")
    with _folder_beside(file) as folder:
        # Everything is copied first, so that what is hashed is what is packed, whatever a server writes.
        copy = folder / "home"
        with storage_errors(home):
            versions = _copied_database(home / DATABASE, copy / DATABASE)
        for name in extras:
            if (home / name).is_file():
                _copy(home / name, copy / name)
        gone = [one for one in versions if not _copied_version(home, one, copy)]
        files = sorted(path for path in copy.rglob("*") if path.is_file())
        contents = {
            "format": FORMAT,
            "made_at": time.time(),
            "note": note,
            "versions": len(versions) - len(gone),
            "missing": gone,
            "files": {path.relative_to(copy).as_posix(): _hash(path) for path in files},
        }
        packed = folder / "packed"
        _pack(packed, contents, copy)
        packed.rename(file)
        sync(file.parent)
    return contents


def restore_backup(
    file: Path,
    home: Path,
    leave_out: Collection[str] = (),
    finish: Callable[[Path, dict[str, Any]], None] = lambda folder, contents: None,
) -> dict[str, Any]:
    """Restore a backup to `home`, without the files named in `leave_out`; returns what the backup holds.

    `finish` gets the folder and what the backup holds before the folder becomes the home, so that what it
    adds is there from the home's first moment on. Raises InvalidRequest where `home` is there and not empty,
    StorageError for a file that is no whole backup, and OSError; there is no home then that was not there
    before.
    """
    if home.exists() and (not home.is_dir() or any(home.iterdir())):
        raise InvalidRequest(f"{home} is not empty; restore into a new folder.")
    home.parent.mkdir(parents=True, exist_ok=True)
    with _folder_beside(home) as folder:
        new = folder / "home"
        new.mkdir(mode=0o700)
        try:
            contents = _unpacked(file, new, leave_out)
            _check_database(new / DATABASE)
            finish(new, contents)
        except NO_BACKUP as error:
            raise StorageError(f"{file} is no whole backup of moedraft: {error}.") from error
        for path in (*new.rglob("*"), new):
            sync(path)
        new.rename(home)  # also over an empty folder
        sync(home.parent)
    return contents


@contextmanager
def _folder_beside(path: Path) -> Iterator[Path]:
    """A private folder on the same disk, with all that is in it removed at the end.

    Those that killed processes have left there are removed too: nobody holds their lock any more.
    """
    parent = path.absolute().parent.resolve(strict=True)  # else a temporary name would be in the error
    for left in parent.glob(f"{UNFINISHED}*"):
        with suppress(OSError), _locked(left):
            shutil.rmtree(left)
    folder = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=parent))
    with _locked(folder):
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. Raises OSError if another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _copied_database(source: Path, copy: Path) -> list[tuple[str, int]]:
    """Copy the database, as of one moment; returns (domain, version) of the adapters that it knows."""
    if not source.is_file():
        raise StorageError(f"There is no moedraft home at {source.parent}.")
    copy.parent.mkdir(mode=0o700)
    copy.touch(mode=0o600)
    with (
        closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True, timeout=10)) as reading,
        closing(sqlite3.connect(copy)) as writing,
    ):
        try:
            reading.backup(writing, pages=-1)
            writing.execute("PRAGMA journal_mode = DELETE")  # the copy is one file, without a journal
            _check_database(copy)
        except sqlite3.DatabaseError as error:
            raise StorageError(
                f"The database of the home {source.parent} cannot be copied: {error}."
            ) from error
    with closing(sqlite3.connect(copy)) as reading:
        return [(str(domain), int(version)) for domain, version in reading.execute(VERSIONS)]


def _check_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        found = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
        connection.execute("SELECT version_num FROM alembic_version")
    if found != "ok":
        raise StorageError(f"The database {path.name} is damaged: {found}.")


def _copied_version(home: Path, version: tuple[str, int], copy: Path) -> bool:
    """Copy the files of an adapter. False: it is missing, damaged or another's; no server loads it."""
    name = f"{FOLDER}/{version[0]}/v{version[1]}"
    try:
        found = [path for path in (home / name).iterdir() if path.is_file() and not path.is_symlink()]
        hashes = {path.name: _copy(path, copy / name / path.name) for path in found}
        told = json.loads((copy / name / MANIFEST).read_text(encoding="utf-8"))
        if told["files"].items() <= hashes.items() and (told["domain"], told["version"]) == version:
            return True
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if getattr(error, "errno", None) in FULL:  # the copy cannot be written, whatever the version is
            raise
    shutil.rmtree(copy / name, ignore_errors=True)
    return False


def _copy(source: Path, target: Path) -> str:
    """Copy a file; returns the SHA-256 of what was copied."""
    with source.open("rb") as file:
        return _write(target, file)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pack(packed: Path, contents: dict[str, Any], copy: Path) -> None:
    data = json.dumps(contents, indent=1).encode()
    with os.fdopen(os.open(packed, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        with tarfile.open(fileobj=out, mode="w") as archive:
            first = tarfile.TarInfo(CONTENTS)
            first.size, first.mode = len(data), 0o600
            archive.addfile(first, io.BytesIO(data))
            for name in contents["files"]:
                info = tarfile.TarInfo(name)
                info.size, info.mode = (copy / name).stat().st_size, 0o600
                with (copy / name).open("rb") as file:
                    archive.addfile(info, file)
        out.flush()
        os.fsync(out.fileno())


def _unpacked(file: Path, folder: Path, leave_out: Collection[str]) -> dict[str, Any]:
    """Unpack the files; each must be listed in the contents, be one that a home has, and fit its hash."""
    with tarfile.open(file, mode="r:") as archive:
        contents: dict[str, Any] = json.loads(_opened(archive, archive.next()).read())
        if contents["format"] != FORMAT:
            raise StorageError(f"{file} was made by a newer moedraft; upgrade it.")
        files = dict(contents["files"])
        if not all(isinstance(contents[name], int | float) for name in ("made_at", "versions")):
            raise ValueError("it does not say when it was made, or of how many versions")
        if not isinstance(contents["missing"], list) or not isinstance(contents["note"], dict | None):
            raise ValueError("it does not say what is missing of it")
        while (member := archive.next()) is not None:
            wanted = files.pop(member.name)
            if not MEMBER.fullmatch(member.name):
                raise ValueError(f"{member.name!r} is nothing that a home has")
            if (
                member.name not in leave_out
                and _write(folder / member.name, _opened(archive, member)) != wanted
            ):
                raise ValueError(f"{member.name!r} is not what was stored")
    if files:
        raise ValueError(f"{next(iter(files))!r} is missing")
    return contents


def _opened(archive: tarfile.TarFile, member: tarfile.TarInfo | None) -> IO[bytes]:
    content = archive.extractfile(member) if member is not None and member.isreg() else None
    if content is None:
        raise ValueError("it holds something that is no file")
    return content


def _write(path: Path, content: IO[bytes]) -> str:
    """Write a new file; returns its SHA-256."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        while part := content.read(CHUNK):
            digest.update(part)
            file.write(part)
    return digest.hexdigest()
