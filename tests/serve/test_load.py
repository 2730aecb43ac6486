"""Under load: adapters that change all the time, and ten times more requests than there is room for."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import httpx
import pytest
import torch
from load_tools import Address, Outside, Reply, Row, Witness, ask, outside, p99, publish, swap_in
from serve_fakes import WordEmbedder, tiny_system
from server import TARGET, Served, served
from waiting import until, wait_for

from moedraft.config import load_settings
from moedraft.core import SHARED, SamplingParams
from moedraft.showcase.shipped import examples, traffic
from moedraft.system.build import System, build
from moedraft.system.domains.registering import register_all

STREAMS = 32
DOMAINS = ("docs-de", "docs-ja", "docs-ru", "docs-ko", "python", "sql")
EXPERTS = (*DOMAINS, SHARED)


def run(work: Coroutine[Any, Any, Any], seconds: float = 60) -> Any:
    return asyncio.run(asyncio.wait_for(work, seconds))


# -- adapters that change ------------------------------------------------------------------------


@pytest.fixture
def all_experts_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many experts a batch holds, each drafts for its rows: what changes must be in use."""
    monkeypatch.setattr("moedraft.cpu.groups.FEW_EXPERTS", len(DOMAINS))


def mini(home: Path, **options: Any) -> System:
    """The shipped pair with six domains; drafts always, whether it pays or not."""
    options = {"adaptive_budget": False, "num_speculative_tokens": 3, **options}
    system = build(load_settings(home=home, **options))
    every = examples()
    register_all(system.store, system.router, {name: every[name][:8] for name in DOMAINS})
    system.refresh()  # the loader has seen all there is, and leaves alone what `swap_in` brings
    return system


