"""The sessions of browsers that have signed in with a key, kept in signed cookies."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable

COOKIE = "moedraft_session"
SESSION_SECONDS = 12 * 3600


class Sessions:
    """Makes and checks session cookies. A cookie holds the id of a key and an expiry time, but not the key.

    Cookies are signed with a secret of this process. A session ends with the process, with its key, when the
    user signs out, or after `SESSION_SECONDS`.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._secret = secrets.token_bytes(32)
        self._clock = clock
        # sessions that were signed out, with the time at which they would have expired
        self._ended: dict[str, int] = {}

    def issue(self, key_id: str) -> str:
        content = f"{key_id}.{secrets.token_hex(8)}.{int(self._clock()) + SESSION_SECONDS}"
        return f"{content}.{self._sign(content)}"

    def key_id(self, cookie: str) -> str | None:
        """The key id in a cookie that this process signed and that has not expired; otherwise None."""
        content, _, signature = cookie.rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._sign(content).encode()):
            return None
        key_id, session, end = content.split(".")
        return key_id if int(end) > self._clock() and session not in self._ended else None

    def end(self, cookie: str) -> None:
        """End the session for everyone who has its cookie. A cookie that is not valid changes nothing."""
        if self.key_id(cookie) is None:
            return
        _, session, end, _ = cookie.split(".")
        now = self._clock()
        self._ended = {one: until for one, until in self._ended.items() if until > now} | {session: int(end)}

    def _sign(self, content: str) -> str:
        return hmac.new(self._secret, content.encode(), hashlib.sha256).hexdigest()
