"""ASGI layers around everything: `Envelope` gives each response its id and a log line, and answers what
nobody caught; `Admission` turns away what there is no room for; `BodyLimit` reads bodies, as large and as
slow as is allowed; `RestOfBody` reads what is left of a body when the answer came before its end.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Callable
from contextlib import suppress

from sse_starlette.sse import SendTimeoutError
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moedraft.core import MoedraftError
from moedraft.serve.errors import CLIENT_GONE, ApiError, api_error
from moedraft.serve.log import get_logger, log_failure

DROPPED_BYTES = 64 * 2**20  # at most, of a body that was answered before it was read
LEAST_SECONDS = 1.0  # for the rest of such a body, however late the answer came
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # with "no-referrer" a browser posts our own forms as of origin "null"
    "cross-origin-resource-policy": "same-origin",
}
GONE = (ClientDisconnect, SendTimeoutError, ConnectionError)

Observe = Callable[[str, int], None]  # the kind of path, the status


class Envelope:
    """Outermost. `observe` is told of every response."""

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
                raise _Cut from None  # too late for an answer: the connection must not look whole
            await api_error(error).response()(scope, receive, send_with_id)
        finally:
            self._tell(scope, status or CLIENT_GONE, request_id, time.monotonic() - began)

    def _tell(self, scope: Scope, status: int, request_id: str, seconds: float) -> None:
        self.observe(scope["path"], status)
        if status == 429:  # thousands of lines would take time from those who are served; the metrics count
            return
        self.log.info(
            "request",
            request_id=request_id,
            method=scope["method"],
            path=scope["path"][:200].encode("unicode_escape").decode(),  # a terminal may show it
            status=status,
            seconds=round(seconds, 4),
            key=scope["state"].get("key_id", ""),
        )


class _Cut(Exception):
    """Ends a response in the middle; what was wrong stands in the log already."""


class Admission:
    """Refuses what asks for answers while there is no room for any, before its body is read and understood.

    `check_room` raises then. Ten times too many requests cost little so, and take little from those inside.
    """

    def __init__(self, app: ASGIApp, check_room: Callable[[], None]) -> None:
        self.app, self.check_room = app, check_room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"].startswith("/v1/"):
            try:
                self.check_room()
            except MoedraftError as error:
                await api_error(error).response()(scope, receive, send)
                return
        await self.app(scope, receive, send)


class BodyLimit:
    """Reads the body before the route runs: at most `max_bytes`, within `seconds`."""

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float) -> None:
        self.app, self.max_bytes, self.seconds = app, max_bytes, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            self._check_length(scope)
            async with asyncio.timeout(self.seconds):
                body = await self._read(receive)
        except TimeoutError:
            await _too_slow().response()(scope, receive, send)
        except ApiError as error:
            await error.response()(scope, receive, send)
        else:
            await self.app(scope, _replay(body, receive), send)

    def _check_length(self, scope: Scope) -> None:
        for name, value in scope["headers"]:
            if name == b"content-length":
                with suppress(ValueError):
                    self._check(int(value))

    async def _read(self, receive: Receive) -> bytes:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            body += message.get("body", b"")
            self._check(len(body))
            if not message.get("more_body", False):
                return bytes(body)

    def _check(self, size: int) -> None:
        if size > self.max_bytes:
            raise ApiError(413, f"A body has at most {self.max_bytes} bytes here.", code="body_too_large")


class RestOfBody:
    """Reads and drops the rest of a body whose request was answered before it had all come.

    The client has its answer at once, but the response ends only after the rest. Ordinary clients read
    nothing before they have sent everything: a connection that is cut meanwhile shows them a broken pipe
    in the place of the answer. At most DROPPED_BYTES are taken, until `seconds` after the request began.
    """

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        self.app, self.seconds = app, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        deadline, read = time.monotonic() + self.seconds, not _has_body(scope)

        async def noting() -> Message:
            nonlocal read
            message = await receive()
            read = read or not message.get("more_body", False)
            return message

        async def finishing(message: Message) -> None:
            if read or message["type"] != "http.response.body" or message.get("more_body", False):
                await send(message)
                return
            await send({**message, "more_body": True})
            await _drop(receive, max(LEAST_SECONDS, deadline - time.monotonic()))
            await send({"type": "http.response.body", "body": b""})

        await self.app(scope, noting, finishing)


def _has_body(scope: Scope) -> bool:
    headers = dict(scope["headers"])
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"


async def _drop(receive: Receive, seconds: float) -> None:
    size = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while size < DROPPED_BYTES:
                message = await receive()
                if not message.get("more_body", False):
                    return
                size += len(message["body"])


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body in one message, then whatever the connection says."""
    told = False

    async def replay() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _too_slow() -> ApiError:
    headers = {"connection": "close"}
    return ApiError(408, "The body did not arrive in time.", code="body_timeout", headers=headers)


def _request_id(scope: Scope) -> str:
    """The client's own where it is harmless, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            given = value.decode("latin-1")
            if REQUEST_ID.fullmatch(given):
                return str(given)
    return f"req-{uuid.uuid4().hex}"
