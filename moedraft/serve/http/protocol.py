"""HTTP/1.1 with patience that ends: uvicorn's protocol, with deadlines where it would wait for ever.

Headers must arrive within `header_timeout`, and a body that nobody reads any more within `body_timeout`;
one connection more than `max_connections` is sent away at once.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from moedraft.config import Settings
from moedraft.serve.http.errors import error_body

LARGEST_HEAD = 32 * 1024  # bytes of a request's headers
REASONS = {400: b"Bad Request", 408: b"Request Timeout", 429: b"Too Many Requests"}


class PatientProtocol(H11Protocol):
    """Use a subclass made by `protocol_of`."""

    header_timeout: float
    body_timeout: float
    max_connections: int
    _waits_for: str | None = None
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self.refuse(429, "Too many connections are open; try again in 1 s.", "overloaded")
        else:
            self._watch("headers")

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.get_protocol() is not self:  # a websocket now
            self._watch(None)
        elif self.conn.their_state is h11.IDLE:
            self._watch("headers")
        else:
            if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) < LARGEST_HEAD:
                self.flow.resume_reading()  # who sends more before the answer has come may still go away
            self._watch_rest()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._watch_rest()

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch(None)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self.refuse(400, msg, "invalid_http")

    def refuse(self, status: int, message: str, code: str) -> None:
        """Answer without a request that could be routed, and close."""
        self._watch(None)
        body = json.dumps(error_body(status, message, code=code)).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", f"req-{uuid.uuid4().hex}".encode()),
            (b"connection", b"close"),
            *([(b"retry-after", b"1")] if status == 429 else []),
        ]
        response = h11.Response(status_code=status, headers=headers, reason=REASONS[status])
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch_rest(self) -> None:
        unread = self.conn.their_state is h11.SEND_BODY and self.conn.our_state is not h11.SEND_RESPONSE
        self._watch("rest" if unread and self.cycle.response_complete else None)

    def _watch(self, what: str | None) -> None:
        """Wait for `what`; the clock runs on where that was awaited already."""
        if what == self._waits_for:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._waits_for, self._timer = what, None
        if what is not None:
            seconds = self.header_timeout if what == "headers" else self.body_timeout
            self._timer = self.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        if self.transport.is_closing():
            return
        if self._waits_for == "headers":
            self.refuse(408, "The headers did not arrive in time.", "header_timeout")
        else:
            self.transport.abort()


def protocol_of(settings: Settings) -> type[asyncio.Protocol]:
    limits: dict[str, Any] = {
        "header_timeout": settings.header_timeout,
        "body_timeout": settings.body_timeout,
        "max_connections": settings.max_connections,
    }
    return type("Protocol", (PatientProtocol,), limits)
