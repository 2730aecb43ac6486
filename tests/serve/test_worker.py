"""The engine's thread and its coroutines: nothing is lost, nothing is left, nobody waits in vain."""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from serve_fakes import tiny_system, traces_of
from waiting import until

from moedraft.core import InvalidRequest, RequestOutput, SamplingParams, StorageError
from moedraft.distill.pace.governor import read_load
from moedraft.routing.router import Route
from moedraft.serve.worker.meter import Meter
from moedraft.serve.worker.worker import Draining, EngineFailed, Overloaded, Ticket, Worker
from moedraft.system.build import System

LONG = SamplingParams(max_tokens=200)


def params(count: int = 12) -> SamplingParams:
    return SamplingParams(max_tokens=count)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 90))


async def soon() -> None:
    """Let tasks that were just made run up to where they wait."""
    await asyncio.sleep(0)


class Gate:
    """The engine's steps, one at a time: `let(n)` allows n more, `open()` all."""

    def __init__(self, system: System, monkeypatch: pytest.MonkeyPatch) -> None:
        self._changed = threading.Condition()
        self._allowed, self._standing, self._open = 0, False, False
        self.done = 0
        self._step = system.engine.step
        monkeypatch.setattr(system.engine, "step", self._gated)

    def let(self, steps: int = 1) -> None:
        with self._changed:
            self._allowed += steps
            self._changed.notify_all()

    @property
    def is_closed(self) -> bool:
        """Whether a step stands at the gate and will not go through by itself."""
        with self._changed:
            return self._standing and not self._allowed

    @property
    def used_up(self) -> bool:
        """Whether no more steps are allowed."""
        with self._changed:
            return not self._allowed

    def open(self) -> None:
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def _gated(self) -> list[RequestOutput]:
        with self._changed:
            self._standing = True
            self._changed.wait_for(lambda: self._open or self._allowed)
            self._allowed -= not self._open
            self._standing = False
        outputs = self._step()
        self.done += 1
        return outputs


