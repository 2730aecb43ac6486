"""Tools to load a server with: a light client, a server in a process of its own, adapters whose weights say
which version they are, and a way to hold the engine's steps.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from candidates import candidate
from heap import allocated
from waiting import wait_for

from moedraft.core import SHARED, RequestOutput
from moedraft.cpu.groups import Grouped
from moedraft.cpu.products import Product
from moedraft.distill.outlet import HomeOutlet
from moedraft.drafting.experts.adapter import LORA_A, LORA_B, PREFIX
from moedraft.drafting.experts.layer import LoRALinear
from moedraft.drafting.experts.lora import ExpertBank
from moedraft.evidence import Proposal
from moedraft.serve.run import SERVER_FILE
from moedraft.system.build import System

Address = tuple[str, int]
Row = dict[str, Any]
COMPLETIONS = "/v1/completions"


# -- a client ------------------------------------------------------------------------------------


@dataclass
class Reply:
    """One answer as the client saw it. Times: seconds of `time.perf_counter`."""

    status: int
    headers: dict[str, str]
    sent: float
    ended: float = 0.0
    times: list[float] = field(default_factory=list)  # of the events
    rows: list[Row] = field(default_factory=list)  # the events, or the one body
    whole: bool = False  # it ended as it should

    @property
    def text(self) -> str:
        return "".join(choice.get("text", "") for row in self.rows for choice in row.get("choices", ()))

    @property
    def ok(self) -> bool:
        reasons = [choice["finish_reason"] for row in self.rows for choice in row.get("choices", ())]
        return self.status == 200 and self.whole and bool(reasons) and reasons[-1] in ("stop", "length")

    @property
    def seconds(self) -> float:
        return self.ended - self.sent

    @property
    def decoding(self) -> float:
        """From the first piece of text to the last: without the wait for a slot and the reading."""
        return self.times[-1] - self.times[0]


def request_bytes(row: Row, path: str = COMPLETIONS) -> bytes:
    content = json.dumps(row).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nconnection: close\r\n"
    )
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


@asynccontextmanager
async def connected(address: Address) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*address)
    try:
        yield reader, writer
    finally:
        writer.close()
        with_errors = await asyncio.gather(writer.wait_closed(), return_exceptions=True)
        assert not any(error for error in with_errors if not isinstance(error, OSError))


async def ask(address: Address, row: Row, path: str = COMPLETIONS) -> Reply:
    """Send one request and read all of its answer, streamed or not."""
    sent = time.perf_counter()
    async with connected(address) as (reader, writer):
        writer.write(request_bytes(row, path))
        status, headers = await read_head(reader)
        reply = Reply(status, headers, sent)
        if headers["content-type"].startswith("text/event-stream"):
            async for event in read_events(reader):
                reply.whole = event is None
                if event is not None:
                    reply.rows.append(event)
                    reply.times.append(time.perf_counter())
        else:
            reply.rows.append(json.loads(await reader.readexactly(int(headers["content-length"]))))
            reply.whole = True
        reply.ended = time.perf_counter()
    return reply


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    pairs = (line.partition(": ") for line in lines)
    return int(first.split()[1]), {name.lower(): value for name, _, value in pairs}


async def read_events(reader: asyncio.StreamReader) -> AsyncIterator[Row | None]:
    """All events of a stream; None for the [DONE] at its end."""
    while line := await reader.readline():
        if line.startswith(b"data: "):
            data = line.removeprefix(b"data: ").strip()
            yield None if data == b"[DONE]" else json.loads(data)


def hang_up(writer: asyncio.StreamWriter, *, reset: bool) -> None:
    """Leave: politely (FIN), or as a process that is killed or a cable that is cut (RST)."""
    if reset:
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
    else:
        writer.close()


def p99(values: list[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0]


# -- a server in a process of its own --------------------------------------------------------------


@dataclass
class Outside:
    """`moedraft serve`, seen from outside."""

    url: str
    pid: int

    @property
    def address(self) -> Address:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    @property
    def rss(self) -> float:
        """Resident memory, MB."""
        return resident(self.pid)

    @property
    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    @property
    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/task"))


def resident(pid: int | str = "self") -> float:
    """Resident memory of a process, MB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def in_use() -> list[int]:
    """Bytes that C code has allocated (0 without glibc) and Python's small objects.

    Of a process that did other things before, where resident memory says more about those.
    """
    gc.collect()
    return [allocated(), sys.getallocatedblocks()]


@contextmanager
def outside(home: Path, *arguments: str, **settings: Any) -> Iterator[Outside]:
    """A server over `home` on a free port; it must end well at SIGTERM."""
    own = {f"MOEDRAFT_{name.upper()}": str(value) for name, value in settings.items()}
    begin = "import sys; from moedraft.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", begin, "serve", "--port", "0", "--home", str(home), *arguments]
    with open(home.parent / "server.log", "w") as log:
        process = subprocess.Popen(command, env={**os.environ, **own}, stdout=log, stderr=log)
        try:
            wait_for(lambda: (home / SERVER_FILE).exists() or process.poll() is not None, 120)
            url = json.loads((home / SERVER_FILE).read_text())["url"]
            wait_for(partial(_listens, url), 30)
            yield Outside(url, process.pid)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            assert "leaked" not in (home.parent / "server.log").read_text()
        finally:
            process.kill()
            process.wait()


def _listens(url: str) -> bool:
    host, _, port = url.removeprefix("http://").rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


# -- adapters whose weights say what they are ------------------------------------------------------

STAMP = 2.0**-14  # what a version adds to one weight of every layer it adapts
RANK = 4


