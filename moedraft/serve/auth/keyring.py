"""The keys as a running server sees them: looked up by their secret, read again when the file changes."""

from __future__ import annotations

import hmac

from moedraft.core import StorageError
from moedraft.storage.keys import Key, KeyFile, digest_of


class Keyring:
    """The keys as a running server sees them; the file is read again whenever it changes.

    `own` is a key of this process only. It fails closed: without a readable file no key is known, and where
    there is a file, be it one of no keys because the last was revoked, the server does not open its doors.
    """

    def __init__(self, file: KeyFile, *, open_without_keys: bool, own: Key | None = None) -> None:
        self._file, self._own = file, own
        self._keys: list[Key] = []
        self._stamp: object = None
        self._locked = not open_without_keys

    @property
    def is_open(self) -> bool:
        """There is no file of keys, and the server does without: whoever reaches it may do everything."""
        self._refresh()
        return not self._locked

    def find(self, secret: str) -> Key | None:
        """The key with this secret; the time taken tells nothing about those there are."""
        digest, found = digest_of(secret), None
        for key in self._all():
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def get(self, key_id: str) -> Key | None:
        return next((key for key in self._all() if key.id == key_id), None)

    def _all(self) -> list[Key]:
        self._refresh()
        return [*self._keys, *([self._own] if self._own else [])]

    def _refresh(self) -> None:
        try:
            found = self._file.path.stat()
            stamp: object = (found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size)
        except FileNotFoundError:
            stamp = None
        except OSError as error:
            stamp = type(error)
        if stamp == self._stamp:
            return
        try:
            self._keys, self._stamp = self._file.keys(), stamp
        except StorageError:  # it is asked again until it can be read
            self._keys, self._stamp, self._locked = [], None, True
        self._locked = self._locked or stamp is not None
