"""Serve a stream while the experts learn from it, in one process: serve some requests, train, go on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from moedraft.core import RequestOutput, SamplingParams
from moedraft.distill.loop import DistillLoop, Update
from moedraft.showcase.shipped import Query
from moedraft.system.build import System


@dataclass
class ExpertProgress:
    """What the live table shows of one expert. Acceptance: accepted / drafted tokens."""

    requests: int = 0
    first: list[tuple[int, int]] = field(default_factory=list)  # (accepted, drafted) of its first requests
    recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=12))
    version: int = 0

    def add(self, output: RequestOutput) -> None:
        self.requests += 1
        pair = (output.speculation.num_accepted_tokens, output.speculation.num_draft_tokens)
        if pair[1]:
            self.recent.append(pair)
            if len(self.first) < 4:
                self.first.append(pair)


def rate(pairs: list[tuple[int, int]] | deque[tuple[int, int]]) -> float | None:
    """Accepted over drafted tokens of all pairs together; None if nothing was drafted."""
    drafted = sum(d for _, d in pairs)
    return sum(a for a, _ in pairs) / drafted if drafted else None


@dataclass(frozen=True)
class Event:
    """One finished request or one update."""

    output: RequestOutput | None = None
    query: Query | None = None
    update: Update | None = None


def serve_and_learn(
    system: System,
    loop: DistillLoop | None,
    queries: list[Query],
    *,
    window: int = 24,
    max_updates: int = 2,
    may_train: Callable[[], bool] = lambda: True,
) -> Iterator[Event]:
    """Serve `queries` in order, and train what is due after every `window` finished requests.

    Training happens between two steps, at most `max_updates` times in a row, while the running requests wait.
    Without a loop nothing is learned.
    """
    waiting = deque(queries)
    running: dict[str, Query] = {}
    finished = 0
    engine = system.engine
    while waiting or running:
        while waiting and len(running) < 2 * system.settings.max_batch_size:
            query = waiting.popleft()
            params = SamplingParams(max_tokens=query.max_tokens)
            running[engine.add(query.prompt, params, capture=loop is not None, chat=True)] = query
        for output in engine.step():
            if output.finish_reason and output.request_id in running:
                finished += 1
                yield Event(output=output, query=running.pop(output.request_id))
                if loop is not None and finished % window == 0 and may_train():
                    for _ in range(max_updates):
                        update = loop.run_once()
                        if update is None:
                            break
                        system.refresh()
                        yield Event(update=update)
