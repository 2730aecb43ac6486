"""Looks for groups of prompts and for domains that overlap, beside the engine and one search at a time."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from moedraft.cpu.threads import compute_alone
from moedraft.system.build import System
from moedraft.system.domains.suggest import Suggestions, overlaps_data, suggest

T = TypeVar("T")


class Search:
    """Works in a thread of its own, with its own copy of the tokenizer. `close` it."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._tokenizer = copy.deepcopy(system.engine.tokenizer)
        self._thread = ThreadPoolExecutor(1, "moedraft-search", initializer=compute_alone)

    async def suggestions(self) -> Suggestions:
        """Groups of the newest prompts without an expert that could be domains; takes some seconds."""
        return await self._beside(self._suggestions)

    async def overlaps(self) -> list[dict[str, Any]]:
        """Pairs of registered domains that overlap."""
        return await self._beside(lambda: overlaps_data(self._system.store, self._system.router))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _suggestions(self) -> Suggestions:
        system = self._system
        system.recorder.flush()
        capture = system.settings.capture
        return suggest(system.store, system.router, self._tokenizer, capture=capture)

    async def _beside(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
