"""Wait until something has happened, so that no test of threads or processes guesses how long that takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

LOOK_SECONDS = 0.003  # between two looks


def wait_for(true: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Return the first true value that `true()` gives; fail if there is none within `seconds`."""
    deadline = time.monotonic() + seconds
    while not (result := true()):
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(LOOK_SECONDS)
    return result


async def until(true: Callable[[], Any], seconds: float = 30.0) -> Any:
    """`wait_for` in a coroutine: the event loop goes on meanwhile."""
    deadline = time.monotonic() + seconds
    while not (result := true()):
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(LOOK_SECONDS)
    return result