def stamped(bank: ExpertBank, name: str, version: int) -> dict[str, torch.Tensor]:
    """A random adapter, small, that moves weight [0, 0] of its layers by version · STAMP, exactly.

    The shared one moves [1, 1], and has every layer; no adapter moves what belongs to the other.
    """
    own = torch.Generator().manual_seed(version)
    corner = 1 if name == SHARED else 0
    tensors = {}
    for module in sorted(bank.layers if name == SHARED else bank.tail):
        out, inner = bank.layers[module].base_weight().shape
        down, up = (
            torch.randn(RANK, inner, generator=own) * 0.02,
            torch.randn(out, RANK, generator=own) * 0.02,
        )
        down[:, :2], up[:2] = 0, 0
        down[0], up[:, 0] = 0, 0
        down[0, corner], up[corner, 0] = 1, version * STAMP
        tensors[PREFIX + module + LORA_A], tensors[PREFIX + module + LORA_B] = down, up
    return tensors


PEFT = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}


def publish(system: System, name: str) -> int:
    """A new stamped version of `name`, the way the trainer's supervisor stores one; its number."""
    registry = system.store.registry
    number, live = registry.next_version(name), registry.live(name)
    tensors = stamped(system.bank, name, number)

    facts = {"parent": live.version if live else 0, "base_hash": system.bank.base_hash, "rank": RANK}
    [made] = HomeOutlet(system.store).publish([candidate(name, config=PEFT, tensors=tensors, **facts)])
    assert made.version == number
    return number


def swap_in(system: System, name: str, version: int) -> None:
    """Put a stamped version straight into the bank, between two steps, as the loader does."""
    bank = system.bank
    stale = bank.publish(name, bank.read(version, PEFT, stamped(bank, name, version)))
    for sequence in system.engine.sequences:
        if stale and name in (sequence.expert, SHARED):
            sequence.draft_cached = 0


class Witness:
    """Reads off the weights themselves with which versions each draft step multiplies.

    A step is one `catch_up` and the `propose` after it, which is one forward per drafted token. In all of
    its forwards, in all adapted layers, each expert must be of one version, the one that the bank says.
    """

    def __init__(self, system: System) -> None:
        chooser, drafter = system.engine.chooser, system.engine.chooser.model
        assert drafter is not None
        self.steps = 0
        self.mixed = 0  # steps with several experts
        self.faults: list[str] = []
        self.versions: set[tuple[str, int]] = set()  # that drafted
        self._bank = system.bank
        self._bases = {name: _corners(layer.base_weight()) for name, layer in self._bank.layers.items()}
        self._seen: dict[str, set[int]] = {}
        self._catch_up: Callable[..., list[int]] = chooser._catch_up  # the drafter's, with a timer around it
        self._propose: Callable[..., Proposal] = drafter.propose
        chooser._catch_up = self._watched_catch_up
        drafter.propose = self._watched_propose  # type: ignore[method-assign]
        for name, layer in self._bank.layers.items():
            layer.register_forward_pre_hook(partial(self._look, name))

    def _look(self, name: str, layer: LoRALinear, _: object) -> None:
        rows = self._bank.selected or ()
        way = layer.product
        for chosen, product in way.groups if isinstance(way, Grouped) else [(range(len(rows)), way)]:
            assert product is None or isinstance(product, Product), (
                "a small model goes through merged weights"
            )
            weight = layer.base_weight() if product is None else product.weight
            own, shared = (
                round((now - before) / STAMP)
                for now, before in zip(_corners(weight), self._bases[name], strict=True)
            )
            self._seen.setdefault(SHARED, set()).add(shared)
            for row in chosen:
                if name in self._bank.tail and rows[int(row)] != SHARED:
                    self._seen.setdefault(rows[int(row)], set()).add(own)

    def _watched_catch_up(self, *arguments: Any) -> list[int]:
        self._seen = {}
        return self._catch_up(*arguments)

    def _watched_propose(self, *arguments: Any) -> Proposal:
        proposal = self._propose(*arguments)
        self.steps += 1
        self.mixed += len(self._seen) > 2
        for name, found in self._seen.items():
            if found != {self._bank.version(name)}:
                self.faults.append(f"{name}: {sorted(found)}, the bank has {self._bank.version(name)}")
            self.versions |= {(name, version) for version in found}
        return proposal


def _corners(weight: torch.Tensor) -> tuple[float, float]:
    return float(weight[0, 0]), float(weight[1, 1])


# -- the engine's steps, held --------------------------------------------------------------------


class Steps:
    """The steps of an engine, one at a time: `let(n)` allows n more and waits for them, `open()` all.

    After `let` the next step stands at the gate, unless there is nothing left to do.
    """

    def __init__(self, system: System) -> None:
        self.done = 0
        self.held_at = 0.0  # when the last step that had to wait began, by the monotonic clock
        self._engine, self._waits = system.engine, False
        self._allowed, self._free = threading.Semaphore(0), False
        self._step: Callable[[], list[RequestOutput]] = system.engine.step
        system.engine.step = self._held  # type: ignore[method-assign]

    @property
    def waits(self) -> bool:
        """Whether a step stands at the gate."""
        return self._waits

    def let(self, count: int = 1) -> None:
        until = self.done + count
        for _ in range(count):
            self._allowed.release()
        wait_for(lambda: not self._engine.has_work or (self.done >= until and self._waits))

    def open(self) -> None:
        self._free = True
        self._allowed.release()

    def hold(self) -> None:
        """From the next step on. Nothing may be running."""
        self._free, self._allowed = False, threading.Semaphore(0)

    def _held(self) -> list[RequestOutput]:
        if not self._free:
            self.held_at, self._waits = time.monotonic(), True
            self._allowed.acquire()
            self._waits = False
        outputs = self._step()
        self.done += 1
        return outputs
