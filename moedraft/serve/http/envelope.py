"""The outermost ASGI layer gives every response an id and security headers, and logs the request.

It also answers errors that no other layer handled.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable

from sse_starlette.sse import SendTimeoutError
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moedraft.serve.http.errors import CLIENT_GONE, api_error
from moedraft.serve.http.log import get_logger, log_failure

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
HEADERS = {
    "x-application": "moedraft",  # by which the command line knows the server
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # with "no-referrer", browsers send "null" as the origin of our own forms
    "referrer-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
GONE = (ClientDisconnect, SendTimeoutError, ConnectionError)

Observe = Callable[[str, int], None]  # is called with the path and the status of a response


class Envelope:
    """Gives responses an id and headers, and logs them. `observe` is called for every response."""

    def __init__(self, app: ASGIApp, observe: Observe) -> None:
        self.app, self.observe = app, observe
        self.log = get_logger("moedraft.http")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.monotonic(), 0
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except GONE:
            status = status or CLIENT_GONE
        except Exception as error:
            log_failure(self.log, error, request_id=request_id)
            if status:
                # The answer has begun already; cutting the connection keeps it from looking complete.
                raise _Cut from None
            await api_error(error).response()(scope, receive, send_with_id)
        finally:
            self._tell(scope, status or CLIENT_GONE, request_id, time.monotonic() - began)

    def _tell(self, scope: Scope, status: int, request_id: str, seconds: float) -> None:
        self.observe(scope["path"], status)
        # Under overload, thousands of such lines would take time from other requests; the metrics count them.
        if status == 429:
            return
        self.log.info(
            "request",
            request_id=request_id,
            method=scope["method"],
            # escaped, since a terminal may print it
            path=scope["path"][:200].encode("unicode_escape").decode(),
            status=status,
            seconds=round(seconds, 4),
            key=scope["state"].get("key_id", ""),
        )


class _Cut(Exception):
    """Raised to cut off a response that has begun; the error itself is in the log already."""


def _request_id(scope: Scope) -> str:
    """The id that the client sent if it is safe to repeat, else a new one."""
    given = str(dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1"))
    return given if REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
