"""The thread that owns the engine: it does the jobs that wait, then one step, and so on.

Everything that touches the engine is a job in its queue: requests, cancellations, and an operator's changes.
Without work the thread sleeps until the next job. It reaches coroutines only through their channels.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import torch

from moedraft.core import FinishReason, RequestOutput, SamplingParams
from moedraft.cpu.memory import return_free_memory
from moedraft.cpu.products import generate_ahead
from moedraft.engine.port import ServingEngine
from moedraft.serve.worker.meter import Meter
from moedraft.serve.worker.ticket import Channel, Draining, EngineFailed, Overloaded, wake_all

REFRESH_SECONDS = 1.0  # an engine without work looks for new adapters so often
MAX_FAILURES = 3  # steps in a row that raise before the engine counts as failed
LONGEST_RETRY = 60  # s

log = logging.getLogger(__name__)
T = TypeVar("T")


class Job(Generic[T]):
    """Work for the engine's thread, whose result another thread waits for."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.work = work
        self.future: Future[T] = Future()

    def __call__(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return  # whoever wanted it has gone
        try:
            self.future.set_result(self.work())
        except BaseException as error:
            self.future.set_exception(error)

    def refuse(self, error: Exception) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class EngineThread(threading.Thread):
    """Runs `engine` for many requests. Public methods and attributes may be used from any thread."""

    def __init__(
        self, engine: ServingEngine, clock: Callable[[], float], *, tend_memory: bool = True
    ) -> None:
        super().__init__(name="moedraft-engine", daemon=True)
        self.meter = Meter(clock())
        self.open = 0  # requests accepted and not ended
        self.steps = 0
        self.tokens = 0
        self.last_step_at: float | None = None
        self.occupied_since: float | None = None  # when the current job or step began; None: there is none
        self.speedup: float | None = None
        self.failed: str | None = None  # never an exception's message, which may quote what a client sent
        self.draining = False
        self.closed = False  # no job is taken any more
        self._engine = engine
        self._clock = clock
        self._tend_memory = tend_memory
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # safe in destructors
        self._lock = threading.Lock()  # of `open`, `draining` and `closed`
        self._channels: dict[str, Channel] = {}  # of the requests that the engine has
        self._box: deque[RequestOutput] = deque()  # outputs that were not delivered yet
        self._failures = 0  # in a row
        self._request_seconds = 1.0  # running mean
        self._trimmed_at = 0  # steps done when free memory was last given back
        self._ending = False

    @property
    def slots(self) -> int:
        return self._engine.figures.slots

    @property
    def running(self) -> int:
        return self._engine.figures.running

    @property
    def waiting(self) -> int:
        return max(0, self.open - self.running)

    def add(
        self,
        channel: Channel,
        prompt: str | list[int],
        params: SamplingParams,
        options: dict[str, Any],
        max_waiting: int,
    ) -> Future[None]:
        """Queue a request. The future says whether the engine accepted it.

        Raises Draining, EngineFailed, or Overloaded if `max_waiting` requests wait already. If the future is
        cancelled, `cancel` must be called for the channel.
        """
        job = Job(lambda: self._add(channel, prompt, params, options))
        with self._lock:
            self.check_room(max_waiting)
            self.open += 1
            self._inbox.put(job)
        return job.future

    def check_room(self, max_waiting: int) -> None:
        """Raises what `add` would raise at this moment.

        An engine that fails is given one request at a time, because a step that succeeds shows that it works.
        """
        if self.failed is not None and (self.closed or self.open):
            raise EngineFailed
        if self.draining or self.closed:
            raise Draining
        if self.open >= self.slots + max_waiting:
            raise Overloaded(self._retry_after())

    def do(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` between two steps; the future has its result. Raises Draining after the thread's end."""
        job = Job(lambda: self._admin(work))
        with self._lock:
            if self.closed:
                raise Draining
            self._inbox.put(job)
        return job.future

    def cancel(self, channel: Channel) -> None:
        """Abort the channel's request between two steps.

        Destructors call this, which Python may run in any thread at any point, even in one that holds the
        lock: so it takes no lock.
        """
        if not channel.ended and not channel.cancelled:
            channel.cancelled = True
            self._inbox.put(lambda: self._abort(channel))

    def abort_all(self) -> None:
        self._inbox.put(self._abort_all)

    def refuse_requests(self) -> None:
        with self._lock:
            self.draining = True

    def end(self, timeout: float) -> None:
        """Abort everything and end the thread. A step that hangs for `timeout` seconds is abandoned."""
        self.refuse_requests()
        self._ending = True
        self._inbox.put(lambda: None)
        if self.ident is not None:
            self.join(timeout)
        if self.is_alive() or self.ident is None:
            self._refuse_jobs()
            self._end_all()

    def _retry_after(self) -> int:
        """Seconds until about half of the queue should have been served."""
        rounds = (self.open - self.slots + 1) / self.slots / 2
        return max(1, min(LONGEST_RETRY, math.ceil(rounds * self._request_seconds)))

    # -- the thread itself -----------------------------------------------------------------------

    def run(self) -> None:
        try:
            torch.get_num_threads()  # fixes how many threads this one computes with, whatever others set
            generate_ahead()
            while not self._ending:
                self._do_jobs()
                if self._engine.has_work:
                    self._occupied(self._step)
        except BaseException as error:  # only a fault of ours comes here
            log.exception("The engine's thread has ended.")
            self.failed = f"the engine's thread has ended ({type(error).__name__}; see the log)"
        finally:
            self._close()

    def _do_jobs(self) -> None:
        """Do the jobs that wait now. If the engine has no work, wait for the next job."""
        wait = not self._engine.has_work
        for _ in range(self._inbox.qsize() or int(wait)):
            try:
                job = self._inbox.get(block=wait, timeout=REFRESH_SECONDS)
            except queue.Empty:
                job = self._rest
            wait = False
            self._occupied(job)

    def _rest(self) -> None:
        """After a second without work: look for new adapters and give back memory that requests left free."""
        self._engine.refresh()
        if self._tend_memory and self._trimmed_at != self.steps:
            return_free_memory()
            self._trimmed_at = self.steps

    def _occupied(self, work: Callable[[], None]) -> None:
        """Do `work`, pass on the outputs, and record the time and the tokens it took."""
        began = self.occupied_since = self._clock()
        tokens = self.tokens
        try:
            work()
        except Exception as error:
            self._recover(error)
        self._deliver()
        self.occupied_since = None
        self.meter.add(began, self._clock(), self.tokens - tokens)

    def _step(self) -> None:
        self._engine.step()
        self.steps += 1
        self._failures, self.failed = 0, None
        if self.last_step_at is None or int(self._clock()) != int(self.last_step_at):
            self.speedup = self._engine.figures.speedup
        self.last_step_at = self._clock()

    def _add(
        self, channel: Channel, prompt: str | list[int], params: SamplingParams, options: dict[str, Any]
    ) -> None:
        self._channels[channel.request_id] = channel
        try:
            self._engine.add(
                prompt, params, request_id=channel.request_id, on_output=self._box.append, **options
            )
        except BaseException:
            self._close_channel(channel)
            raise

    def _admin(self, work: Callable[[], T]) -> T:
        try:
            return work()
        finally:
            self._end_lost()

    def _abort(self, channel: Channel) -> None:
        if channel.request_id in self._channels:
            self._engine.abort(channel.request_id)
            self._end_lost()
        elif not channel.ended:  # cancelled before the engine had it
            self._close_channel(channel)

    def _abort_all(self) -> None:
        for request_id in list(self._engine.request_ids):
            self._engine.abort(request_id)
        self._end_lost()

    def _deliver(self) -> None:
        """Hand the collected outputs to their channels, and wake each event loop once."""
        due: dict[asyncio.AbstractEventLoop, list[Channel]] = {}
        while self._box:
            output = self._box.popleft()
            channel = self._channels.get(output.request_id)
            if channel is None:
                continue
            self.tokens += len(output.token_ids) - channel.tokens
            channel.tokens = len(output.token_ids)
            if output.finish_reason is not None:  # free its place first: the reader may ask again
                self._request_seconds += 0.1 * (output.seconds - self._request_seconds)
                self._forget(channel)
            if channel.put(output):
                due.setdefault(channel.loop, []).append(channel)
            elif channel.loop.is_closed():  # it was woken before, and nobody will read
                self.cancel(channel)
        for loop, channels in due.items():
            self._wake(loop, channels)

    def _wake(self, loop: asyncio.AbstractEventLoop, channels: list[Channel]) -> None:
        try:
            loop.call_soon_threadsafe(wake_all, channels)
        except RuntimeError:  # the loop is closed: nobody will read
            for channel in channels:
                self.cancel(channel)

    def _close_channel(self, channel: Channel) -> None:
        """End the channel without a last output."""
        if channel.end():
            self._wake(channel.loop, [channel])
        self._forget(channel)

    def _forget(self, channel: Channel) -> None:
        self._channels.pop(channel.request_id, None)
        with self._lock:
            self.open -= 1

    # -- when something goes wrong, and the end --------------------------------------------------

    def _recover(self, error: Exception) -> None:
        """After a failed step: let the engine end the affected requests, and count failures in a row."""
        log.error("A step failed.", exc_info=error)
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            self.failed = f"{self._failures} steps in a row failed ({type(error).__name__}; see the log)"
        self._engine.recover()
        self._end_lost()

    def _end_lost(self, reason: FinishReason = "error") -> None:
        """Give a last output to requests that the engine no longer has and that never got one."""
        said = {output.request_id for output in self._box if output.finish_reason is not None}
        for request_id in self._channels.keys() - self._engine.request_ids - said:
            self._box.append(self._channels[request_id].lost(reason))

    def _close(self) -> None:
        """Accept no more jobs, and end every request, so that nobody waits for ever."""
        self._refuse_jobs()
        self._abort_all()
        self._deliver()
        self._end_all()

    def _refuse_jobs(self) -> None:
        with self._lock:
            self.closed = True
        while True:
            try:
                job = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(job, Job):
                job.refuse(EngineFailed() if self.failed is not None else Draining())

    def _end_all(self) -> None:
        self._box.extend(channel.lost("abort") for channel in list(self._channels.values()))
        self._deliver()
