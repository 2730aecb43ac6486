"""Time ranges that a reader can choose, and their division into equal steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from moedraft.core import InvalidRequest
from moedraft.insight.columns import Codes, Numbers

STEPS = (5, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 3 * 3600, 6 * 3600, 12 * 3600, 86400)  # seconds
DAY = 86400
MOST_STEPS = 48  # more would not be readable on a screen


@dataclass(frozen=True)
class TimeSpan:
    """The last `seconds`, or everything (None). `refresh`: seconds between two updates of an open page."""

    key: str
    label: str
    words: str  # completes "requests of …"
    seconds: int | None
    refresh: float


SPANS = {
    span.key: span
    for span in (
        TimeSpan("15m", "15 min", "the last 15 minutes", 900, 2.0),
        TimeSpan("1h", "1 hour", "the last hour", 3600, 3.0),
        TimeSpan("24h", "24 hours", "the last 24 hours", DAY, 10.0),
        TimeSpan("all", "All", "all time", None, 15.0),
    )
}
DEFAULT = "1h"


def find_span(key: str | None) -> TimeSpan:
    """The span named `key`; None means the default. Raises InvalidRequest for an unknown name."""
    found = SPANS.get(DEFAULT if key is None else key)
    if found is None:
        raise InvalidRequest(f"The time range must be one of {', '.join(SPANS)}.")
    return found


@dataclass(frozen=True)
class Grid:
    """`count` steps of `width` seconds, beginning at `start`. The last step may end after `now`."""

    start: float  # epoch seconds, a whole multiple of width
    width: int
    count: int
    now: float

    @property
    def end(self) -> float:
        return self.start + self.width * self.count

    @property
    def starts(self) -> list[float]:
        return [self.start + self.width * step for step in range(self.count)]

    @property
    def lengths(self) -> list[float]:
        """For each step, the seconds that have passed of it; at least one."""
        return [max(1.0, min(float(self.width), self.now - start)) for start in self.starts]

    def steps(self, at: Numbers) -> Codes:
        """The step in which each time lies."""
        return np.clip((at - self.start) // self.width, 0, self.count - 1).astype(np.int64)


def grid_of(span: TimeSpan, now: float, first: float | None) -> Grid:
    """The steps of `span` up to `now`. `first` is when the oldest request ended, None if there is none."""
    seconds = span.seconds or max(60.0, now - first if first is not None else 0.0)
    width = next((step for step in STEPS if seconds / step <= MOST_STEPS), None)
    width = width or DAY * math.ceil(seconds / MOST_STEPS / DAY)
    start = math.floor((now - seconds) / width) * width
    return Grid(float(start), width, math.floor(now / width) - start // width + 1, now)
