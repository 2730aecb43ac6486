"""Clients that leave at every moment, and an engine that stands still or is only very busy."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import torch
from load_tools import (
    Outside,
    Row,
    Steps,
    ask,
    connected,
    hang_up,
    in_use,
    outside,
    read_events,
    read_head,
    request_bytes,
)
from serve_fakes import tiny_system, traces_of
from server import TARGET, Served, served
from waiting import until, wait_for

from moedraft.config import load_settings
from moedraft.core import RequestOutput, Sequence
from moedraft.cpu.products import KEPT, pays
from moedraft.serve.worker.ticket import Channel, Ticket
from moedraft.showcase.shipped import traffic
from moedraft.system.build import System, build


def run(work: Coroutine[Any, Any, Any], seconds: float = 60) -> Any:
    return asyncio.run(asyncio.wait_for(work, seconds))


# -- a thousand who leave ------------------------------------------------------------------------

CROWD = 9  # clients who leave together; there are four slots
PROMPT = " ".join(str(i % 40) for i in range(40))
CHUNK = 32  # of prompt tokens: eight of each of four
# Steps done when they leave. The first client is a step ahead of the others, which come in its first step.
STAGES = {
    "headers": 0,  # of which a half was sent
    "body": 0,
    "inbox": 0,  # sent; the engine, in a step, has not seen it yet
    "reading": 3,  # four have a slot, three prompts are half read; five wait
    "middle": 9,
    "end": 11,  # two tokens are missing, of which the step that goes on brings one
    "race": 12,  # the first one's last step begins as they leave
}


@dataclass(frozen=True)
class Traces:
    """What a request may leave behind."""

    requests: dict[str, int]  # of the worker and its engine
    connections: int
    tasks: int
    alive: int  # tickets and channels that are no garbage
    threads: int
    files: int

    @classmethod
    def of(cls, found: Served) -> Traces:
        gc.collect()
        state = found.server.server_state
        return cls(
            requests=traces_of(found.worker),
            connections=len(state.connections),
            tasks=len(state.tasks),
            alive=sum(type(one) in (Ticket, Channel) for one in gc.get_objects()),
            threads=threading.active_count(),
            files=len(os.listdir("/proc/self/fd")),
        )


async def crowd_leaves(found: Served, steps: Steps, stage: str, stream: bool, reset: bool) -> None:
    """They come together and leave together; every slot is free one step after the server knows."""
    connections = found.server.server_state.connections
    row = {"model": TARGET, "prompt": PROMPT, "max_tokens": 12, "stream": stream, "draft": stage == "middle"}
    if stage == "middle":
        row["max_tokens"] = 60
    steps.hold()
    writers = [await begun(found, row, stage) for _ in range(CROWD)]
    if stage in ("headers", "body"):
        await until(lambda: len(connections) == CROWD)
    else:
        await until(lambda: found.requests == CROWD and steps.waits)  # the first one is in the engine by then
    await asyncio.to_thread(steps.let, STAGES[stage])
    if stage == "end":
        assert max(one.num_generated for one in found.system.engine.sequences) == 10
    for writer in writers:
        hang_up(writer, reset=reset)
    if stage not in ("inbox", "race"):
        await until(lambda: not connections and not found.server.server_state.tasks)
    if found.system.engine.has_work:
        await asyncio.to_thread(steps.let, 1)
    if stage in ("inbox", "race"):
        steps.open()
    await until(found.idle)
    await until(lambda: not connections and not found.server.server_state.tasks)


async def begun(found: Served, row: Row, stage: str) -> asyncio.StreamWriter:
    content = request_bytes(row)
    part = {"headers": 60, "body": len(content) - 20}.get(stage, len(content))
    _, writer = await asyncio.open_connection(*found.address)
    writer.write(content[:part])
    await writer.drain()
    return writer


def stage_of(sequence: Sequence) -> str:
    """How far it had come when it ended."""
    if sequence.finish_reason != "abort":
        return "answered"
    if sequence.num_generated:
        return "last" if sequence.num_generated == sequence.params.max_tokens - 1 else "generating"
    return "reading" if sequence.target_cached else "waiting"


def test_a_thousand_clients_leave_nothing_behind(tmp_path: Path) -> None:
    system, ends = tiny_system(tmp_path / "home", prefill_chunk=CHUNK), Counter[str]()
    with served(tmp_path, system=system, prefill_chunk=CHUNK) as found, found.client() as client:
        system.engine.subscribe(lambda sequence: ends.update([stage_of(sequence)]))
        steps = Steps(system)
        kinds = list(itertools.product(STAGES, (True, False), (True, False)))

        async def rounds(count: int) -> None:
            for stage, stream, reset in kinds * count:
                await crowd_leaves(found, steps, stage, stream, reset)

        run(rounds(1))
        before, memory = Traces.of(found), in_use()
        run(rounds(3), 200)
        after, grown = Traces.of(found), [b / a - 1 for a, b in zip(memory, in_use(), strict=True) if a]
        steps.open()
        body = {"model": TARGET, "prompt": PROMPT, "max_tokens": 12}
        assert client.post("/v1/completions", json=body).json()["choices"][0]["finish_reason"] == "length"
        gc.collect()
        last = sum(type(one) is Sequence for one in gc.get_objects())
    print(ends, before, [f"{share:+.2%}" for share in grown])
    assert 4 * len(kinds) * CROWD >= 1000
    assert ends["waiting"] > 100
    assert ends["reading"] > 50
    assert ends["generating"] > 50
    assert ends["last"] > 10
    assert after == before
    assert last <= 16  # of over a thousand: with four slots, the rows of the last rounds that something names
    assert not any(before.requests.values())
    assert before.connections == before.tasks == 0
    assert max(grown) < 0.01


# -- the same with the shipped pair, in a process of its own -------------------------------------


async def one_leaves(server: Outside, number: int, random: Random, left: Counter[str]) -> None:
    """At a stage that its answer shows, or after a random time where nothing shows."""
    stage = ("headers", "body", "waiting", "reading", "middle", "end")[number % 6]
    stream = bool(number // 6 % 2) or stage in ("middle", "end")
    query = traffic()[number % 360]
    row = {"model": TARGET, "prompt": query.prompt, "max_tokens": 8, "stream": stream, "ignore_eos": True}
    content = request_bytes(row)
    part = {"headers": 60, "body": len(content) - 20}.get(stage, len(content))
    async with connected(server.address) as (reader, writer):
        writer.write(content[:part])
        if stage in ("middle", "end"):
            status, _ = await read_head(reader)
            assert status == 200
            said = 0
            async for event in read_events(reader):
                assert event is not None
                said += len(event["choices"][0]["text"])
                done = event["choices"][0]["finish_reason"] is not None
                if done or (said and stage == "middle"):
                    break
        else:
            await asyncio.sleep(random.expovariate(1 / {"waiting": 0.02, "reading": 0.2}.get(stage, 0.01)))
        left[f"{stage}{', streamed' if stream else ''}"] += 1
        hang_up(writer, reset=bool(number % 5 == 0))


async def many_leave(server: Outside, count: int, left: Counter[str]) -> None:
    """Forty at a time, so that most of them wait for one of eight slots."""
    random, numbers = Random(0), iter(range(count))

    async def client() -> None:
        for number in numbers:
            await one_leaves(server, number, random, left)

    await asyncio.gather(*(client() for _ in range(40)))


@contextmanager
def counted(server: Outside) -> Iterator[Callable[[], dict[str, float]]]:
    with httpx.Client(base_url=server.url, timeout=30, trust_env=False) as client:

        def figures() -> dict[str, float]:
            lines = [line for line in client.get("/metrics").text.splitlines() if not line.startswith("#")]
            return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

        yield figures


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_leave_the_shipped_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left: Counter[str] = Counter()
    # Who leaves in a step is in the queue until its end, and in the first, slow step many leave.
    limits = {"dashboard": False, "max_waiting": 400}
    with outside(tmp_path / "home", "--no-learning", **limits) as server, counted(server) as figures:

        def settled() -> tuple[float, int, int]:
            wait_for(lambda: not any(v for k, v in figures().items() if "num_requests" in k), 60)
            time.sleep(2.5)  # an engine at rest gives back free memory
            return server.rss, server.files, server.threads

        # What is bounded fills meanwhile: generated code, merged weights, heaps. That takes about a thousand
        # requests and 10 MB; after 400 the rest of it would look like a leak of 1 %.
        run(many_leave(server, 1400, Counter()), 500)
        before = settled()
        run(many_leave(server, 1000, left), 500)
        after = settled()
        aborted = sum(v for k, v in figures().items() if 'finished_reason="abort"' in k)
        row = {"model": TARGET, "prompt": "SELECT", "max_tokens": 4, "stream": True}
        assert run(ask(server.address, row)).ok
    drift = after[0] / before[0] - 1
    with capsys.disabled():
        print(f"\n{dict(left)}; {aborted:.0f} aborted; MB, files, threads {before} -> {after}: {drift:+.2%}")
    assert sum(left.values()) == 1000
    assert aborted > 300
    assert drift < 0.005
    assert after[1] <= before[1] + 2  # the store's connections come and go
    assert after[2] <= before[2] + 1


# -- memory that a process keeps ------------------------------------------------------------------

# Multiplies 600 numbers of rows; prints the MB that stay allocated.
ROWS = """
import torch
from heap import allocated
from moedraft.cpu.products import Product

