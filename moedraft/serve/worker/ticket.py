"""Carries the outputs of one request from the engine's thread to the coroutine that reads them.

Outputs that a slow reader has not taken are joined into one. Nothing here knows the engine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from types import TracebackType

from moedraft.core import SHARED, FinishReason, MoedraftError, RequestOutput
from moedraft.speculation import SpeculationStats


class Overloaded(MoedraftError):
    """Too many requests are waiting; the client should try again after `retry_after` seconds."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"Too many requests are waiting; try again in {retry_after} s.")
        self.retry_after = retry_after


class Draining(MoedraftError):
    """The server is shutting down and accepts no new requests."""

    def __init__(self) -> None:
        super().__init__("The server is shutting down; send the request to another one.")


class EngineFailed(MoedraftError):
    """The engine's thread has ended, or its last steps failed: nothing can be answered now."""

    def __init__(self) -> None:
        super().__init__("The engine has failed; try again later, or send the request to another server.")


class Channel:
    """The state shared by both sides of a ticket.

    The engine's thread calls `put` and `end`; the reader's event loop calls `take` and `wake`.
    """

    def __init__(self, request_id: str, loop: asyncio.AbstractEventLoop) -> None:
        self.request_id = request_id
        self.loop = loop
        self.tokens = 0  # of the answer so far
        self.cancelled = False  # by the reader
        self.ended = False  # nothing more will be put
        self.last: RequestOutput | None = None
        self._pending: RequestOutput | None = None
        self._called = False  # `wake` has been scheduled in the loop already
        self._news = asyncio.Event()
        self._lock = threading.Lock()

    def put(self, output: RequestOutput) -> bool:
        """Add an output; its text is appended to what was not taken yet. True: have the loop call `wake`."""
        with self._lock:
            if self.ended:
                return False
            missed = self._pending.delta if self._pending is not None else ""
            self._pending = self.last = replace(output, delta=missed + output.delta) if missed else output
            self.ended = output.finish_reason is not None
            return self._call()

    def end(self) -> bool:
        """No more outputs will come, not even a last one. True: have the loop call `wake`."""
        with self._lock:
            self.ended = True
            return self._call()

    def lost(self, reason: FinishReason) -> RequestOutput:
        """A last output for a request that never got one: the text so far, and nothing new."""
        if self.last is not None:
            return replace(self.last, finish_reason=reason, delta="")
        return RequestOutput(
            request_id=self.request_id,
            prompt="",
            text="",
            token_ids=[],
            finish_reason=reason,
            expert=SHARED,
            adapter_version=0,
            speculation=SpeculationStats(),
            num_rejections=0,
            seconds=0.0,
        )

    def wake(self) -> None:
        """Called in the reader's loop: there is something to take."""
        self._news.set()

    async def take(self) -> RequestOutput | None:
        """The next output; None after the last. Cancelling the wait loses no output."""
        while True:
            with self._lock:
                output, self._pending = self._pending, None
                if output is not None or self.ended:
                    return output
                self._called = False
                self._news.clear()
            await self._news.wait()

    def _call(self) -> bool:
        due, self._called = not self._called, True
        return due


class Ticket:
    """A request that was accepted. Iterate over it; leaving early frees its slot within a step.

        async with await worker.submit("Once", params) as ticket:
            async for output in ticket:
                ...

    One reader only, in the loop that submitted it. The context manager, `cancel` and garbage collection abort
    what still runs.
    """

    def __init__(self, channel: Channel, cancel: Callable[[Channel], None]) -> None:
        self._channel = channel
        self._cancel = cancel

    @property
    def request_id(self) -> str:
        return self._channel.request_id

    @property
    def done(self) -> bool:
        """Whether the engine is finished with the request; outputs may still be waiting to be taken."""
        return self._channel.ended

    def cancel(self) -> None:
        """Abort the request between two steps.

        May be called from any thread and more than once; after the request's end it does nothing.
        """
        self._cancel(self._channel)

    async def result(self) -> RequestOutput:
        """Wait for the whole answer: the last output, with all text that was not taken yet as its `delta`."""
        text, last = "", None
        async for output in self:
            text, last = text + output.delta, output
        last = last or self._channel.last
        assert last is not None, "a request ends with an output"
        return replace(last, delta=text)

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """Iterate over the outputs; the last has a finish_reason, "abort" for a cancelled request."""
        return self

    async def __anext__(self) -> RequestOutput:
        output = await self._channel.take()
        if output is None:
            raise StopAsyncIteration
        return output

    async def __aenter__(self) -> Ticket:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()


def wake_all(channels: list[Channel]) -> None:
    for channel in channels:
        channel.wake()
