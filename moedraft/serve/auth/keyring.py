"""The keys that a running server accepts, found by their secret and read again when the file changes."""

from __future__ import annotations

import hmac

from moedraft.core import StorageError
from moedraft.storage.keys import Key, KeyFile, digest_of


class Keyring:
    """The keys of the key file and, if given, `own`, a key that exists in this process only.

    The file is read again whenever it changes. When in doubt access is denied: if the file cannot be read,
    none of its keys is valid; and once a key file exists, keys are required, even if the last key in it was
    revoked.
    """

    def __init__(self, file: KeyFile, *, open_without_keys: bool, own: Key | None = None) -> None:
        self._file, self._own = file, own
        self._keys: list[Key] = []
        self._stamp: object = None
        self._locked = not open_without_keys

    @property
    def is_open(self) -> bool:
        """Whether no key is required, because there is no key file: every client may do everything."""
        self._refresh()
        return not self._locked

    def find(self, secret: str) -> Key | None:
        """The key with this secret, or None. The time taken reveals nothing about the existing keys."""
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
        except StorageError:  # forget the stamp, so that the file is read again at the next look
            self._keys, self._stamp, self._locked = [], None, True
        self._locked = self._locked or stamp is not None
