"""The file of a server's keys: made, listed and revoked by `moedraft key`. Knows no HTTP.

A key is 256 random bits, so what is stored is its plain SHA-256: there is nothing to guess that a slow hash
would have to protect, and a fast one costs a request nothing. The key itself is shown once and kept nowhere.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from moedraft.core import InvalidRequest, StorageError
from moedraft.folders import sync
from moedraft.storage.db import FULL, give_up_reserve, storage_errors

Scope = Literal["infer", "admin", "metrics", "dashboard"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
KEYS_FILE = "keys.json"
FORMAT = 1
LONGEST_NAME = 64


@dataclass(frozen=True)
class Key:
    """What is kept of a key."""

    id: str  # public: in the log, and to revoke it by
    digest: str  # SHA-256 of the whole key, hexadecimal
    scopes: tuple[Scope, ...]
    name: str
    created_at: float


def new_key(scopes: Sequence[str], name: str = "") -> tuple[Key, str]:
    """A key and its secret. Raises InvalidRequest for unknown scopes, or none, and for a bad name."""
    for scope in scopes:
        if scope not in SCOPES:
            raise InvalidRequest(f"there is no scope {scope!r}; scopes are {', '.join(SCOPES)}.")
    if not scopes:
        raise InvalidRequest(f"a key needs a scope; scopes are {', '.join(SCOPES)}.")
    if len(name) > LONGEST_NAME or not (name.isprintable() and name.isascii()):
        raise InvalidRequest(f"the name of a key must be at most {LONGEST_NAME} printable ASCII letters.")
    key_id = secrets.token_hex(4)
    secret = f"moedraft-{key_id}-{secrets.token_urlsafe(32)}"
    ordered = tuple(scope for scope in SCOPES if scope in scopes)
    return Key(key_id, digest_of(secret), ordered, name, time.time()), secret


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


class KeyFile:
    """The keys of a home. A server that runs sees each change at its next request."""

    def __init__(self, home: Path) -> None:
        self.path = home / KEYS_FILE

    def keys(self) -> list[Key]:
        """Oldest first; [] where there is no file. Raises StorageError for one that cannot be read."""
        with storage_errors(self.path.parent):
            text = self.path.read_bytes() if self.path.exists() else None
        return [] if text is None else _parsed(self.path, text)

    def create(self, scopes: Sequence[str], name: str = "") -> tuple[Key, str]:
        """A new key and its secret, which is kept nowhere. Raises InvalidRequest or StorageError."""
        key, secret = new_key(scopes, name)
        with self._changing() as keys:
            keys.append(key)
        return key, secret

    def revoke(self, key_id: str) -> Key:
        """Removes a key. Raises InvalidRequest where there is none of that id."""
        _find(self.keys(), key_id)  # before a folder or a lock is made
        with self._changing() as keys:
            found = _find(keys, key_id)
            keys.remove(found)
        return found

    def close(self) -> None:
        """Make sure that there is a key file, even an empty one: from then on a server asks for keys."""
        with self._changing():
            pass

    @contextmanager
    def _changing(self) -> Iterator[list[Key]]:
        """The keys, for one process at a time to change; they are written unless the block raises."""
        folder = self.path.parent
        with storage_errors(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(folder / f"{KEYS_FILE}.lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                keys = self.keys()
                yield keys
                write_private(self.path, {"format": FORMAT, "keys": [asdict(key) for key in keys]})
            finally:
                os.close(lock)


def _find(keys: Sequence[Key], key_id: str) -> Key:
    for key in keys:
        if key.id == key_id:
            return key
    raise InvalidRequest(f"there is no key {key_id!r}; `moedraft key list` shows those there are.")


def write_private(path: Path, data: dict[str, Any]) -> None:
    """Publish a JSON file that only its owner may read: temporary name, fsync, rename, fsync of the folder.

    When it returns the change outlives a power cut. On a full disk the home's reserve is given up for it, so
    that a key can be revoked. Raises OSError, the old file intact.
    """
    try:
        _write_private(path, data)
    except OSError as error:
        if error.errno not in FULL or not give_up_reserve(path.parent):
            raise
        _write_private(path, data)


def _write_private(path: Path, data: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(data, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def _parsed(path: Path, text: bytes) -> list[Key]:
    try:
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise StorageError(f"The keys in {path} were made by a newer moedraft; upgrade it.")
        return [_key(row) for row in data["keys"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StorageError(f"The file of keys {path} is damaged; restore it, or delete it.") from error


def _key(row: dict[str, Any]) -> Key:
    if {type(row[one]) for one in ("id", "digest", "name")} != {str} or not 0 <= row["created_at"] < 2**40:
        raise ValueError
    scopes = tuple(cast(Scope, scope) for scope in row["scopes"] if scope in SCOPES)
    return Key(row["id"], row["digest"], scopes, row["name"], float(row["created_at"]))
