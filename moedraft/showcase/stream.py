"""Serve a stream while the experts learn from it, in one process: serve some requests, train, go on."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from moedraft.core import RequestOutput, SamplingParams
from moedraft.distill.loop import DistillLoop
from moedraft.showcase.shipped import Query
from moedraft.system.build import System

RECENT = 12  # requests of an expert that the live table looks back at
LEAST_STEPS = 4  # an update of fewer steps is not worth reading its records
LEAST_SHARE = 0.2  # of the time that serving takes, for learning on a machine that is too slow for the plan
FIRST_STEPS = 24  # of the first update, before it is known how long a step takes


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


@dataclass
class Pace:
    """Gives learning the time that serving leaves: how many optimiser steps the next update may take.

    The stream shall end after `seconds`. What serving still needs is what it needed so far by request, and
    the rest is shared out among the pauses between windows; on a slow machine the stream takes longer.
    """

    seconds: float
    requests: int
    window: int
    most: int  # steps of one update
    began: float = field(default_factory=lambda: time.monotonic())
    trained: float = 0.0  # s in updates so far
    steps: int = 0  # of all updates so far
    step_seconds: float = 0.0  # of one optimiser step, by the last update; 0: not known yet
    beside: float = 0.0  # s of the last update beside its steps: reading, measuring, publishing
    pause_ends: float = 0.0

    def pause(self, done: int) -> None:
        """`done` requests are answered, and it is time for learning."""
        now = time.monotonic()
        each = (now - self.began - self.trained) / max(done, 1)
        left = self.began + self.seconds - now - each * (self.requests - done)
        pauses = 1 + math.ceil((self.requests - done) / self.window)
        self.pause_ends = now + max(LEAST_SHARE * each * self.window, left / pauses)

    def next_steps(self) -> int:
        """Steps of the next update in this pause; 0: go on serving."""
        left = self.pause_ends - time.monotonic()
        if left <= 0:
            return 0
        possible = (left - self.beside) / self.step_seconds if self.step_seconds else FIRST_STEPS
        return min(self.most, int(possible)) if possible >= LEAST_STEPS else 0

    def took(self, steps: int, seconds: float, step_seconds: float) -> None:
        """An update of so many steps took `seconds` in all, and each of its steps `step_seconds`."""
        self.steps, self.trained = self.steps + steps, self.trained + seconds
        self.step_seconds, self.beside = step_seconds, max(0.0, seconds - steps * step_seconds)


class StepClock:
    """Called after each step of an update: how long one takes."""

    def __init__(self) -> None:
        self.began = self.first = self.last = time.monotonic()
        self.first_step = self.last_step = 0

    def __call__(self, done: int, loss: float | None) -> None:
        if done > self.last_step:
            self.last, self.last_step = time.monotonic(), done
            if not self.first_step:
                self.first, self.first_step = self.last, done

    @property
    def step_seconds(self) -> float:
        """Without the first step, which comes after the records were read; all of it where there is one."""
        if self.last_step > self.first_step:
            return (self.last - self.first) / (self.last_step - self.first_step)
        return time.monotonic() - self.began


@dataclass(frozen=True)
class Event:
    """One finished request, or what one update published: versions by expert (nothing: the gate kept it)."""

    output: RequestOutput | None = None
    query: Query | None = None
    published: dict[str, int] | None = None


def serve_and_learn(system: System, loop: DistillLoop, queries: list[Query], pace: Pace) -> Iterator[Event]:
    """Serve `queries` in order, and train what is due after every window of finished requests.

    Training happens between two steps, for as long as the pace allows, while the running requests wait.
    """
    waiting = deque(queries)
    running: dict[str, Query] = {}
    finished = 0
    engine = system.engine
    while waiting or running:
        while waiting and len(running) < 2 * system.settings.max_batch_size:
            query = waiting.popleft()
            params = SamplingParams(max_tokens=query.max_tokens)
            running[engine.add(query.prompt, params, capture=True, chat=True)] = query
        for output in engine.step():
            if output.finish_reason and output.request_id in running:
                finished += 1
                yield Event(output=output, query=running.pop(output.request_id))
                if finished % pace.window == 0 or finished == len(queries):
                    pace.pause(finished)
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
