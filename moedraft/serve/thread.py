"""The thread that owns the engine: jobs, then one step, and so on; without work it sleeps on its queue.

Whatever touches the engine is a job in that queue: requests, cancellations, admin work. Knows no coroutine
but through the channels that it puts outputs into.
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
from contextlib import suppress
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch

from moedraft.core import FinishReason, RequestOutput, SamplingParams
from moedraft.engine.engine import Engine
from moedraft.memory import return_free_memory, return_large_blocks
from moedraft.products import generate_ahead
from moedraft.serve.meter import Meter
from moedraft.serve.ticket import Channel, Draining, EngineFailed, Overloaded, wake_all

REFRESH_SECONDS = 1.0  # an engine without work looks for new adapters so often
MAX_FAILURES = 3  # steps in a row that raise before the engine counts as failed
LONGEST_RETRY = 60  # s

log = logging.getLogger(__name__)
T = TypeVar("T")


class Job(Generic[T]):
    """Work for the engine's thread, whose result somebody waits for."""

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
    """Steps `engine` for many requests. Public methods and figures are for any thread."""

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        super().__init__(name="moedraft-engine", daemon=True)
        self.meter = Meter(clock())
        self.open = 0  # requests accepted and not ended
        self.steps = 0
        self.tokens = 0
        self.last_step_at: float | None = None
        self.occupied_since: float | None = None  # when the job or step that goes on began
        self.speedup: float | None = None
        self.failed: str | None = None
        self.draining = False
        self.closed = False  # no job is taken any more
        self._engine = engine
        self._clock = clock
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # `put` suits destructors
        self._lock = threading.Lock()  # of `open`, `draining` and `closed`
        self._channels: dict[str, Channel] = {}  # of the requests that the engine has
        self._box: deque[RequestOutput] = deque()  # their outputs, whoever steps
        self._failures = 0  # in a row
        self._request_seconds = 1.0  # running mean
        self._trimmed_at = 0  # steps done when free memory was last given back
        self._ending = False

    @property
    def slots(self) -> int:
        return self._engine.scheduler.slots

    @property
    def running(self) -> int:
        return len(self._engine.scheduler.running)

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
        """Queue a request; the future says whether the engine took it.

        Raises Draining, EngineFailed, and Overloaded where `max_waiting` requests wait already. A future that
        is cancelled must be followed by `cancel`.
        """
        job = Job(lambda: self._add(channel, prompt, params, options))
        with self._lock:
            self.check_room(max_waiting)
            self.open += 1
            self._inbox.put(job)
        return job.future

    def check_room(self, max_waiting: int) -> None:
        """Raises what `add` would raise now. An engine that fails gets one at a time, to recover by."""
        if self.failed is not None and (self.closed or self.open):
            raise EngineFailed
        if self.draining or self.closed:
            raise Draining
        if self.open >= self.slots + max_waiting:
            raise Overloaded(self._retry_after())

    def do(self, work: Callable[[], T]) -> Future[T]:
        """Have `work` done between two steps. Raises Draining."""
        job = Job(lambda: self._admin(work))
        with self._lock:
            if self.closed:
                raise Draining
            self._inbox.put(job)
        return job.future

    def cancel(self, channel: Channel) -> None:
        """Abort its request between two steps. Destructors call it, at any point of any thread: no lock."""
        if not channel.ended and not channel.cancelled:
            channel.cancelled = True
            self._inbox.put(lambda: self._abort(channel))

    def abort_all(self) -> None:
        self._inbox.put(self._abort_all)

    def refuse_requests(self) -> None:
        with self._lock:
            self.draining = True

    def end(self, timeout: float) -> None:
        """Abort everything and end. A step that hangs for `timeout` seconds is left to itself."""
        self.refuse_requests()
        self._ending = True
        self._inbox.put(lambda: None)
        if self.ident is not None:
            self.join(timeout)
        if self.is_alive() or self.ident is None:
            self._refuse_jobs()
            self._end_all()

    def _retry_after(self) -> int:
        """Seconds until about half the queue has moved on."""
        rounds = (self.open - self.slots + 1) / self.slots / 2
        return max(1, min(LONGEST_RETRY, math.ceil(rounds * self._request_seconds)))

    # -- the thread itself -----------------------------------------------------------------------

    def run(self) -> None:
        return_large_blocks()
        try:
            generate_ahead()
            while not self._ending:
                self._do_jobs()
                if self._engine.has_work:
                    self._occupied(self._step)
        except BaseException as error:  # nothing but a fault of ours comes here
            log.exception("The engine's thread has ended.")
            self.failed = f"the engine's thread has ended: {type(error).__name__}: {error}"
        finally:
            self._close()

    def _do_jobs(self) -> None:
        """Those that are there now; without any work, wait for one."""
        wait = not self._engine.has_work
        for _ in range(self._inbox.qsize() or int(wait)):
            try:
                job = self._inbox.get(block=wait, timeout=REFRESH_SECONDS)
            except queue.Empty:
                job = self._rest
            wait = False
            self._occupied(job)

    def _rest(self) -> None:
        """A second without work: look for new adapters, give back what the requests left behind."""
        self._engine.refresh()
        if self._trimmed_at != self.steps:
            return_free_memory()
            self._trimmed_at = self.steps

    def _occupied(self, work: Callable[[], None]) -> None:
        """Do `work`, pass on the outputs, and keep account of time and tokens."""
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
            self.speedup = self._engine.decoder.speedup
        self.last_step_at = self._clock()

    def _add(
        self, channel: Channel, prompt: str | list[int], params: SamplingParams, options: dict[str, Any]
    ) -> None:
        self._channels[channel.request_id] = channel
        self._engine.boxes[channel.request_id] = self._box
        try:
            self._engine.add(prompt, params, request_id=channel.request_id, **options)
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
            self._tear_out(channel.request_id)
            self._end_lost()
        elif not channel.ended:  # cancelled before the engine had it
            self._close_channel(channel)

    def _abort_all(self) -> None:
        for request_id in list(self._engine.sequences):
            self._tear_out(request_id)
        self._end_lost()

    def _deliver(self) -> None:
        """Pass the outputs in the box on, with one call into each loop."""
        due: dict[asyncio.AbstractEventLoop, list[Channel]] = {}
        while self._box:
            output = self._box.popleft()
            channel = self._channels.get(output.request_id)
            if channel is None:
                continue
            self.tokens += len(output.token_ids) - channel.tokens
            channel.tokens = len(output.token_ids)
            if output.finish_reason is not None:  # room first: the reader may ask again at once
                self._request_seconds += 0.1 * (output.seconds - self._request_seconds)
                self._forget(channel)
            if channel.put(output):
                due.setdefault(channel.loop, []).append(channel)
        for loop, channels in due.items():
            self._wake(loop, channels)

    def _wake(self, loop: asyncio.AbstractEventLoop, channels: list[Channel]) -> None:
        try:
            loop.call_soon_threadsafe(wake_all, channels)
        except RuntimeError:  # the loop is closed: nobody will read
            for channel in channels:
                self.cancel(channel)

    def _close_channel(self, channel: Channel) -> None:
        """End it without an output."""
        if channel.end():
            self._wake(channel.loop, [channel])
        self._forget(channel)

    def _forget(self, channel: Channel) -> None:
        self._channels.pop(channel.request_id, None)
        self._engine.boxes.pop(channel.request_id, None)
        with self._lock:
            self.open -= 1

    # -- when something goes wrong, and the end --------------------------------------------------

    def _recover(self, error: Exception) -> None:
        """What the engine worked on ends with "error"; what waits for a slot goes on waiting.

        With nothing in a slot the fault lies elsewhere, and those that wait end too: the engine must not fail
        step after step for ever.
        """
        log.error("A step failed.", exc_info=error)
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            self.failed = f"{self._failures} steps in a row failed: {type(error).__name__}: {error}"
        scheduler = self._engine.scheduler
        kept = {one.request_id for one in scheduler.waiting} if scheduler.running else set()
        for request_id in self._engine.sequences.keys() - kept:
            self._tear_out(request_id)
        if scheduler.running:  # not even an abort could take them out
            scheduler.running.clear()
            scheduler.num_ready = 0
        scheduler.waiting = deque(one for one in scheduler.waiting if one.request_id in kept)
        outputs = [replace(o, finish_reason="error") if o.finish_reason == "abort" else o for o in self._box]
        self._box.clear()
        self._box.extend(outputs)
        self._end_lost()

    def _tear_out(self, request_id: str) -> None:
        """Abort a request; where even that fails, forget it."""
        sequence = self._engine.sequences[request_id]
        try:
            self._engine.abort(request_id)
        except Exception:
            log.exception("A request could not be aborted; it is forgotten.")
            self._engine.sequences.pop(request_id, None)
            self._engine.texts.pop(request_id, None)
            if sequence in self._engine.scheduler.running:
                with suppress(Exception), torch.inference_mode():  # as the caches it moves
                    self._engine.scheduler.remove(sequence)

    def _end_lost(self, reason: FinishReason = "error") -> None:
        """Requests that the engine has no more and whose last output got lost."""
        said = {output.request_id for output in self._box if output.finish_reason is not None}
        for request_id in self._channels.keys() - self._engine.sequences.keys() - said:
            self._box.append(self._channels[request_id].lost(reason))

    def _close(self) -> None:
        """Nothing is taken any more, and nobody waits in vain."""
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
