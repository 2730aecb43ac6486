"""An ASGI layer that reads the rest of a request's body if the answer was ready before all of it arrived."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

DROPPED_BYTES = 64 * 2**20  # bytes that are read and dropped at most
LEAST_SECONDS = 1.0  # time for the rest of the body, even if the answer came late


class RestOfBody:
    """Reads and drops the rest of a body whose request was answered before all of it arrived.

    The client gets its answer at once, but the response ends only after the rest of the body. This matters
    because ordinary clients send everything before they read: if the connection were closed meanwhile, they
    would report a broken pipe instead of the answer. At most DROPPED_BYTES are read, until `seconds` after
    the request began.
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