def multiply(rows):
    torch.ops.mkldnn._linear_pointwise(x[:rows], product.blocked, None, "none", [], "")

torch.set_num_threads(1)
with torch.inference_mode():
    product, x = Product(torch.randn(64, 64), small=True), torch.randn(700, 64)
    multiply(3)
    before = allocated()
    for rows in range(4, 604):
        multiply(rows)
print((allocated() - before) / 1e6)
"""
# Frees 8 MB and takes 5; prints whether the 5 MB have a mapping of their own.
BLOCKS = """
import ctypes, sys
from moedraft.cpu.memory import return_large_blocks

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
if sys.argv[1] == "return":
    assert return_large_blocks()
libc.free(libc.malloc(8_000_000))
address = libc.malloc(5_000_000)
print(int(ctypes.c_size_t.from_address(address - 8).value & 2))  # glibc: IS_MMAPPED, before the block
"""
# Leaves 50 MB of holes; prints the MB of them that are still resident.
HOLES = """
import ctypes, sys
from moedraft.cpu.memory import return_free_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6

before = resident()
blocks = [libc.malloc(50_000) for _ in range(1000)]
for block in blocks:
    ctypes.memset(block, 1, 50_000)
for block in blocks[:-1]:  # the last one keeps the heap's top
    libc.free(block)
