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
    """Cookies of browsers: the id of a key and an end, signed by a secret of this process. No key is in them.

    They end with the process, with their key, where someone signs out, and after `SESSION_SECONDS`.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._secret = secrets.token_bytes(32)
        self._clock = clock
        self._ended: dict[str, int] = {}  # sessions that were signed out: when they would have ended

    def issue(self, key_id: str) -> str:
        content = f"{key_id}.{secrets.token_hex(8)}.{int(self._clock()) + SESSION_SECONDS}"
        return f"{content}.{self._sign(content)}"

    def key_id(self, cookie: str) -> str | None:
        """The id in a cookie that is ours and not over."""
        content, _, signature = cookie.rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._sign(content).encode()):
            return None
        key_id, session, end = content.split(".")
        return key_id if int(end) > self._clock() and session not in self._ended else None

    def end(self, cookie: str) -> None:
        """It is over for whoever has it. A cookie that is none of ours changes nothing."""
        if self.key_id(cookie) is None:
            return
        _, session, end, _ = cookie.split(".")
        now = self._clock()
        self._ended = {one: until for one, until in self._ended.items() if until > now} | {session: int(end)}

    def _sign(self, content: str) -> str:
        return hmac.new(self._secret, content.encode(), hashlib.sha256).hexdigest()
