"""Serve a stream while the experts learn from it, in one process: serve some requests, train, go on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from moedraft.core import RequestOutput, SamplingParams
from moedraft.distill.loop import DistillLoop
from moedraft.showcase.serving.pace import Pace, StepClock
from moedraft.showcase.shipped import Query
from moedraft.system.build import System

RECENT = 12  # requests of an expert that the live table looks back at


@dataclass
class ExpertProgress:
    """What the live table shows of one expert. Pairs: tokens of an answer, and the target's steps for it."""

    requests: int = 0
    first: list[tuple[int, int]] = field(default_factory=list)  # of its first requests
    recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=RECENT))
    version: int = 0

    def add(self, output: RequestOutput) -> None:
        self.requests += 1
        pair = (len(output.token_ids), output.speculation.num_steps)
        self.recent.append(pair)
        if len(self.first) < RECENT // 2:
            self.first.append(pair)


def rate(pairs: list[tuple[int, int]] | deque[tuple[int, int]]) -> float | None:
    """Tokens per step of the target over all pairs together; None without any step."""
    steps = sum(s for _, s in pairs)
    return sum(t for t, _ in pairs) / steps if steps else None


@dataclass(frozen=True)
class Event:
    """One finished request, or what one update published: versions by expert (nothing: the gate kept it)."""

    output: RequestOutput | None = None
    query: Query | None = None
    published: dict[str, int] | None = None


def serve_and_learn(system: System, loop: DistillLoop, queries: list[Query], pace: Pace) -> Iterator[Event]:
    """Serve the first of `queries` in order, and train what is due after every window of finished requests.

    How many are served, and how long training takes, says the pace. Training happens between two steps of
    the engine, while the running requests wait.
    """
    running: dict[str, Query] = {}
    started = finished = 0
    engine = system.engine
    while running or started < pace.requests:
        while started < pace.requests and len(running) < 2 * system.settings.max_batch_size:
            query = queries[started]
            started += 1
            params = SamplingParams(max_tokens=query.max_tokens)
            running[engine.add(query.prompt, params, capture=True, chat=True)] = query
        for output in engine.step():
            if output.finish_reason and output.request_id in running:
                finished += 1
                yield Event(output=output, query=running.pop(output.request_id))
                if finished % pace.window == 0 or finished == pace.requests:
                    pace.pause(finished, started)
                    yield from learn(system, loop, pace)


def learn(system: System, loop: DistillLoop, pace: Pace) -> Iterator[Event]:
    """Updates until the pause is over or nobody is due."""
    while loop.due() is not None and (steps := pace.next_steps()):
        clock = StepClock()
        loop.run_once(steps=steps, on_step=clock)
        system.refresh()
        pace.took(steps, time.monotonic() - clock.began, clock.step_seconds)
        if not loop.outcomes:  # it failed, or there was nothing to learn from
            return
        promoted = [one for one in loop.outcomes if one.decision in (None, "promote", "along")]
        yield Event(published={one.expert: one.version for one in promoted})