if sys.argv[1] == "return":
    return_free_memory()
print(resident() - before)
"""
# Prints the seconds that a full collection takes with two million objects that stay.
OBJECTS = """
import gc, sys, time
from moedraft.cpu.memory import keep_what_is_loaded

kept = [[number] for number in range(2_000_000)]
if sys.argv[1] == "keep":
    keep_what_is_loaded()
began = time.perf_counter()
gc.collect()
print(time.perf_counter() - began)
"""
glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="asks glibc")


def told(program: str, *arguments: str, **environment: str) -> float:
    """What a program of its own process prints, without the limits that this process has set."""
    kept = {name: value for name, value in os.environ.items() if name not in KEPT}
    kept["PYTHONPATH"] = str(Path(__file__).parents[1])  # where `heap` is
    command = [sys.executable, "-c", program, *arguments]
    result = subprocess.run(command, env={**kept, **environment}, capture_output=True, text=True, check=True)
    return float(result.stdout)


@glibc
@pytest.mark.skipif(not pays(torch.zeros(1)), reason="no blocked products here")
def test_generated_code_is_bounded() -> None:
    """The control is a user who wants the 1024 entries."""
    ours, everything = told(ROWS), told(ROWS, **dict.fromkeys(KEPT, "1024"))
    print(f"{ours:.1f} MB, with oneDNN's own bound {everything:.1f} MB")
    assert ours < 0.6 * everything


@glibc
def test_large_blocks_go_back_to_the_system() -> None:
    assert told(BLOCKS, "return")
    assert not told(BLOCKS, "leave")


@glibc
def test_holes_go_back_to_the_system() -> None:
    assert told(HOLES, "return") < 10
    assert told(HOLES, "leave") > 40


def test_what_is_loaded_is_not_looked_through_again() -> None:
    assert 5 * told(OBJECTS, "keep") < told(OBJECTS, "look")


# Ends as a server does whose libraries have loaded Triton.
EXTENSIONS = """
import torch._dynamo
import triton
from moedraft.cpu.memory import keep_what_is_loaded

keep_what_is_loaded()
print(0)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_nothing_is_reported_as_a_leak_at_the_end() -> None:
    command = [sys.executable, "-c", EXTENSIONS]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stderr == ""


# -- an engine that stands still -----------------------------------------------------------------

STALL = 0.6


def test_a_frozen_step_shows_in_time_and_passes(tmp_path: Path) -> None:
    with served(tmp_path, stall_seconds=STALL) as found, found.client() as client:
        row = {"model": TARGET, "prompt": "1 2 3", "max_tokens": 8, "temperature": 0, "stream": True}
        expected = run(ask(found.address, row)).text
        steps = Steps(found.system)
        frozen: list[float] = []
        looks: list[tuple[float, int, float]] = []  # asked at, status of /ready, answered at

        async def watched() -> str:
            asking = asyncio.create_task(ask(found.address, row))
            while not looks or looks[-1][1] == 200:
                asked = time.monotonic()
                ready = await asyncio.to_thread(client.get, "/ready")
                looks.append((asked, ready.status_code, time.monotonic()))
                assert (await asyncio.to_thread(client.get, "/health")).status_code == 200
                assert looks[-1][0] - looks[0][0] < 30, "no alarm came"
            assert ready.json() == {"status": "stalled"}
            frozen.append(steps.held_at)
            steps.open()
            reply = await asking
            assert reply.ok
            return reply.text

        assert run(watched()) == expected
        assert client.get("/ready").status_code == 200
    for asked, status, answered in looks:
        assert status == 200 or answered - frozen[0] > STALL
        assert status == 503 or asked - frozen[0] < STALL


