"""What time rounds take, taken from outside: the code of a round looks at no clock.

The engine hands it functions that are wrapped with what times them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class RoundTimer:
    """Wraps each step and round of an engine, on the thread that owns it.

    What lies between two rounds (prompts aside) is part of a round's cost, since drafting saves that as well
    with every round it saves. What is paid once and not by every round, such as filling a cache, is left out
    (`apart`).
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.ms = 0.0  # of the last round
        self.step_seconds = 0.0  # spent in steps since the start
        self.verify_seconds = 0.0  # of these, in what `verifying` wraps
        self.select_seconds = 0.0  # of these, spent on who drafts, between rounds
        self._clock = clock
        self._ended = math.inf  # when the last round did, unless a prompt was read since
        self._apart = 0.0  # seconds of the running round that are not its own

    @contextmanager
    def step(self) -> Iterator[None]:
        began = self._clock()
        yield
        self.step_seconds += self._clock() - began

    @contextmanager
    def round(self) -> Iterator[None]:
        """Time one round. Afterwards `ms` is what it cost."""
        began, self._apart = self._clock(), 0.0
        yield
        now = self._clock()
        spent = now - began
        self.ms = (spent + min(max(0.0, began - self._ended), spent) - self._apart) * 1e3
        self._ended = now

    @contextmanager
    def apart(self) -> Iterator[None]:
        """A part of the running round that is left out of its cost. As a decorator: every call is one."""
        began = self._clock()
        yield
        self._apart += self._clock() - began

    @contextmanager
    def selecting(self) -> Iterator[None]:
        """Time the choice of experts between two rounds, and keep it out of what either round costs.

        It is not made at every round.
        """
        began = self._clock()
        yield
        spent = self._clock() - began
        self.select_seconds += spent
        self._ended += spent

    def interrupted(self) -> None:
        """Called when something else than a round is done: its time is not added to the next round."""
        self._ended = math.inf

    def verifying(self, work: Callable[P, T]) -> Callable[P, T]:
        """`work`, with its time counted as verification; it must wait for the device before it returns."""

        @wraps(work)
        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            began = self._clock()
            try:
                return work(*args, **kwargs)
            finally:
                self.verify_seconds += self._clock() - began

        return timed