def queries(count: int, tokens: int) -> list[Row]:
    """Prompts of all languages; every other one pins an expert."""
    models = itertools.cycle(
        [TARGET, f"{TARGET}:docs-ja", TARGET, f"{TARGET}:sql", TARGET, f"{TARGET}:docs-de"]
    )
    return [
        {"model": model, "prompt": query.prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        for query, model in zip(traffic()[:count], models, strict=False)
    ]


def plainly(system: System, rows: list[Row]) -> list[str]:
    """What the target says without any draft."""
    params = SamplingParams(max_tokens=rows[0]["max_tokens"])
    return [one.text for one in system.engine.generate([row["prompt"] for row in rows], params, draft=False)]


async def stream_until(address: Address, rows: list[Row], done: asyncio.Event) -> list[tuple[int, Reply]]:
    """STREAMS clients, each of which asks again as soon as it is answered; (number of the row, answer)."""
    replies: list[tuple[int, Reply]] = []

    async def client(first: int) -> None:
        for turn in itertools.count():
            index = (first + turn * STREAMS) % len(rows)
            replies.append((index, await ask(address, rows[index])))
            if done.is_set():
                return

    async with asyncio.TaskGroup() as group:
        for first in range(STREAMS):
            group.create_task(client(first))
    return replies


async def swapped_under_load(
    found: Served, rows: list[Row], stored: int, direct: int
) -> list[tuple[int, Reply]]:
    """Streams while versions come in: `stored` through the home, then `direct` into the bank."""
    done = asyncio.Event()
    streams = asyncio.create_task(stream_until(found.address, rows, done))
    loader, registry = found.system.loader, found.system.store.registry
    for _ in range(0, stored, len(EXPERTS)):
        for name in EXPERTS:
            await asyncio.to_thread(publish, found.system, name)
        await until(lambda: loader.generation == registry.generation())
    for version in range(2000, 2000 + direct // len(EXPERTS)):
        await found.worker.call(partial(swap_all, version=version))
    done.set()
    return await streams


def swap_all(system: System, version: int) -> None:
    for name in EXPERTS:
        swap_in(system, name, version)


def check_swaps(
    home: Path, rows: list[Row], stored: int, direct: int, slots: int, seconds: float
) -> tuple[Witness, list[tuple[int, Reply]]]:
    """Every answer whole and the target's own; one version of an expert in every draft step."""
    system = mini(home, max_batch_size=slots)
    expected = plainly(system, rows)  # before the worker owns the engine
    witness = Witness(system)
    with served(home, system=system, max_batch_size=slots) as found:
        replies = run(swapped_under_load(found, rows, stored, direct), seconds)
    assert len(replies) >= STREAMS
    assert all(reply.ok for _, reply in replies)
    assert [i for i, reply in replies if reply.text != expected[i]] == []
    assert witness.faults == []
    assert witness.steps > 10
    assert witness.mixed > 5
    return witness, replies


@pytest.mark.usefixtures("all_experts_draft")
def test_adapters_change_under_32_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moedraft.system.build.Embedder", lambda source, **_: WordEmbedder())
    witness, _ = check_swaps(tmp_path / "home", queries(STREAMS, 6), 7, 35, 8, 60)
    assert len(witness.versions) > 20


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("all_experts_draft")
def test_a_thousand_adapters_under_32_streams(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    witness, replies = check_swaps(tmp_path / "home", queries(96, 24), 504, 504, STREAMS, 840)
    with capsys.disabled():
        print(
            f"\n{len(replies)} answers, {witness.steps} draft steps ({witness.mixed} of several experts), "
            f"{len(witness.versions)} versions drafted, {time.monotonic() - began:.0f} s"
        )
    assert len(witness.versions) > 500


def test_the_witness_sees_a_swap_within_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: versions that change between two forwards of one draft."""
    monkeypatch.setattr("moedraft.system.build.Embedder", lambda source, **_: WordEmbedder())
    system = mini(tmp_path / "home")
    witness = Witness(system)
    swap_in(system, "sql", 1)
    params = SamplingParams(max_tokens=8)
    system.engine.generate("SELECT name FROM", params, expert="sql")
    assert witness.versions == {("sql", 1), (SHARED, 0)}
    assert witness.faults == []
    forward, count = system.draft.forward, itertools.count(2)

    def swapping(*arguments: Any, **options: Any) -> torch.Tensor:
        rows = list(system.bank.selected or ())
        swap_in(system, "sql", next(count))
        system.bank.select(rows)
        return forward(*arguments, **options)

    monkeypatch.setattr(system.draft, "forward", swapping)
    system.engine.generate("SELECT name FROM", params, expert="sql")
    assert witness.faults
    system.close()


# -- memory, over the same swaps, seen from outside ----------------------------------------------


@dataclass(frozen=True)
class Figures:
    """A server process at rest, when its engine has given back free memory."""

    rss: float  # MB
    files: int
    threads: int

    @classmethod
    def of(cls, server: Outside) -> Figures:
        time.sleep(2.5)  # an engine at rest gives back free memory after a second
        return cls(server.rss, server.files, server.threads)


async def promoted_under_load(server: Outside, rows: list[Row], rounds: int) -> list[tuple[int, Reply]]:
    """Streams while an operator changes all experts' versions over and over, as `adapter promote` does."""
    done = asyncio.Event()
    streams = asyncio.create_task(stream_until(server.address, rows, done))
    async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as client:
        listed = (await client.get("/admin/adapters")).json()["adapters"]
        numbers = {name: [one["version"] for one in listed if one["domain"] == name] for name in EXPERTS}
        for turn in range(rounds):
            for name in EXPERTS:
                version = numbers[name][turn % len(numbers[name])]
                answer = await client.post(f"/admin/adapters/{name}/promote", json={"version": version})
                assert answer.json() == {"domain": name, "version": version}
    done.set()
    return await streams


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_memory_is_flat_over_a_thousand_swaps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home, rows = tmp_path / "home", queries(96, 16)
    system = mini(home)
    for _ in range(5):
        for name in EXPERTS:
            publish(system, name)
    expected = plainly(system, rows)
    system.close()
    quiet = {"dashboard": False, "max_batch_size": 16, "adaptive_budget": False}
    with outside(home, "--no-learning", **quiet) as server:
        run(promoted_under_load(server, rows, 20), 300)  # the caches grow to what they need
        run(each_alone(server, rows[0]))
        before = Figures.of(server)
        replies = run(promoted_under_load(server, rows, 143), 1100)
        run(each_alone(server, rows[0]))
        after = Figures.of(server)
    drift = after.rss / before.rss - 1
    with capsys.disabled():
        print(f"\n{len(replies)} answers, 1 001 promotions, {before} -> {after}: {drift:+.2%}")
    assert all(reply.ok for _, reply in replies)
    assert [i for i, reply in replies if reply.text != expected[i]] == []
    assert drift < 0.01
    assert after.files <= before.files + 2  # the store's connections come and go
    assert after.threads <= before.threads + 2


STRANGE = ("∮∮∮ ∎∎∎", "Καλημέρα κόσμε", "qqq zzz xxx jjj")  # fit no domain: the shared draft's


async def each_alone(server: Outside, row: Row) -> None:
    """Every expert drafts once for a batch of its own, and so has its merged weights in memory."""
    for name in DOMAINS:
        assert (await ask(server.address, {**row, "model": f"{TARGET}:{name}"})).ok
    for prompt in STRANGE:
        assert (await ask(server.address, {**row, "prompt": prompt})).ok


# -- ten times too much --------------------------------------------------------------------------


async def full_batch(address: Address, turns: Iterator[Row], slots: int, seconds: float) -> list[Reply]:
    """Half as many clients again as slots, each asking again at once: a slot that falls free is taken."""
    replies = []
    end = time.monotonic() + seconds

    async def client() -> None:
        while time.monotonic() < end:
            replies.append(await ask(address, next(turns)))

    await asyncio.gather(*(client() for _ in range(slots + slots // 2)))
    return replies


async def arrivals(address: Address, turns: Iterator[Row], rate: float, seconds: float) -> list[Reply]:
    """Open loop: requests at random times, `rate` a second, however the server fares."""
    random = Random(0)
    async with asyncio.TaskGroup() as group:
        tasks, at = [], time.monotonic()
        end = at + seconds
        while at < end:
            at += random.expovariate(rate)
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            tasks.append(group.create_task(ask(address, next(turns))))
    return [task.result() for task in tasks]


@dataclass
class Overload:
    """Answers of a full batch, and of arrivals at ten times the rate that it answered at."""

    calm: list[Reply]
    rush: list[Reply]

    @property
    def accepted(self) -> list[Reply]:
        return [reply for reply in self.rush if reply.status == 200]

    @property
    def refused(self) -> list[Reply]:
        return [reply for reply in self.rush if reply.status != 200]

    def slowdown(self) -> float:
        """Of the p99 of the time from the first text to the last: the wait for a slot is not in it."""
        calm, rush = ([one.decoding for one in some] for some in (self.calm, self.accepted))
        return p99(rush) / p99(calm)

    def check(self) -> None:
        assert all(reply.ok for reply in [*self.calm, *self.accepted])
        assert {reply.status for reply in self.rush} == {200, 429}
        assert len(self.refused) > 5 * len(self.accepted)
        assert all(int(reply.headers["retry-after"]) >= 1 for reply in self.refused)
        assert p99([reply.seconds for reply in self.refused]) < 0.1
        assert self.slowdown() < 1.2

    def __str__(self) -> str:
        late = p99([reply.seconds for reply in self.refused])
        times = [[one.decoding for one in some] for some in (self.calm, self.accepted)]
        shown = ", ".join(f"p50 {median(some):.3f} p99 {p99(some):.3f} s" for some in times)
        return (
            f"{len(self.calm)} calm, {len(self.accepted)} accepted, {len(self.refused)} refused (p99 "
            f"{1000 * late:.1f} ms); first text to last, calm and rush: {shown} ({self.slowdown():.3f})"
        )


def overload(address: Address, rows: list[Row], slots: int, seconds: float, windows: int) -> Overload:
    """Calm and rush in turns, so that whatever else the machine does meets both; both go through all rows."""
    found = Overload([], [])
    calm_turns, rush_turns = itertools.cycle(rows), itertools.cycle(rows)
    for _ in range(windows):
        calm = run(full_batch(address, calm_turns, slots, seconds))
        rate = 10 * len(calm) / (max(one.ended for one in calm) - min(one.sent for one in calm))
        found.calm += calm
        found.rush += run(arrivals(address, rush_turns, rate, seconds), 120)
    return found


def test_what_is_too_much_is_refused_while_the_engine_stands_still(tmp_path: Path) -> None:
    """Four slots and four that wait: no answer is begun before all 72 refusals have come."""
    system, rest = tiny_system(tmp_path / "home"), threading.Event()
    row = {"model": TARGET, "prompt": "1 2 3", "max_tokens": 25, "temperature": 0, "stream": True}

    async def flood(address: Address) -> tuple[list[Reply], list[Reply]]:
        ends = asyncio.as_completed([asyncio.create_task(ask(address, row)) for _ in range(80)])
        first = [await next(ends) for _ in range(72)]
        rest.set()
        return first, [await end for end in ends]

    with served(tmp_path, system=system, max_waiting=4) as found:
        alone = run(ask(found.address, row)).text
        system.engine.refresh = lambda: rest.wait(50)
        refused, answered = run(flood(found.address))
        wait_for(found.idle)
    assert {reply.status for reply in refused} == {429}
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused)
    assert len(answered) == 8
    assert all(reply.ok and reply.text == alone for reply in answered)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_times_too_much_for_the_shipped_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{**row, "model": TARGET, "ignore_eos": True} for row in queries(96, 48)]
    with outside(tmp_path / "home", "--no-learning", dashboard=False, max_waiting=8) as server:
        run(full_batch(server.address, itertools.cycle(rows), 8, 5))
        result = overload(server.address, rows, 8, 10, 3)
    with capsys.disabled():
        print(f"\n{result}")
    result.check()
