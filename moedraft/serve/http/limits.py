"""Two ASGI layers that limit what clients can demand of the server.

`Admission` refuses requests for which there is no room; `BodyLimit` reads bodies up to a size and within a
time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moedraft.core import MoedraftError
from moedraft.serve.http.errors import ApiError, api_error

SMALL = 2**16  # bytes of a body


class Admission:
    """Refuses requests for answers while there is no room for more, before their body is read.

    `check_room` raises when there is no room. Refusing early is cheap, so that even ten times too many
    requests hardly slow down those that are being served.
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
    """Reads the body before the route runs: at most `max_bytes(path)`, within `seconds`.

    Bodies of more than SMALL bytes take at most `room` bytes together, until their requests are answered;
    one for which there is no room is refused. Small ones are bounded by the number of connections.
    """

    def __init__(self, app: ASGIApp, max_bytes: Callable[[str], int], seconds: float, room: int) -> None:
        self.app, self.max_bytes, self.seconds = app, max_bytes, seconds
        self.room = room
        self.held = 0  # bytes of large bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        with self._share() as take:
            answer = await self._read_or_refuse(scope, receive, take)
            if isinstance(answer, bytes):
                await self.app(scope, _replay(answer, receive), send)
                return
        await answer.response()(scope, receive, send)  # which may take until the rest of the body is there

    async def _read_or_refuse(
        self, scope: Scope, receive: Receive, take: Callable[[int], None]
    ) -> bytes | ApiError:
        most = self.max_bytes(scope["path"])
        try:
            _check_length(scope, most)
            async with asyncio.timeout(self.seconds):
                return await _read(receive, most, take)
        except TimeoutError:
            return _too_slow()
        except ApiError as error:
            return error

    @contextmanager
    def _share(self) -> Iterator[Callable[[int], None]]:
        """What takes room for a body that has so many bytes now, or raises ApiError 429; freed at the end."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            if size > SMALL:
                if self.held + size - taken > self.room:
                    raise _no_room()
                self.held, taken = self.held + size - taken, size

        try:
            yield take
        finally:
            self.held -= taken


def _check_length(scope: Scope, most: int) -> None:
    for name, value in scope["headers"]:
        if name == b"content-length":
            with suppress(ValueError):
                _check(int(value), most)


async def _read(receive: Receive, most: int, take: Callable[[int], None]) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        _check(len(body), most)
        take(len(body))
        if not message.get("more_body", False):
            return bytes(body)


def _check(size: int, most: int) -> None:
    if size > most:
        raise ApiError(413, f"A body has at most {most} bytes here.", code="body_too_large")


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the whole body in one message, and then what the connection gives."""
    told = False

    async def replay() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _no_room() -> ApiError:
    headers = {"retry-after": "1"}
    return ApiError(429, "Too many large requests are sent at once.", code="overloaded", headers=headers)


def _too_slow() -> ApiError:
    headers = {"connection": "close"}
    return ApiError(408, "The body did not arrive in time.", code="body_timeout", headers=headers)