class StepClock:
    """Time passes in steps only: one of `longest` seconds at most takes a few thousandths of a real one."""

    def __init__(self, system: System, longest: float) -> None:
        self.now, self.longest, self.steps = 0.0, longest, 0
        self._random, self._step = Random(0), system.engine.step
        system.engine.step = self._timed  # type: ignore[method-assign]

    def __call__(self) -> float:
        return self.now

    def _timed(self) -> list[RequestOutput]:
        seconds = self._random.uniform(0.8, 1.0) * self.longest
        for _ in range(10):
            self.now += seconds / 10
            time.sleep(0.0005)
        self.steps += 1
        return self._step()


async def busy(
    found: Served, rows: list[Row], clock: Callable[[], float], end: float
) -> list[tuple[int, Row]]:
    """Three clients for every slot until the clock shows `end`; all that /ready said meanwhile."""
    looks: list[tuple[int, Row]] = []
    turns, slots = itertools.cycle(rows), found.worker.snapshot().slots

    async def client() -> None:
        while clock() < end:
            assert (await ask(found.address, next(turns))).ok

    async def watch() -> None:
        while clock() < end:
            async with connected(found.address) as (reader, writer):
                writer.write(b"GET /ready HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
                status, headers = await read_head(reader)
                body = await reader.readexactly(int(headers["content-length"]))
                at = clock()
                looks.append((status, {**json.loads(body), "at": at}))
            await until(lambda at=at: clock() > at + 1)

    await asyncio.gather(watch(), *(client() for _ in range(3 * slots)))
    return looks


ROW = {"model": TARGET, "prompt": "1 2 3", "max_tokens": 30, "stream": True, "draft": False}


def test_a_busy_hour_is_no_alarm(tmp_path: Path) -> None:
    """Every step takes between 16 and 20 s of the 30 that make an alarm, and the queue is never empty."""
    system = tiny_system(tmp_path / "home")
    clock = StepClock(system, 20)
    with served(tmp_path, system=system, clock=clock, stall_seconds=30) as found:
        looks = run(busy(found, [ROW], clock, 3600))
    print(f"{len(looks)} looks in {clock.now:.0f} s of {clock.steps} steps")
    assert len(looks) > 50
    assert {status for status, _ in looks} == {200}


def test_steps_too_long_is_an_alarm(tmp_path: Path) -> None:
    """The negative control."""
    system = tiny_system(tmp_path / "home")
    clock = StepClock(system, 90)
    with served(tmp_path, system=system, clock=clock, stall_seconds=30) as found:
        looks = run(busy(found, [ROW], clock, 1200))
    assert "stalled" in {look["status"] for status, look in looks if status == 503}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_busy_hour_of_the_shipped_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A clock sixty times as fast: an hour in a minute, the alarm after half a real second.

    A machine that is busy with other things may hold up a step for so long: that alarm is none of the false
    ones, which come without such a step.
    """
    system = build(load_settings(home=tmp_path / "home"))
    began, rows = time.monotonic(), [{**ROW, "prompt": one.prompt, "draft": True} for one in traffic()[:90]]

    def clock() -> float:
        return (time.monotonic() - began) * 60

    spans = step_spans(system, clock)
    with served(tmp_path, system=system, clock=clock, stall_seconds=30) as found:
        looks = run(busy(found, rows, clock, 3600), 300)
        steps = found.worker.snapshot().steps
    alarms = [look["at"] for status, look in looks if status != 200]
    false = [at for at in alarms if not any(a + 30 <= at <= b + 15 and b - a > 30 for a, b in spans)]
    longest = max(b - a for a, b in spans)
    with capsys.disabled():
        print(
            f"\n{len(looks)} looks, {steps} steps, the longest {longest:.1f} of 30 s; "
            f"{len(alarms)} alarms, {len(false)} of them false"
        )
    assert len(looks) > 100
    assert false == []


def step_spans(system: System, clock: Callable[[], float]) -> list[tuple[float, float]]:
    """Begin and end of all steps of the engine from now on."""
    spans: list[tuple[float, float]] = []
    step = system.engine.step

    def timed() -> list[RequestOutput]:
        began = clock()
        outputs = step()
        spans.append((began, clock()))
        return outputs

    system.engine.step = timed  # type: ignore[method-assign]
    return spans
