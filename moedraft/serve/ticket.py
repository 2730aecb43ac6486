"""One request between two threads: the engine's puts outputs in, one coroutine takes them out.

A reader that is slow never holds more than one output: what comes meanwhile is joined to it. Knows no engine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from types import TracebackType

from moedraft.core import SHARED, FinishReason, MoedraftError, RequestOutput


class Overloaded(MoedraftError):
    """Too many requests wait already; try again after `retry_after` seconds."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"Too many requests are waiting; try again in {retry_after} s.")
        self.retry_after = retry_after


class Draining(MoedraftError):
    """The server is shutting down and takes nothing new."""

    def __init__(self) -> None:
        super().__init__("The server is shutting down; send the request to another one.")


class EngineFailed(MoedraftError):
    """The engine's thread has ended, or its last steps failed: nothing can be answered now."""

    def __init__(self) -> None:
        super().__init__("The engine has failed; try again later, or send the request to another server.")


class Channel:
    """The shared state of a ticket. `put` belongs to the engine's thread, `take` to the reader's loop."""

    def __init__(self, request_id: str, loop: asyncio.AbstractEventLoop) -> None:
        self.request_id = request_id
        self.loop = loop
        self.tokens = 0  # of the answer so far
        self.cancelled = False  # by the reader
        self.ended = False  # nothing more will be put
        self.last: RequestOutput | None = None
        self._pending: RequestOutput | None = None
        self._called = False  # the loop knows already that there is something
        self._news = asyncio.Event()
        self._lock = threading.Lock()

    def put(self, output: RequestOutput) -> bool:
        """Add an output; its text is joined to what was not taken yet. True: the loop must call `wake`."""
        with self._lock:
            if self.ended:
                return False
            missed = self._pending.delta if self._pending is not None else ""
            self._pending = self.last = replace(output, delta=missed + output.delta) if missed else output
            self.ended = output.finish_reason is not None
            return self._call()

    def end(self) -> bool:
        """Nothing more will come, and there is no last output to show. True: the loop must call `wake`."""
        with self._lock:
            self.ended = True
            return self._call()

    def lost(self, reason: FinishReason) -> RequestOutput:
        """A last output for a request whose own got lost: what was said so far, and nothing new."""
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
            num_drafts=0,
            num_draft_tokens=0,
            num_accepted_tokens=0,
            num_rejections=0,
            mean_acceptance_length=None,
            seconds=0.0,
        )

    def wake(self) -> None:
        """In the reader's loop: there is something to take."""
        self._news.set()

    async def take(self) -> RequestOutput | None:
        """The next output; None after the last. A cancelled wait loses nothing."""
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
        """The engine has nothing more to say; outputs may still be waiting to be taken."""
        return self._channel.ended

    def cancel(self) -> None:
        """Abort between two steps. From any thread, any number of times; after the end it does nothing."""
        self._cancel(self._channel)

    async def result(self) -> RequestOutput:
        """The whole answer: the last output, its `delta` being all text that was not taken before."""
        text, last = "", None
        async for output in self:
            text, last = text + output.delta, output
        last = last or self._channel.last
        assert last is not None, "a request ends with an output"
        return replace(last, delta=text)

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """Outputs as they grow; the last has a finish_reason ("abort" where the ticket was cancelled)."""
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
