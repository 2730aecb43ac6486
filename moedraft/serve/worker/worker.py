"""Connects coroutines with the engine, which belongs to one thread. Knows nothing of HTTP."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from moedraft.core import RequestOutput, SamplingParams, StorageError
from moedraft.cpu.memory import return_large_blocks
from moedraft.cpu.threads import compute_alone
from moedraft.distill.pace.governor import Load, write_load
from moedraft.learning_state import LearningState
from moedraft.routing.router import Route
from moedraft.selecting.prior.confusion import Mistake
from moedraft.selecting.selector import EvidenceSelector
from moedraft.serve.worker.search import Search
from moedraft.serve.worker.thread import EngineThread
from moedraft.serve.worker.ticket import Channel, Draining, EngineFailed, Overloaded, Ticket
from moedraft.system.build import System

__all__ = ["Draining", "EngineFailed", "Overloaded", "Snapshot", "Ticket", "Worker"]

LOAD_SECONDS = 1.0  # between two looks at the load
LOAD_STALE = 3.0  # s after which an unchanged load is written again, as a heartbeat
IDLE_WINDOW = 5.0  # s over which the idle share is taken

DONE = object()  # what an iterator gives that has ended

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Snapshot:
    """The worker's state at one moment. Times are monotonic seconds of the worker's clock."""

    running: int  # requests in a slot
    waiting: int  # accepted, without a slot yet
    slots: int
    steps: int  # since the start
    last_step_at: float | None
    idle_share: float  # 0 … 1, over the last seconds
    tokens_total: int
    tokens_per_second: float  # over the last ten seconds
    speedup: float | None  # against plain decoding, measured
    learning: LearningState  # the recorder's: paused where records cannot be stored
    draining: bool
    failed: str | None  # why the engine cannot serve; cleared by a step that succeeds


class Worker:
    """Serves the requests of coroutines with one engine. Call `start`, later `stop`; `system` stays open.

    `submit`, `call` and `drain` are for coroutines; everything else may be called from any thread. `clock`
    measures all durations (monotonic seconds).
    """

    def __init__(
        self, system: System, *, max_waiting: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.system = system
        self.max_waiting = max_waiting
        self._work_comes: Callable[[], None] = lambda: None
        self._clock = clock
        self._engine = EngineThread(system.engine, clock, tend_memory=system.settings.cpu_fast_paths)
        self._routing = ThreadPoolExecutor(1, "moedraft-routes", initializer=compute_alone)
        self.search = Search(system)
        self._quit = threading.Event()
        self._publisher = threading.Thread(target=self._publish_loads, name="moedraft-load", daemon=True)

    def when_work_comes(self, callback: Callable[[], None]) -> None:
        """Have `callback` called for each request that finds no other being served, before it is queued.

        It is called in the event loop, so it must be quick, and it must not raise. A later one replaces it.
        """
        self._work_comes = callback

    def start(self) -> None:
        self.system.loader.load_beside()
        self.system.recorder.record_beside()
        self.system.engine.work_beside()
        if self.system.settings.cpu_fast_paths:
            return_large_blocks()
        self._engine.start()
        self._publisher.start()

    def warm_up_router(self) -> None:
        """Load the router's embedder, and have it prepared for all lengths beside the traffic.

        A prompt waits for one piece of that at most. Raises InvalidRequest if the embedder cannot be loaded.
        """
        pieces = self.system.router.warm_up()

        def prepare() -> None:
            if next(pieces, DONE) is not DONE:
                with suppress(RuntimeError):  # the worker has been stopped
                    self._routing.submit(prepare)

        if next(pieces, DONE) is not DONE:
            self._routing.submit(prepare)

    def stop(self, timeout: float = 5.0) -> None:
        """Abort everything and end the threads; a second call does nothing.

        A step that hangs for `timeout` seconds is abandoned. Close the system afterwards.
        """
        self._quit.set()
        self._routing.shutdown(wait=False, cancel_futures=True)
        self.search.close()
        self._engine.end(timeout)
        if self._publisher.ident is not None:
            self._publisher.join(timeout)

    async def submit(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        expert: str | None = None,
        draft: bool = True,
        capture: bool = True,
        topic: str | None = None,
        ids: list[int] | None = None,
        routed: Route | None = None,
        source: str = "",
        chat: bool = False,
        counted: bool = True,
    ) -> Ticket:
        """Queue a request. The arguments are those of `Engine.add`.

        Raises InvalidRequest as that does, Overloaded at once if `max_waiting` requests wait already,
        EngineFailed if nothing can be answered, and Draining after `drain` or `stop`. If the caller is
        cancelled meanwhile, the request is aborted.
        """
        channel = Channel(uuid.uuid4().hex, asyncio.get_running_loop())
        options: dict[str, Any] = {"expert": expert, "draft": draft, "capture": capture, "topic": topic}
        options |= {"ids": ids, "routed": routed, "source": source, "chat": chat, "counted": counted}
        if not self.busy:
            self._work_comes()
        taken = self._engine.add(channel, prompt, params, options, self.max_waiting)
        ticket = Ticket(channel, self._engine.cancel)
        try:
            await asyncio.wrap_future(taken)
        except BaseException:
            ticket.cancel()
            raise
        return ticket

    def check_room(self, coming: int = 0) -> None:
        """Raises Overloaded, EngineFailed or Draining if `submit` would after `coming` others came."""
        self._engine.check_room(self.max_waiting - coming)

    async def call(self, work: Callable[[System], T]) -> T:
        """Run `work(system)` between two steps of the engine; returns its result or raises its exception.

        Nothing is decoded meanwhile. Raises Draining after `stop`. If the caller is cancelled before the work
        begins, it is not run.
        """
        return await asyncio.wrap_future(self._engine.do(lambda: work(self.system)))

    async def route(self, text: str) -> Route | None:
        """What the router says of a prompt, for `submit`; the engine goes on meanwhile.

        None where the router fails; the engine then asks it once more, and says so in the log.
        """
        try:
            return (await self.routes([text]))[0]
        except Exception:
            return None

    async def routes(self, texts: list[str]) -> list[Route]:
        """What the router says of each text; the engine goes on meanwhile. Raises what the router raises."""
        return await asyncio.wrap_future(self._routing.submit(self.system.router.route, texts))

    async def trial(self, prompt: str, max_tokens: int) -> RequestOutput:
        """Answer a prompt greedily, leaving no trace in statistics or learning. Raises as `submit`."""
        params = SamplingParams(max_tokens=max_tokens)
        options: dict[str, Any] = {"capture": False, "counted": False, "chat": True, "topic": prompt}
        async with await self.submit(prompt, params, **options) as ticket:
            return await ticket.result()

    def load_new(self) -> None:
        """Load newly published versions now, while the engine is idle, instead of with the next request."""
        self.system.loader.hurry()
        with suppress(Draining):
            self._engine.do(self.system.engine.refresh)

    async def drain(self, timeout: float) -> int:
        """Accept nothing new, and give accepted requests `timeout` seconds to finish; then abort the rest.

        Returns how many were aborted. Calling `abort_all` meanwhile ends the wait.
        """
        self._engine.refuse_requests()
        await self._until_empty(timeout)
        left = self._engine.open
        if left:
            self._engine.abort_all()
            await self._until_empty(1.0)  # a step that hangs must not hold up the shutdown
        return left

    @property
    def busy(self) -> bool:
        """Whether requests are being served or are waiting."""
        return self._engine.open > 0

    @property
    def dead(self) -> bool:
        """Whether the engine's thread has ended by a fault, so that only a new process serves again."""
        return self._engine.closed and self._engine.failed is not None

    @property
    def compares(self) -> bool:
        """Whether drafts can be compared, so that evidence may overrule the router."""
        selector = self.system.engine.selector
        return isinstance(selector, EvidenceSelector) and selector.compares

    @property
    def mistakes(self) -> list[Mistake]:
        """What the router takes for what, again and again, as the evidence of the last answers says."""
        selector = self.system.engine.selector
        return selector.mistakes() if isinstance(selector, EvidenceSelector) else []

    def abort_all(self) -> None:
        """End all requests between two steps."""
        self._engine.abort_all()

    def snapshot(self) -> Snapshot:
        engine, now = self._engine, self._clock()
        return Snapshot(
            running=engine.running,
            waiting=engine.waiting,
            slots=engine.slots,
            steps=engine.steps,
            last_step_at=engine.last_step_at,
            idle_share=self._idle_share(now, IDLE_WINDOW),
            tokens_total=engine.tokens,
            tokens_per_second=engine.meter.tokens_per_second(now),
            speedup=engine.speedup,
            learning=self.system.recorder.state,
            draining=engine.draining,
            failed=engine.failed,
        )

    def progress_stalled(self, threshold: float) -> bool:
        """Whether one job or step has taken longer than `threshold` seconds, or the thread has ended.

        A long queue or a long answer does not count as stalled, since every step shows progress.
        """
        now = self._clock()  # read before `occupied_since`: this thread may be held up in between
        since = self._engine.occupied_since
        alive = self._engine.is_alive() and not self._engine.closed
        return not alive or (since is not None and now - since > threshold)

    def _idle_share(self, now: float, window: float) -> float:
        since = self._engine.occupied_since
        going_on = 0.0 if since is None else min(now - since, window) / window
        return max(0.0, 1.0 - self._engine.meter.busy_share(now, window) - going_on)

    async def _until_empty(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self._engine.open and time.monotonic() < deadline and self._engine.is_alive():
            await asyncio.sleep(0.01)

    def _erase(self) -> None:
        """Overwrite purged records on the disk, if a reader kept that from being done at the purge."""
        home = self.system.store.home
        if home.erasing:
            with suppress(StorageError):
                home.checkpoint(wait=False)

    def _publish_loads(self) -> None:
        """Write the load to the store for the trainer, in a thread of its own, because disks are slow."""
        known: tuple[float, int] | None = None
        known_at = -math.inf
        while not self._quit.wait(LOAD_SECONDS):
            self._erase()
            now = self.snapshot()
            # The trainer makes way at the first busy second, and comes back when several were calm.
            latest = self._idle_share(self._clock(), LOAD_SECONDS)
            idle, waiting = round(min(now.idle_share, latest), 2), now.waiting
            if (idle, waiting) == known and time.monotonic() - known_at < LOAD_STALE:
                continue
            try:
                write_load(self.system.store.registry, Load(idle, waiting, time.time()))
            except StorageError as error:
                log.debug("The load was not published: %s", error)
            else:
                known, known_at = (idle, waiting), time.monotonic()
