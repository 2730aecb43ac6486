"""How busy the engine is and how fast: sums over the last few seconds, in thin slices."""

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
    """Safe to share between threads. Times are seconds of one monotonic clock."""

    def __init__(self, now: float, window: float = 10.0) -> None:
        self.began = now
        self.window = window
        self._slices: deque[Slice] = deque()
        self._lock = threading.Lock()

    def add(self, start: float, end: float, tokens: int = 0) -> None:
        """Work from `start` to `end`, which emitted `tokens`; never before what was added already."""
        with self._lock:
            start = max(start, end - self.window)
            while start < end:
                number = int(start / SLICE)
                stop = min(end, (number + 1) * SLICE)
                if stop <= start:  # the clock is so far on that a slice is below its precision
                    break
                self._at(number).busy += stop - start
                start = stop
            self._at(int(end / SLICE)).tokens += tokens
            while self._slices[0].number < (end - self.window) / SLICE - 1:
                self._slices.popleft()

    def busy_share(self, now: float, window: float) -> float:
        """Of the last `window` seconds, 0 … 1."""
        return min(1.0, sum(one.busy for one in self._last(now, window)) / self._span(now, window))

    def tokens_per_second(self, now: float) -> float:
        return sum(one.tokens for one in self._last(now, self.window)) / self._span(now, self.window)

    def _last(self, now: float, window: float) -> list[Slice]:
        with self._lock:
            return [one for one in self._slices if one.number * SLICE >= now - window]

    def _span(self, now: float, window: float) -> float:
        """Shorter in the first seconds, which would else look idle."""
        return max(min(window, now - self.began), SLICE)

    def _at(self, number: int) -> Slice:
        if not self._slices or self._slices[-1].number != number:
            self._slices.append(Slice(number))
        return self._slices[-1]
