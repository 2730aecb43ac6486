"""Measures how busy the engine is and how fast, by sums over short slices of the last few seconds."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

SLICE = 0.25  # s


@dataclass
class Slice:
    number: int  # begins at number · SLICE
    busy: float = 0.0  # s
    tokens: int = 0


class Meter:
    """Keeps busy time and tokens of the last few seconds. Thread-safe. Times are monotonic seconds."""

    def __init__(self, now: float, window: float = 10.0) -> None:
        self.began = now
        self.window = window
        self._slices: deque[Slice] = deque()
        self._lock = threading.Lock()

    def add(self, start: float, end: float, tokens: int = 0) -> None:
        """Count `start` … `end` as busy, with `tokens` emitted. Calls must come in order of time."""
        with self._lock:
            start = max(start, end - self.window)
            while start < end:
                number = int(start / SLICE)
                stop = min(end, (number + 1) * SLICE)
                if stop <= start:  # the clock is too large a number to express so short a time
                    break
                self._at(number).busy += stop - start
                start = stop
            self._at(int(end / SLICE)).tokens += tokens
            while self._slices[0].number < (end - self.window) / SLICE - 1:
                self._slices.popleft()

    def busy_share(self, now: float, window: float) -> float:
        """The share of the last `window` seconds in which the engine worked, 0 … 1."""
        return min(1.0, sum(one.busy for one in self._last(now, window)) / self._span(now, window))

    def tokens_per_second(self, now: float) -> float:
        return sum(one.tokens for one in self._last(now, self.window)) / self._span(now, self.window)

    def _last(self, now: float, window: float) -> list[Slice]:
        with self._lock:
            return [one for one in self._slices if one.number * SLICE >= now - window]

    def _span(self, now: float, window: float) -> float:
        """`window`, or the time since the start if shorter, so that a new server does not look idle."""
        return max(min(window, now - self.began), SLICE)

    def _at(self, number: int) -> Slice:
        if not self._slices or self._slices[-1].number != number:
            self._slices.append(Slice(number))
        return self._slices[-1]