@pytest.fixture
def gate(system: System, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(system, monkeypatch)
    yield gate
    gate.open()


@pytest.fixture
def gated(worker: Worker, gate: Gate) -> Worker:
    """A worker whose steps stand at the gate, which opens before the worker is stopped."""
    return worker


def requests_of(worker: Worker) -> int:
    """Those accepted and not ended."""
    now = worker.snapshot()
    return now.running + now.waiting


def is_clean(worker: Worker) -> bool:
    """No trace of any request."""
    return not any(traces_of(worker).values())


# -- answers -------------------------------------------------------------------------------------


def test_an_answer_streams_and_is_the_engines_own(system: System) -> None:
    [alone] = system.engine.generate(["1 2 3"], params(40))
    worker = Worker(system, max_waiting=0)
    worker.start()

    async def ask() -> list[RequestOutput]:
        return [output async for output in await worker.submit("1 2 3", params(40))]

    outputs = run(ask())
    worker.stop()
    assert "".join(output.delta for output in outputs) == outputs[-1].text == alone.text
    assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + ["length"]
    assert len(outputs) > 3
    now = worker.snapshot()
    assert (now.running, now.waiting, now.tokens_total) == (0, 0, 40)
    assert now.steps >= len(outputs)
    assert is_clean(worker)


def test_more_requests_than_slots_all_get_their_own_answer(worker: Worker) -> None:
    prompts = [[i, i + 1] for i in range(12)]

    async def ask(prompt: list[int]) -> RequestOutput:
        return await (await worker.submit(prompt, params(20))).result()

    async def all_of_them() -> list[RequestOutput]:
        return await asyncio.gather(*(ask(prompt) for prompt in prompts))

    got = run(all_of_them())
    run(until(lambda: is_clean(worker)))
    worker.stop()
    want = [worker.system.engine.generate([prompt], params(20))[0] for prompt in prompts]
    assert [one.token_ids for one in got] == [one.token_ids for one in want]
    assert [one.text for one in got] == [one.delta for one in got] == [one.text for one in want]


def test_the_first_request_makes_way(gated: Worker, gate: Gate) -> None:
    """Before it reaches the engine; those that come while others are served do not ask again."""
    seen: list[int] = []
    gated.when_work_comes(lambda: seen.append(requests_of(gated)))

    async def ask() -> None:
        tickets = [await submitted(gated, gate, i) for i in range(3)]
        assert seen == [0]
        gate.open()
        await asyncio.gather(*(ticket.result() for ticket in tickets))
        await (await gated.submit("1", params())).result()
        assert seen == [0, 0]

    run(ask())


def test_a_slow_reader_gets_everything_in_one_piece(worker: Worker) -> None:
    async def ask() -> list[RequestOutput]:
        ticket = await worker.submit("1 2 3", params(60))
        await until(lambda: ticket.done)
        return [output async for output in ticket]

    [only] = run(ask())
    assert only.delta == only.text
    assert (len(only.token_ids), only.finish_reason) == (60, "length")


def test_half_read_then_slow(gated: Worker, gate: Gate) -> None:
    async def ask() -> None:
        ticket = await gated.submit("1 2 3", params(60))
        gate.let(2)
        first = await anext(ticket)
        gate.open()
        await until(lambda: ticket.done)
        rest = await ticket.result()
        assert first.delta + rest.delta == rest.text
        assert rest.delta
        assert [output async for output in ticket] == []
        assert await ticket.result() == rest.__class__(**{**vars(rest), "delta": ""})

    run(ask())


def test_a_request_that_is_refused_leaves_nothing(worker: Worker) -> None:
    async def ask() -> None:
        for prompt, expert in (("", None), ([10**6], None), ([1] * 999, None), ("1", "nobody")):
            with pytest.raises(InvalidRequest):
                await worker.submit(prompt, params(), expert=expert)
        await until(lambda: is_clean(worker))

    run(ask())


def test_too_many_are_refused_at_once(gated: Worker, gate: Gate) -> None:
    """Four slots and eight in the queue; the engine is not even asked."""

    async def ask() -> None:
        tickets = [await submitted(gated, gate, i) for i in range(4)]
        tickets += [await submitted(gated, gate, i) for i in range(8)]
        assert gated.snapshot().waiting == 8
        began = time.perf_counter()
        for _ in range(20):
            with pytest.raises(Overloaded) as refusal:
                await gated.submit("1", params())
            assert 1 <= refusal.value.retry_after <= 60
        assert time.perf_counter() - began < 20  # while the engine stands still
        gate.open()
        await asyncio.gather(*(ticket.result() for ticket in tickets))
        assert (await (await gated.submit("1", params())).result()).finish_reason == "length"

    run(ask())


async def submitted(worker: Worker, gate: Gate, start: int = 1, what: SamplingParams = LONG) -> Ticket:
    """Submit while the gate is closed: jobs are done between two steps."""
    asking = asyncio.ensure_future(worker.submit([start, 2], what))

    def taken() -> bool:
        if gate.is_closed:
            gate.let()  # never two at once: those left over would let the requests end by themselves
        return asking.done()

    await until(taken)
    return asking.result()


def test_a_trial_is_answered_and_leaves_no_trace(worker: Worker) -> None:
    async def ask() -> None:
        found = await worker.trial("1 2", 5)
        assert (found.finish_reason, len(found.token_ids)) == ("length", 5)
        assert found.standings == ()
        told = await (await worker.submit("1 2", params())).result()
        assert told.token_ids[:5] == found.token_ids

    run(ask())
    worker.system.recorder.flush()
    served = worker.system.store.requests.summary()
    assert sum(one.requests for one in served.values()) == 1
    assert worker.system.store.replay.count() == 1


# -- leaving early -------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("how", ["cancel", "context", "garbage", "task"])
def test_leaving_frees_the_slot_within_a_step(gated: Worker, gate: Gate, steps: int, how: str) -> None:
    async def leave() -> None:
        ticket = await submitted(gated, gate)
        gate.let(steps)
        await until(lambda: gate.is_closed)
        if how == "cancel":
            ticket.cancel()
            ticket.cancel()
        elif how == "context":
            async with ticket:
                pass
        elif how == "garbage":
            del ticket
            gc.collect()
        else:
            reading = asyncio.ensure_future(read(ticket))
            del ticket
            await soon()
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            del reading
            gc.collect()
        done = gate.done
        gate.let()  # the step that stands at the gate
        await until(lambda: is_clean(gated))
        assert gate.done == done + 1

    run(leave())


async def read(ticket: Ticket) -> None:
    async for _ in ticket:
        pass


def test_leaving_the_queue_never_costs_a_slot(gated: Worker, gate: Gate) -> None:
    async def leave() -> None:
        tickets = [await submitted(gated, gate, i) for i in range(4)]
        queued = [await submitted(gated, gate, i) for i in range(4)]
        await until(lambda: gated.snapshot().running == 4)
        for ticket in queued:
            ticket.cancel()
        gate.let()
        await until(lambda: gated.snapshot().waiting == 0)
        assert gated.snapshot().running == 4
        [last] = [output async for output in queued[0]]
        assert (last.finish_reason, last.text) == ("abort", "")
        for ticket in tickets:
            ticket.cancel()
        gate.open()
        await until(lambda: is_clean(gated))

    run(leave())


def test_a_submission_that_is_cancelled_was_never_made(gated: Worker, gate: Gate) -> None:
    async def leave() -> None:
        holder = await submitted(gated, gate)
        await until(lambda: gate.is_closed)
        waiting = [asyncio.ensure_future(gated.submit([1], LONG)) for _ in range(5)]
        await until(lambda: requests_of(gated) == 6)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        # The engine hears of it between two steps, and one of them may have begun before all have left.
        await until(lambda: (gate.let() if gate.used_up else None) or requests_of(gated) == 1)
        assert list(gated.system.engine.request_ids) == [holder.request_id]
        holder.cancel()
        gate.open()
        await until(lambda: is_clean(gated))

    run(leave())


@pytest.mark.parametrize("unread", [False, True])
def test_a_loop_that_has_gone_leaves_nothing_running(gated: Worker, gate: Gate, unread: bool) -> None:
    """Also where it was told of an output before, which nobody has read."""
    tickets: list[Ticket] = []

    async def ask() -> None:
        tickets.append(await submitted(gated, gate))
        if unread:
            done = gate.done
            gate.let()
            await until(lambda: gate.done > done)

    run(ask())  # the loop closes while the request runs; the ticket stays alive
    done = gate.done
    gate.open()
    run(until(lambda: is_clean(gated)))
    assert tickets[0].done
    assert gate.done - done <= 3


def test_a_thousand_disconnects_leave_everything_flat(worker: Worker) -> None:
    async def disconnect(number: int) -> None:
        task = asyncio.ensure_future(use(number))
        await asyncio.sleep(0.0002 * (number % 17))
        task.cancel()
        await asyncio.wait([task])

    async def use(number: int) -> None:
        try:
            async with await worker.submit([number % 40, 2], LONG) as ticket:
                async for _ in ticket:
                    pass
        except Overloaded:
            pass

    async def all_of_them() -> None:
        for start in range(0, 1000, 20):
            await asyncio.gather(*(disconnect(number) for number in range(start, start + 20)))
        await until(lambda: is_clean(worker))

    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    run(all_of_them())
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) <= files + 2  # the store's connections come and go


