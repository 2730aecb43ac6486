"""uvicorn's HTTP/1.1 protocol with deadlines in the places where it would wait for ever.

The headers must arrive within `header_timeout`. A client must read some of a waiting answer (at least
LEAST_TAKEN bytes of a long one) in every `send_timeout` seconds, even while the connection is closing.

When `max_connections` are open, a new one takes the place of the one for whose client the server has waited
longest: for a request, for the rest of one, or for a reader. So a crowd that does nothing keeps nobody out.
While no client has been waited for so long, PLACES more are accepted, on which only health probes are
answered: otherwise an orchestrator would restart a server just because it is full.

A request that was sent before the answer to the one before it waits PIPELINE_PAUSE for each open connection,
so that those who send hundreds at once leave most of the event loop to others.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import sys
import termios
import uuid
from contextlib import suppress
from typing import Any

import h11
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from moedraft.config import Settings
from moedraft.serve.http.errors import ApiError, error_body
from moedraft.serve.http.rest_of_body import RestOfBody

LARGEST_HEAD = 32 * 1024  # bytes that a request's headers may have
LEAST_TAKEN = 16 * 1024  # bytes of an answer that a client must read in `send_timeout` seconds
PLACES = 16  # connections beyond `max_connections` that are kept open for probes
LEAST_WAIT = 2.0  # seconds that the server waits for a client before another may take its place
PIPELINE_PAUSE = 0.002  # seconds, times open connections: 500 such requests a second at most, all together
LONGEST_PAUSE = 2.0  # seconds
AT_THE_DOOR = 1.0  # seconds that a connection for probes gets for its headers, and for the rest of its body
PROBES = ("/health", "/ready")
FULL = "Too many connections are open; try again in 1 s."
REASONS = {400: b"Bad Request", 408: b"Request Timeout", 429: b"Too Many Requests"}


class PatientProtocol(H11Protocol):
    """uvicorn's protocol with the deadlines. It lacks its settings; use a subclass made by `protocol_of`."""

    header_timeout: float
    send_timeout: float
    max_connections: int
    door: dict[PatientProtocol, None]  # connections beyond `max_connections`, oldest first
    idle: dict[PatientProtocol, float]  # those whose client is waited for, and since when, longest first
    _headers: asyncio.TimerHandle | None = None  # runs while headers are awaited
    _reader: asyncio.TimerHandle | None = None  # runs while the client does not read the answer
    _pause: asyncio.TimerHandle | None = None  # runs before a request that was sent too early
    _hurries = False  # the client sent a request before the answer to the one before it was complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections and not self._take_a_place():
            self._stand_at_the_door()
        self._await_headers()
        self._note_idle()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note_idle()
        if self.transport.get_protocol() is self and self.conn.their_state is h11.IDLE:
            self._await_headers()
            return
        self._stop_headers()
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) < LARGEST_HEAD:
            # keep reading after the request, in order to notice when the client disconnects
            self.flow.resume_reading()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        if self in self.door:
            self.refuse(429, FULL, "overloaded")
        else:
            super().handle_websocket_upgrade(event)

    def handle_events(self) -> None:
        if self._pause is None:
            super().handle_events()

    def on_response_complete(self) -> None:
        self._hurries = bool(self.conn.trailing_data[0])
        if self._hurries:
            seconds = min(LONGEST_PAUSE, PIPELINE_PAUSE * len(self.connections))
            self._pause = self.loop.call_later(seconds, self._go_on)
        super().on_response_complete()
        if self._pause is not None:
            self.flow.pause_reading()
        if self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete:
            self.transport.abort()  # `RestOfBody` has already dropped as many bytes as it accepts
        self._end_in_time()
        self._note_idle()

    def _go_on(self) -> None:
        """Handle the requests that were held back for PIPELINE_PAUSE."""
        self._pause = None
        if not self.transport.is_closing():
            self._stop_headers()
            self.flow.resume_reading()
            self.handle_events()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()
        self._note_idle()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._note_idle()
        if not self.transport.is_closing():
            self._stop_reader()

    def shutdown(self) -> None:
        super().shutdown()
        self._end_in_time()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._end_in_time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_headers()
        self._stop_reader()
        if self._pause is not None:
            self._pause.cancel()
        self.door.pop(self, None)
        super().connection_lost(exc)
        self.idle.pop(self, None)

    def send_400_response(self, msg: str) -> None:
        self.refuse(400, msg, "invalid_http")

    def refuse(self, status: int, message: str, code: str) -> None:
        """Send an error response, outside of the application, and close the connection."""
        self._stop_headers()
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
        self._end_in_time()

    def _note_idle(self) -> None:
        """Note whether the server waits for this client now, and since when it has done so.

        A client that sends requests before it has the answers counts as one that is waited for.
        """
        waits = self.flow.write_paused or self._hurries or self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if not waits or self in self.door:
            self.idle.pop(self, None)
        else:
            self.idle.setdefault(self, self.loop.time())

    def _take_a_place(self) -> bool:
        """Close the connection that has been idle longest; False if none was idle for LEAST_WAIT."""
        longest = next(iter(self.idle), None)
        if longest is None or self.loop.time() - self.idle[longest] < LEAST_WAIT:
            return False
        del self.idle[longest]
        longest.transport.abort()
        return True

    def _stand_at_the_door(self) -> None:
        """Answer only a probe on this connection. If there are too many of these, close the oldest."""
        self.app = RestOfBody(probes_only(self.app), AT_THE_DOOR)
        self.door[self] = None
        if len(self.door) > PLACES:
            oldest = next(iter(self.door))
            del self.door[oldest]
            if oldest._headers is not None:
                oldest.refuse(429, FULL, "overloaded")
            else:
                oldest.transport.abort()

    def _await_headers(self) -> None:
        """Start the timeout for the headers, unless it runs already."""
        if self._headers is None and not self.transport.is_closing():
            seconds = min(AT_THE_DOOR, self.header_timeout) if self in self.door else self.header_timeout
            self._headers = self.loop.call_later(seconds, self._no_headers)

    def _stop_headers(self) -> None:
        if self._headers is not None:
            self._headers.cancel()
            self._headers = None

    def _no_headers(self) -> None:
        if self.transport.is_closing():
            return
        if self in self.door:
            self.refuse(429, FULL, "overloaded")
        else:
            self.refuse(408, "The headers did not arrive in time.", "header_timeout")

    def _await_reader(self) -> None:
        if self._reader is None:
            self._reader = self.loop.call_later(self.send_timeout, self._look_at_reader, self._unread())

    def _look_at_reader(self, before: int) -> None:
        """Close the connection if the client read almost nothing since the last check."""
        now, self._reader = self._unread(), None
        if before - now < LEAST_TAKEN:
            self.transport.abort()
        else:
            self._await_reader()

    def _unread(self) -> int:
        """Bytes of the answer that the client has not received: those in our buffer and in the kernel's."""
        waiting = self.transport.get_write_buffer_size()
        with suppress(OSError):  # some systems do not tell
            count = fcntl.ioctl(self.transport.get_extra_info("socket"), termios.TIOCOUTQ, bytes(4))
            waiting += int.from_bytes(count, sys.byteorder)
        return waiting

    def _stop_reader(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None

    def _end_in_time(self) -> None:
        """A closing connection waits until the client has read the answer; limit that wait."""
        if self.transport.is_closing() and self in self.connections:
            self._await_reader()


def probes_only(app: ASGIApp) -> ASGIApp:
    """`app` for one probe; every other request is answered with 429. The connection is closed afterwards."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        if scope["path"] in PROBES:
            await app(scope, receive, closing)
        else:
            headers = {"retry-after": "1", "x-request-id": f"req-{uuid.uuid4().hex}"}
            refusal = ApiError(429, FULL, code="overloaded", headers=headers)
            await refusal.response()(scope, receive, closing)

    return answer


def protocol_of(settings: Settings) -> type[asyncio.Protocol]:
    limits: dict[str, Any] = {
        "header_timeout": settings.header_timeout,
        "send_timeout": settings.send_timeout,
        "max_connections": settings.max_connections,
        "door": {},
        "idle": {},
    }
    return type("Protocol", (PatientProtocol,), limits)
