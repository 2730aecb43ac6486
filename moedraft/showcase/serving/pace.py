"""How the demo shares its time out between serving requests and learning from them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

LEARNING = 0.5  # share of the time that learning gets, about, where serving all requests leaves less
LEAST_WINDOWS = 3  # that are served however slow the machine is
LEAST_STEPS = 16  # an update of fewer steps is not worth reading and measuring its records
LEAST_SHARE = 0.3  # of the time that serving takes, for learning on a machine that is too slow for the plan
FIRST_STEPS = 24  # of the first update, before it is known how long a step takes


@dataclass
class Pace:
    """Shares the time out between serving and learning: how many requests, how many optimiser steps.

    The stream shall end after `seconds`. What serving still needs is what it needed so far by request, and
    the rest is shared out among the pauses between windows. Where serving would leave learning less than
    LEARNING of the time or so, fewer requests are served, but at least LEAST_WINDOWS windows; if even these
    take too long, so does the stream.
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

    def __post_init__(self) -> None:
        self.planned = self.requests  # they may become fewer, and more again

    @property
    def serving_seconds(self) -> float:
        """Time so far outside of updates."""
        return time.monotonic() - self.began - self.trained

    def pause(self, done: int, started: int) -> None:
        """`done` requests are answered, `started` were begun, and it is time for learning."""
        now = time.monotonic()
        each = self.serving_seconds / max((done + started) / 2, 1)  # those that run: half
        self.requests = max(min(self.planned, self._possible(each)), started)
        left = self.began + self.seconds - now - each * (self.requests - done)
        pauses = 1 + math.ceil((self.requests - done) / self.window)
        least = LEAST_SHARE * each * self.window
        if pauses == 1 and self.step_seconds:
            # Half a step more, since some time passes until `next_steps` is asked.
            least = max(least, self.beside + (LEAST_STEPS + 0.5) * self.step_seconds)
        self.pause_ends = now + max(least, left / pauses)

    def _possible(self, each: float) -> int:
        """How many requests there is time for, in whole windows, where one takes `each` seconds."""
        windows = round((1 - LEARNING) * self.seconds / max(each, 1e-9) / self.window)
        return max(LEAST_WINDOWS, windows) * self.window

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