# -- when a step fails ---------------------------------------------------------------------------


class Fault:
    """`engine.step` raises where `now` says so."""

    def __init__(self, system: System, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 0
        self._step = system.engine.step
        monkeypatch.setattr(system.engine, "step", self._faulty)

    def _faulty(self) -> list[RequestOutput]:
        if self.left:
            self.left -= 1
            raise RuntimeError("the device is gone")
        return self._step()


def test_a_step_that_raises_ends_what_runs_and_serving_goes_on(
    gated: Worker, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask() -> None:
        running = [await submitted(gated, gate, i) for i in range(4)]
        queued = [await submitted(gated, gate, 9, params(5)) for _ in range(3)]
        fault = Fault(gated.system, monkeypatch)  # before the gate
        fault.left = 1
        gate.let()
        gate.open()
        for ticket in running:
            last = await ticket.result()
            assert last.finish_reason == "error"
        for ticket in queued:
            assert (await ticket.result()).finish_reason == "length"
        assert gated.snapshot().failed is None
        await until(lambda: is_clean(gated))

    run(ask())


def test_an_engine_that_keeps_failing_says_so_until_a_step_succeeds(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault(worker.system, monkeypatch)

    async def reason() -> str | None:
        return (await (await worker.submit("1", params())).result()).finish_reason

    async def ask() -> None:
        for count in range(4):
            fault.left = 1
            assert await reason() == "error"
            assert (worker.snapshot().failed is not None) == (count >= 2)
        failed = worker.snapshot().failed or ""
        assert "RuntimeError" in failed
        assert "the device is gone" not in failed, "an exception's message may quote what a client sent"
        assert await reason() == "length"
        assert worker.snapshot().failed is None

    run(ask())


def test_a_fault_outside_the_slots_does_not_fail_for_ever(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Admission itself breaks: nobody has a slot, and the queue must not be tried again and again."""

    def broken() -> None:
        raise RuntimeError("no admission")

    async def ask() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(worker.system.engine, "refresh", broken)
            tickets = [await worker.submit("1", LONG) for _ in range(3)]
            assert {(await ticket.result()).finish_reason for ticket in tickets} == {"error"}
            await until(lambda: is_clean(worker))
        assert (await (await worker.submit("1", params())).result()).finish_reason == "length"

    run(ask())


def test_an_engine_that_cannot_even_abort_is_cleared(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = worker.system.engine.scheduler
    fault = Fault(worker.system, monkeypatch)

    def stuck(_: object) -> None:
        raise RuntimeError("the caches cannot be swapped")

    async def ask() -> None:
        tickets = [await worker.submit([i], LONG) for i in range(3)]
        await anext(tickets[0])
        with monkeypatch.context() as patch:
            patch.setattr(scheduler, "remove", stuck)
            fault.left = 1
            assert {(await ticket.result()).finish_reason for ticket in tickets} == {"error"}
        await until(lambda: is_clean(worker))
        assert (await (await worker.submit("1", params())).result()).finish_reason == "length"

    run(ask())


def test_an_abort_that_fails_touches_no_other(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def ask() -> None:
        first, second = [await worker.submit([i], LONG) for i in range(2)]
        await anext(first)
        monkeypatch.setattr(worker.system.engine.runner, "clear", lambda slot: 1 // 0)
        first.cancel()
        assert [output async for output in first][-1].finish_reason == "error"
        assert (await second.result()).finish_reason == "length"
        await until(lambda: is_clean(worker))

    run(ask())
    assert "could not be aborted" in caplog.text


def test_an_answer_lost_in_a_failing_step_still_ends(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request has left the engine when its sink raises; its last output never comes."""

    def broken(_: object) -> None:
        raise RuntimeError("the sink is full")

    worker.system.engine.subscribe(broken)

    async def ask() -> None:
        tickets = [await worker.submit("1 2", params(count)) for count in (5, 30)]
        assert [(await ticket.result()).finish_reason for ticket in tickets] == ["error", "error"]
        await until(lambda: is_clean(worker))

    run(ask())


# -- admin work ----------------------------------------------------------------------------------


def test_calls_run_on_the_engines_thread_between_steps(worker: Worker) -> None:
    async def ask() -> None:
        assert await worker.call(lambda system: threading.current_thread().name) == "moedraft-engine"
        assert await worker.call(lambda system: system is worker.system)
        with pytest.raises(ZeroDivisionError):
            await worker.call(lambda system: 1 // 0)
        assert worker.snapshot().failed is None

    run(ask())


def test_a_call_that_steps_the_engine_loses_no_output(worker: Worker) -> None:
    async def ask() -> None:
        tickets = [await worker.submit([i], params(30)) for i in range(3)]
        own = await worker.call(lambda system: system.engine.generate(["7"], params(40)))
        assert len(own[0].token_ids) == 40
        for ticket in tickets:
            outputs = [output async for output in ticket]
            assert "".join(output.delta for output in outputs) == outputs[-1].text
            assert len(outputs[-1].token_ids) == 30
        await until(lambda: is_clean(worker))

    run(ask())


def test_a_call_that_was_cancelled_in_time_is_not_run(gated: Worker, gate: Gate) -> None:
    ran = []

    async def ask() -> None:
        ticket = await submitted(gated, gate)
        await until(lambda: gate.is_closed)
        task = asyncio.ensure_future(gated.call(lambda system: ran.append(1)))
        await soon()
        task.cancel()
        await asyncio.wait([task])
        ticket.cancel()
        gate.open()
        await gated.call(lambda system: ran.append(2))

    run(ask())
    assert ran == [2]


# -- the end -------------------------------------------------------------------------------------


def test_draining_finishes_what_runs_and_takes_nothing_new(gated: Worker, gate: Gate) -> None:
    async def ask() -> None:
        tickets = [await submitted(gated, gate, i, params(20)) for i in range(6)]
        draining = asyncio.ensure_future(gated.drain(20))
        await until(lambda: gated.snapshot().draining)
        with pytest.raises(Draining):
            await gated.submit("1", params())
        gate.open()
        assert await draining == 0
        assert {(await ticket.result()).finish_reason for ticket in tickets} == {"length"}

    run(ask())


def test_draining_aborts_what_takes_too_long(gated: Worker, gate: Gate) -> None:
    async def ask() -> None:
        tickets = [await submitted(gated, gate, i) for i in range(6)]
        gate.let(1)
        asyncio.get_running_loop().call_later(0.3, gate.open)
        assert await gated.drain(0.05) == 6
        assert {(await ticket.result()).finish_reason for ticket in tickets} == {"abort"}
        await until(lambda: is_clean(gated))

    run(ask())


def test_stopping_ends_everything(system: System) -> None:
    worker = Worker(system, max_waiting=8)
    worker.start()

    async def ask() -> None:
        tickets = [await worker.submit([i], LONG) for i in range(6)]
        await asyncio.to_thread(worker.stop)
        for ticket in tickets:
            assert (await ticket.result()).finish_reason in ("abort", "length")
        for refused in (worker.submit("1", params()), worker.call(lambda system: 1)):
            with pytest.raises(Draining):
                await refused

    run(ask())
    worker.stop()
    assert is_clean(worker)
    assert worker.progress_stalled(1e9)
    assert not any(thread.name.startswith("moedraft-") for thread in threading.enumerate())


def test_stopping_with_a_frozen_step_hangs_nobody(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(system, monkeypatch)
    worker = Worker(system, max_waiting=8)
    worker.start()

    async def ask() -> None:
        ticket = await worker.submit("1", LONG)
        await until(lambda: gate.is_closed)
        waiting = asyncio.ensure_future(worker.submit("2", LONG))
        calling = asyncio.ensure_future(worker.call(lambda system: 1))
        await soon()
        await asyncio.to_thread(worker.stop, 0.1)
        assert (await ticket.result()).finish_reason == "abort"
        for task in (waiting, calling):
            with pytest.raises(Draining):
                await task

    run(ask())
    gate.open()
    worker.stop()
    assert not system.engine.has_work
    assert not traces_of(worker)["channels"]


def test_a_worker_that_never_started_can_be_stopped(system: System) -> None:
    worker = Worker(system, max_waiting=1)
    worker.stop()
    worker.stop()


# -- health --------------------------------------------------------------------------------------


class Clock:
    """The real one, and moved by hand."""

    def __init__(self) -> None:
        self.offset = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.offset


def test_prompts_are_routed_while_the_router_is_prepared(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first piece, which loads the embedder, is done at once; the others leave room between them."""
    pieces, third, go_on = list[int](), threading.Event(), threading.Event()

    def warm_up() -> Iterator[None]:
        for number in range(6):
            pieces.append(number)
            if number == 2:
                third.set()
                go_on.wait(30)
            yield

    done_before = []
    router, route = worker.system.router, worker.system.router.route

    def noting(texts: Sequence[str]) -> list[Route]:
        done_before.append(len(pieces))
        return route(texts)

    monkeypatch.setattr(router, "warm_up", warm_up)
    monkeypatch.setattr(router, "route", noting)
    worker.warm_up_router()
    assert pieces[0] == 0
    assert third.wait(30)

    async def routed() -> None:
        asked = asyncio.ensure_future(worker.routes(["1 2 3"]))
        await soon()
        go_on.set()
        await asked
        await until(lambda: len(pieces) == 6)

    run(routed())
    assert done_before == [3], "the prompt waited for one piece"


def test_an_embedder_that_cannot_be_loaded_stops_the_start(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warm_up() -> Iterator[None]:
        raise InvalidRequest("the embedder 'x' cannot be loaded: gone")
        yield

    monkeypatch.setattr(worker.system.router, "warm_up", warm_up)
    with pytest.raises(InvalidRequest, match="cannot be loaded"):
        worker.warm_up_router()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timed(system: System, clock: Clock) -> Iterator[Worker]:
    worker = Worker(system, max_waiting=50, clock=clock)
    worker.start()
    yield worker
    worker.stop()


def test_a_frozen_step_is_a_stall(
    system: System, clock: Clock, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    gate = Gate(system, monkeypatch)
    timed = request.getfixturevalue("timed")

    async def ask() -> None:
        ticket = await timed.submit("1", LONG)
        await until(lambda: gate.is_closed)
        assert not timed.progress_stalled(30)
        clock.offset += 29
        assert not timed.progress_stalled(30)
        clock.offset += 2
        assert timed.progress_stalled(30)
        assert timed.snapshot().idle_share == 0
        gate.open()
        await ticket.result()
        await until(lambda: not timed.progress_stalled(30))

    run(ask())


def test_an_idle_engine_never_stalls_nor_spins(timed: Worker, clock: Clock) -> None:
    clock.offset += 3600
    assert not timed.progress_stalled(30)
    spent = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - spent < 0.2
    assert timed.snapshot().steps == 0
    assert timed.snapshot().idle_share > 0.9
    assert run(answered(timed)) == "length"
    assert not timed.progress_stalled(30)


def test_new_versions_are_read_at_once(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine without work looks once a second by itself; here it is told."""
    monkeypatch.setattr("moedraft.serve.worker.thread.REFRESH_SECONDS", 1000.0)
    worker, said, looked = Worker(system, max_waiting=8), [], threading.Event()
    system.loader.hurry = lambda: said.append("hurry")  # type: ignore[method-assign]
    system.engine.refresh = lambda: (said.append("refresh"), looked.set())[1]
    worker.start()
    worker.load_new()
    assert looked.wait(30)
    assert said == ["hurry", "refresh"]
    worker.stop()
    worker.load_new()  # nobody is there any more


async def answered(worker: Worker) -> str | None:
    return (await (await worker.submit("1 2", params(5))).result()).finish_reason


def test_a_busy_hour_is_no_stall(
    system: System, clock: Clock, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Full slots and a long queue, and every step takes 20 s of the clock's time."""
    timed, step = request.getfixturevalue("timed"), system.engine.step
    alarms: list[bool] = []
    idle_shares: list[float] = []

    def slow() -> list[RequestOutput]:
        idle_shares.append(timed.snapshot().idle_share)  # since the last step, of 20 s
        clock.offset += 20
        alarms.append(timed.progress_stalled(30))
        return step()

    monkeypatch.setattr(system.engine, "step", slow)

    async def ask() -> None:
        tickets = [await timed.submit([i % 40], params(150)) for i in range(50)]
        await asyncio.gather(*(ticket.result() for ticket in tickets))

    run(ask())
    assert clock.offset > 3600  # how many tokens a step gives depends on measured times
    assert not any(alarms)
    assert statistics.median(idle_shares) < 0.05


def test_a_dead_thread_is_a_stall(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(system, max_waiting=8)
    worker.start()

    def fatal() -> list[RequestOutput]:
        raise SystemExit

    monkeypatch.setattr(system.engine, "step", fatal)

    async def ask() -> None:
        ticket = await worker.submit("1", LONG)
        assert (await ticket.result()).finish_reason == "abort"
        await until(lambda: worker.progress_stalled(1e9))
        assert "thread has ended" in (worker.snapshot().failed or "")
        assert worker.dead
        with pytest.raises(EngineFailed):
            await worker.submit("1", LONG)

    run(ask())
    worker.stop()


def test_an_engine_that_fails_gets_one_request_at_a_time(
    gated: Worker, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask() -> None:
        fault = Fault(gated.system, monkeypatch)  # before the gate
        for _ in range(3):
            fault.left = 1
            assert (await (await gated.submit("1", params())).result()).finish_reason == "error"
        assert gated.snapshot().failed is not None
        trial = await gated.submit("0", params())  # taken at once; its step stays at the gate
        with pytest.raises(EngineFailed):
            gated.check_room()
        with pytest.raises(EngineFailed):
            await gated.submit("1", params())
        gate.open()
        assert (await trial.result()).finish_reason == "length"
        assert (await (await gated.submit("1", params())).result()).finish_reason == "length"
        assert not gated.dead

    run(ask())


# -- the load ------------------------------------------------------------------------------------


def test_what_could_not_be_overwritten_is_tried_again(worker: Worker) -> None:
    home = worker.system.store.home
    home.erasing = True

    async def ask() -> None:
        await until(lambda: not home.erasing)

    run(ask())


def test_the_load_reaches_the_store(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> None:
        await until(lambda: read_load(worker.system.store.registry) is not None)

    run(ask())
    load = read_load(worker.system.store.registry)
    assert load is not None
    assert load.idle > 0.5
    assert load.waiting == 0
    assert abs(load.at - time.time()) < 5


def test_a_slow_or_broken_disk_holds_up_no_step(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, asked, calls = threading.Event(), threading.Event(), []

    def slow(key: str, value: str | None, *, durable: bool = True) -> None:
        calls.append(key)
        if len(calls) == 1:
            raise StorageError("The disk is full.")
        asked.set()
        stuck.wait(20)

    monkeypatch.setattr("moedraft.serve.worker.worker.LOAD_SECONDS", 0.01)
    monkeypatch.setattr(system.store.registry, "set_meta", slow)
    worker = Worker(system, max_waiting=8)
    worker.start()
    assert asked.wait(30)
    assert run(answered(worker)) == "length"
    stuck.set()
    worker.stop()


def test_the_meter_knows_share_and_rate() -> None:
    meter = Meter(100.0)
    assert meter.busy_share(100.0, 5) == meter.tokens_per_second(100.0) == 0
    for second in range(100, 110):
        meter.add(second, second + 0.5, tokens=10)
    assert meter.busy_share(110.0, 5) == pytest.approx(0.5, abs=0.11)
    assert meter.tokens_per_second(110.0) == pytest.approx(10, rel=0.11)
    meter.add(110.0, 200.0, tokens=5)  # one step over everything
    assert meter.busy_share(200.0, 5) == 1.0
    assert meter.busy_share(230.0, 5) == 0.0
    assert meter.tokens_per_second(230.0) == 0.0
    for step in range(100_000):
        meter.add(300 + step / 100, 300 + (step + 0.5) / 100)
    assert len(meter._slices) < 50
    meter.add(1e17, 1e17 + 64, 1)  # beyond the clock's precision: no endless loop
    young = Meter(0.0)
    young.add(0.0, 1.0, tokens=8)
    assert young.busy_share(1.0, 5) == 1.0
    assert young.tokens_per_second(1.0) == 8


def test_two_workers_do_not_meet(tmp_path: Path) -> None:
    systems = [tiny_system(tmp_path / name) for name in "ab"]
    workers = [Worker(system, max_waiting=4) for system in systems]
    for worker in workers:
        worker.start()

    async def ask() -> None:
        assert await asyncio.gather(*(answered(worker) for worker in workers)) == ["length", "length"]

    run(ask())
    for worker, system in zip(workers, systems, strict=True):
        worker.stop()
        system.close()
