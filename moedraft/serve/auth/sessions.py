"""The sessions of browsers that have signed in with a key. A browser holds its session's name as a cookie."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable

COOKIE = "moedraft_session"
SESSION_SECONDS = 12 * 3600
MOST_SESSIONS = 100  # of one key at a time


class Sessions:
    """Makes and checks session cookies: random names, of which only hashes are kept, in memory.

    A session ends with the process, with its key, when the user signs out, after `SESSION_SECONDS`, or when
    the same key has signed in `MOST_SESSIONS` times since. Used in the event loop only.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[bytes, tuple[str, float]] = {}  # hash of a cookie -> key id, and when it expires

    def issue(self, key_id: str) -> str:
        """The cookie of a new session of this key."""
        now = self._clock()
        self._open = {session: held for session, held in self._open.items() if held[1] > now}
        own = [session for session, (key, _) in self._open.items() if key == key_id]
        if len(own) == MOST_SESSIONS:
            del self._open[own[0]]
        cookie = secrets.token_urlsafe(32)
        self._open[_hash(cookie)] = key_id, now + SESSION_SECONDS
        return cookie

    def key_id(self, cookie: str) -> str | None:
        """The key id of the session that has this cookie; None if there is none, or it has ended."""
        key_id, end = self._open.get(_hash(cookie), ("", 0.0))
        return key_id if end > self._clock() else None

    def end(self, cookie: str) -> None:
        """End the session for everyone who has its cookie. A cookie that is not valid changes nothing."""
        self._open.pop(_hash(cookie), None)


def _hash(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode()).digest()
