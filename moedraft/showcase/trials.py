"""Held-out prompts answered by six systems: plain decoding, the static draft, experts, lookups, and all.

All together are what a server does. The systems take turns, so that a slow minute of the machine hits all
alike. Prompts are answered in full batches, and as many of them as there is time for one at a time. First
guesses are counted on plain decoding's answers to all prompts, also where there was no time for the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from moedraft.core import SHARED, RequestOutput, SamplingParams
from moedraft.drafting.chooser import DraftSource
from moedraft.drafting.lengths.budget import Budget
from moedraft.drafting.lookup.drafter import LookupDrafter
from moedraft.showcase.measure import AnswerRead, new_budget, only_base
from moedraft.showcase.shipped import Query
from moedraft.system.build import System

PLAIN, STATIC, EXPERTS = "plain decoding", "static draft", "experts"
LOOKUP, EARLIER = "lookup in the text", "lookup in earlier answers too"
SERVED = "experts and both lookups"
SOURCES: dict[str, DraftSource] = {
    PLAIN: "model",  # its requests ask for no draft
    STATIC: "model",
    EXPERTS: "model",
    LOOKUP: "lookup",
    EARLIER: "lookup",
    SERVED: "auto",
}
SYSTEMS = tuple(SOURCES)
OnPrompt = Callable[[int], None]  # is called with the number of prompts that are done


@dataclass(frozen=True)
class Trial:
    """One prompt answered by one system, with nothing else in the engine."""

    token_ids: list[int]
    steps: int  # forwards of the target
    seconds: float


@dataclass
class Trials:
    """All that was measured. Lists are in the order of the prompts; `alone` may end before the last one."""

    queries: list[Query]
    timed: int  # of them, the first ones, which all systems answered in the queues
    alone: dict[str, list[Trial]] = field(default_factory=dict)  # by system, one prompt at a time
    together: dict[str, list[list[int]]] = field(default_factory=dict)  # answers of the queues
    rest: list[list[int]] = field(default_factory=list)  # plain decoding's answers to those not timed
    seconds: dict[str, list[float]] = field(default_factory=dict)  # that each queue took
    guessed: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # first guesses: right, all

    @property
    def plain(self) -> list[list[int]]:
        """Plain decoding's answers to all prompts."""
        return self.together[PLAIN][: self.timed] + self.rest

    @property
    def equal(self) -> bool:
        """Whether every answer is that of plain decoding, token for token, alone and in a batch."""
        together = all(answers == self.together[PLAIN] for answers in self.together.values())
        alone = [[trial.token_ids for trial in trials] for trials in self.alone.values()]
        return together and all(answers == self.plain[: len(answers)] for answers in alone)

    def tokens_per_second(self, system: str) -> float:
        """How fast this system answered the queue in full batches."""
        return sum(map(len, self.together[system])) / sum(self.seconds[system])


class Comparison:
    """Runs the six systems on one engine. Each has a budget and a lookup of its own, as if it served alone.

    What they answer is left out of the home's statistics, which are of the stream.
    """

    def __init__(self, system: System, queries: list[Query], timed: int) -> None:
        """timed: how many of the queries all systems answer in the queues."""
        self.system = system
        self.trials = Trials(queries, timed)
        self.budgets: dict[str, Budget] = {name: new_budget(system) for name in SYSTEMS}
        self.lookups: dict[str, LookupDrafter] = {}

    def run_batches(self, warm_up: list[Query], on_prompt: OnPrompt = lambda done: None) -> Trials:
        """The prompts in two queues, so that batches are full until shortly before their ends; then guesses.

        The systems answer the second queue in the opposite order, so that a machine that becomes slower or
        faster meanwhile favours none. A few prompts are one queue. `warm_up`: prompts that are answered first
        and not measured. Those that are not timed come last.
        """
        trials, queries = self.trials, self.trials.queries[: self.trials.timed]
        for name in SYSTEMS:
            self._answer(name, warm_up)
        self.lookups.clear()  # prompts of the stream found their own answers
        trials.seconds = {name: [] for name in SYSTEMS}
        half = len(queries) // 2
        few = half < self.system.settings.max_batch_size
        queues = [queries] if few else [queries[:half], queries[half:]]
        for queue, order in zip(queues, (SYSTEMS, SYSTEMS[::-1]), strict=False):
            for name in order:
                began = time.perf_counter()
                outputs = self._answer(name, queue)
                trials.seconds[name].append(time.perf_counter() - began)
                trials.together.setdefault(name, []).extend(output.token_ids for output in outputs)
        if untimed := trials.queries[trials.timed :]:
            trials.rest = [output.token_ids for output in self._answer(PLAIN, untimed)]
        for done, (query, answer) in enumerate(zip(trials.queries, trials.plain, strict=True), 1):
            self._guess(query, answer)
            on_prompt(done)
        return trials

    def run(self, seconds: float, on_prompt: OnPrompt = lambda done: None) -> Trials:
        """One prompt at a time, with what the budgets have learned about drafts in the batches before.

        A round over the domains begins only where it would end within `seconds`, if it takes as long as the
        one before; the first always does. What is left is not answered alone.
        """
        began = round_began = time.monotonic()
        for number, query in enumerate(self.trials.queries):
            if number and query.domain == self.trials.queries[0].domain:
                now = time.monotonic()
                if 2 * now - round_began - began > seconds:
                    break
                round_began = now
            for name in in_rotation(number):
                self.trials.alone.setdefault(name, []).append(self._alone(name, query))
            on_prompt(number + 1)
        return self.trials

    def _alone(self, name: str, query: Query) -> Trial:
        began = time.perf_counter()
        [output] = self._answer(name, [query])
        return Trial(output.token_ids, output.speculation.num_steps, time.perf_counter() - began)

    def _answer(self, name: str, queries: list[Query]) -> list[RequestOutput]:
        params = [SamplingParams(max_tokens=query.max_tokens) for query in queries]
        expert = SHARED if name in (STATIC, LOOKUP) else None  # these need no router
        with self._as(name):
            prompts = [query.prompt for query in queries]
            return self.system.engine.generate(
                prompts, params, draft=name != PLAIN, expert=expert, counted=False, chat=True
            )

    @contextmanager
    def _as(self, name: str) -> Iterator[None]:
        """The engine as this system."""
        system, chooser = self.system, self.system.engine.chooser
        lookup = self.lookups.setdefault(name, LookupDrafter(None if name == LOOKUP else chooser.lookup.past))
        drafting = chooser.using(self.budgets[name], SOURCES[name], lookup=lookup)
        with drafting, only_base(system, name == STATIC):
            yield

    def _guess(self, query: Query, answer: list[int]) -> None:
        """Which tokens of the target's answer the draft guesses first: the base alone, and the expert."""
        system = self.system
        [route] = system.router.route([query.prompt])
        read = AnswerRead(system, query.prompt, answer)
        for name, expert in ((STATIC, SHARED), (EXPERTS, route.domain)):
            with only_base(system, name == STATIC):
                self.trials.guessed.setdefault(name, []).append(read.right_guesses(expert))


def in_rotation(number: int) -> tuple[str, ...]:
    """The systems, beginning with another one each time."""
    first = number % len(SYSTEMS)
    return SYSTEMS[first:] + SYSTEMS[:first]
