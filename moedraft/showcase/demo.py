"""The phases of the demo: register, serve and learn, measure six systems in turns. Prints nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from moedraft.config import Settings
from moedraft.distill.assembly import build_loop
from moedraft.distill.joint.joint_loop import JointLoop
from moedraft.drafting.base import MINI, FeatureBase
from moedraft.drafting.lengths.costs import RoundCosts
from moedraft.showcase import shipped
from moedraft.showcase.findings.report import Point, Result, result_of
from moedraft.showcase.measure import new_budget, warm_up
from moedraft.showcase.serving.pace import Pace
from moedraft.showcase.serving.stream import Event, ExpertProgress, rate, serve_and_learn
from moedraft.showcase.shipped import DemoPrompts, with_short_answers
from moedraft.showcase.trials import PLAIN, SYSTEMS, Comparison, Trials
from moedraft.system.build import System
from moedraft.system.domains.registering import register_all

# Requests between two pauses for learning: beside its steps, a joint update takes as long as a dozen of them.
WINDOWS = {True: 40, False: 24}  # by whether they learn jointly
JOINT_STEPS = 128  # most optimiser steps of one update where all adapters learn together
MOST_DRAFTED = 3  # tokens in each step of the stream
MOST_COST = 1.7  # of such a step, in steps of plain decoding; on a slow processor fewer tokens are drafted
WARM_UP = 8  # prompts that are answered before anything is measured
WARM_UP_TOKENS = 16  # of each, at most
QUEUE_SECONDS = 75.0  # for the held-out prompts in queues; on a slow machine fewer of them are timed
LEAST_ROUNDS = 2  # of one held-out prompt for each domain, that all systems answer in queues
ALONE_SECONDS = 130.0  # for held-out prompts one at a time
ALL_SECONDS = 440.0  # for everything; on a slow machine fewer prompts are answered one at a time
SECONDS = {True: 240.0, False: 100.0}  # for stream and learning, by whether the draft is a feature drafter


def prompts_for(target: str) -> DemoPrompts:
    """What the demo serves and measures on this target: the toy reads all domains within a minute or two."""
    return shipped.everything() if target == MINI else shipped.chosen()


def affordable(costs: RoundCosts, rows: int) -> int:
    """How many tokens, one at least, to draft for each of so many rows: a step costs MOST_COST at most.

    costs: of rounds, as they were timed on this machine.
    """
    lengths = range(MOST_DRAFTED, 1, -1)
    return next((k for k in lengths if costs.of(rows, k, k * rows) <= MOST_COST), 1)


def in_little_time(settings: Settings) -> Settings:
    """The settings, so that learning does not run a feature drafter's target, unless they say otherwise.

    What the drafter read is kept beside the records, and there are no further answers to them: on two cores
    these take as long as three updates of the demo, which has time for about a dozen.
    """
    usual = {"features": "keep", "resampled_answers": 0}
    return settings.model_copy(
        update={name: value for name, value in usual.items() if name not in settings.model_fields_set}
    )


@dataclass
class Demo:
    """One run of the demo in a fresh home. Stream and learning take about `seconds`.

    `on_phase` is called with the name of each phase, `on_event` after each answer and each update.
    """

    system: System
    prompts: DemoPrompts
    seconds: float | None = None
    on_phase: Callable[[str], None] = lambda _: None
    on_event: Callable[[Demo], None] = lambda _: None
    views: dict[str, ExpertProgress] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    updates: list[int] = field(default_factory=list)
    published: int = 0
    requests: int = 0  # that the stream has
    drafted: int = MOST_DRAFTED  # tokens in each step of the stream
    took: dict[str, float] = field(default_factory=dict)  # seconds by phase
    _open: tuple[str, float] | None = None  # the running phase, and when it began

    def run(self) -> Result:
        """Run all phases."""
        self._begin("registering the shipped domains")
        register_all(self.system.store, self.system.router, self.prompts.examples)
        warm_up(self.system)
        self._begin("the stream, with learning on")
        pace = self._serve_and_learn()
        trials = self._measure(pace)
        self._begin("done")
        return result_of(trials, self.points, self.updates, self._facts(trials, pace))

    def _begin(self, phase: str) -> None:
        if self._open is not None:
            name, began = self._open
            self.took[name] = time.monotonic() - began
        self._open = phase, time.monotonic()
        self.on_phase(phase)

    def _serve_and_learn(self) -> Pace:
        """Serve the stream without lookup in the text and with drafts of one length.

        So one sees what the draft model learns, and not when drafting pays.
        """
        loop = build_loop(self.system.settings, self.system.store)
        joint = isinstance(loop, JointLoop)
        seconds = self.seconds or SECONDS[isinstance(self.system.draft, FeatureBase)]
        most = JOINT_STEPS if joint else self.system.settings.update_steps
        pace = Pace(seconds, len(self.prompts.stream), WINDOWS[joint], most)
        chooser, budget = self.system.engine.chooser, new_budget(self.system)
        self.drafted = affordable(budget.costs, self.system.settings.max_batch_size)
        with chooser.using(budget, "model", fixed_length=self.drafted):
            for event in serve_and_learn(self.system, loop, self.prompts.stream, pace):
                self.requests = pace.requests
                self._note(event)
        return pace

    def _note(self, event: Event) -> None:
        if event.output is not None and event.output.tokens_per_step is not None:
            self.views.setdefault(event.output.expert, ExpertProgress()).add(event.output)
            self.points.append(Point(len(self.points), event.output.tokens_per_step))
        for expert, version in (event.published or {}).items():
            self.views.setdefault(expert, ExpertProgress()).version = version
        if event.published:
            self.updates.append(len(self.points))
            self.published += len(event.published)
        self.on_event(self)

    def timed(self, pace: Pace) -> int:
        """How many held-out prompts all systems have time to answer, by how fast the stream was answered.

        Whole rounds over the domains. The others are answered by plain decoding alone.
        """
        queries = self.prompts.heldout
        each = pace.serving_seconds / max(1, len(self.points)) * len(SYSTEMS)
        domains = len({query.domain for query in queries})
        rounds = max(LEAST_ROUNDS, int(QUEUE_SECONDS / max(each, 1e-9) / domains))
        return min(len(queries), rounds * domains)

    def _measure(self, pace: Pace) -> Trials:
        comparison = Comparison(self.system, self.prompts.heldout, self.timed(pace))
        self._begin("held-out prompts in a queue, eight at a time, six systems in turns")
        comparison.run_batches(with_short_answers(self.prompts.stream[-WARM_UP:], WARM_UP_TOKENS))
        self._begin("held-out prompts one at a time, six systems in turns")
        return comparison.run(min(ALONE_SECONDS, ALL_SECONDS - sum(self.took.values())))

    def _facts(self, trials: Trials, pace: Pace) -> dict[str, str]:
        target, draft, settings = self.system.target, self.system.draft, self.system.settings
        spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in self.took.items())
        kind = "feature drafter" if isinstance(draft, FeatureBase) else "small model"
        return {
            "target": f"{settings.target} ({target.num_parameters / 1e6:.0f} M weights, "
            f"{target.precision}, on {target.device})",
            "draft base": f"a {kind} with {draft.num_parameters / 1e6:.1f} M weights",
            "domains": str(len(self.prompts.examples)),
            "stream": f"{self._served()}, {settings.max_batch_size} at once, "
            f"{self.drafted} token{'s' * (self.drafted > 1)} drafted at each step",
            "learning": f"{pace.steps} steps in {pace.trained:.0f} s, {pace.step_seconds:.1f} s each; "
            f"{self.published} versions were published in {len(self.updates)} updates",
            "measured with": f"{len(trials.queries)} held-out prompts for first guesses; all systems "
            f"answered {trials.timed} of them in a queue and {len(trials.alone[PLAIN])} one at a time; "
            "greedy, drafts as long as pays",
            "time": spent,
        }

    def _served(self) -> str:
        """How many requests the stream had; of how many, where there was no time for all."""
        served, planned = len(self.points), len(self.prompts.stream)
        return f"{served} requests" + f" (of {planned}; no time for more)" * (served < planned)

    def table(self) -> list[tuple[str, int, float | None, float | None, int, int]]:
        """Rows of (expert, requests, tokens per step at the start, now, replay size, version)."""
        sizes = self.system.store.replay.sizes()
        return [
            (name, view.requests, rate(view.first), rate(view.recent), sizes.get(name, 0), view.version)
            for name, view in sorted(self.views.items())
        ]
