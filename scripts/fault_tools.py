"""What the fault campaign shares: a row of its table, a process that is killed in the middle, and records."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from moedraft.core import Domain, ReplayRecord
from moedraft.storage.keys import KeyFile
from moedraft.storage.store import Store
from moedraft.storage.versions.candidate import Candidate

Say = Callable[[str], None]
STANDSTILL = 5.0  # s; a busy machine does not hold a process up for so long
NEEDLE = 100_000_000  # token ids from here on are searched for in files


@dataclass
class Row:
    """One fault: how often it was tried, and each time what had to hold did not hold."""

    fault: str
    must: str
    cases: int = 0
    broken: list[str] | None = None
    figures: str = ""
    seconds: float = 0.0

    def check(self, holds: bool, otherwise: str) -> None:
        """Note `otherwise` where something does not hold."""
        if not holds:
            self.broken = [*(self.broken or []), otherwise]

    @property
    def data(self) -> dict[str, Any]:
        found = asdict(self)
        return {**found, "broken": (self.broken or [])[:5], "kept": not self.broken}


def record(number: int, domain: str = "sql", tokens: int = 5) -> ReplayRecord:
    """Its tokens are NEEDLE + number; two are the prompt."""
    answer = tokens - 2
    return ReplayRecord(
        domain=domain,
        expert=domain,
        adapter_version=1,
        target_id="tiny",
        token_ids=[NEEDLE + number] * tokens,
        num_prompt_tokens=2,
        topk_ids=[[3, 9]] * answer,
        topk_logprobs=[[-0.1, -3.0]] * answer,
        rejected=[],
        drafted=4,
        accepted=2,
    )


def needle_of(number: int) -> bytes:
    """The bytes of a record's tokens, as they lie in a database."""
    return (NEEDLE + number).to_bytes(4, "little") * 5


def candidate(value: float, name: str = "sql", **changes: Any) -> Candidate:
    """An adapter as small as can be."""
    fields: dict[str, Any] = {
        "expert": name,
        "parent": 0,
        "base_hash": "base",
        "rank": 2,
        "modules": ("m",),
        "records": 16,
        "held_out": 2,
        "steps": 1,
        "loss": 1.0,
        "acceptance_before": 0.5,
        "acceptance_after": 0.6,
        "config": {"r": 2, "peft_type": "LORA"},
        "tensors": {"lora_A": torch.full((2, 3), value)},
    }
    return Candidate(**{**fields, **changes})


def ids_of(file: KeyFile) -> list[str]:
    """Of all keys that are valid."""
    found = file.keys()
    return [key.id for key in found]


def new_home(path: Path, names: tuple[str, ...] = ("sql",)) -> Path:
    """A home with domains."""
    store = Store.open(path)
    for name in names:
        store.registry.add_domain(Domain(name, "", tuple(f"example {i}" for i in range(8)), time.time()))
    store.close()
    return path


def killed(work: Callable[[Say], None], rng: random.Random, longest: float) -> list[str]:
    """Run `work` in a process of its own and kill it; what it had said is returned, whole lines only.

    The moment is random, at most `longest` seconds after its first word.
    """
    pid, reading = _forked(work)
    with os.fdopen(reading, "rb") as pipe:
        first = pipe.readline()
        time.sleep(rng.random() * longest)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        text = first + pipe.read()
    return [line.decode() for line in text.split(b"\n")[:-1]]


def until_its_end(work: Callable[[Say], None]) -> list[str]:
    """What `work` says in a process of its own, which may kill itself."""
    pid, reading = _forked(work)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return [line.decode() for line in text.split(b"\n")[:-1]]


def timed(make: Callable[[], Row]) -> Row:
    """A row that knows how long it took, and whether this process stood still for long meanwhile."""
    began, gaps, end = time.monotonic(), [0.0], threading.Event()

    def tick() -> None:
        last = time.monotonic()
        while not end.wait(0.2):
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    row = make()
    end.set()
    thread.join()
    row.seconds = time.monotonic() - began
    if max(gaps) > STANDSTILL:
        row.figures += f" (this machine was stopped for {max(gaps):.0f} s meanwhile)"
    return row


def _forked(work: Callable[[Say], None]) -> tuple[int, int]:
    """The process, and where its words can be read."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(work, reading, writing)
    os.close(writing)
    return pid, reading


def _child(work: Callable[[Say], None], reading: int, writing: int) -> None:
    os.close(reading)
    signal.alarm(30)  # the longest it lives if its parent dies
    try:
        work(lambda line: void(os.write(writing, f"{line}\n".encode())))
    except BaseException as error:
        print(f"the process that was to be killed failed: {error!r}", file=sys.stderr)
    finally:
        os._exit(1)


def void(_: object) -> None:
    """For a callable whose result nobody wants."""
