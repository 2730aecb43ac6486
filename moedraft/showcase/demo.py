"""The phases of the demo: register, measure, serve and learn, measure again, compare. Prints nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moedraft.distill.assembly import build_loop
from moedraft.distill.loop import DistillLoop
from moedraft.showcase import shipped
from moedraft.showcase.measure import (
    Served,
    by_domain,
    drafting_by,
    greedy_acceptance,
    serve,
    warm_up,
)
from moedraft.showcase.report import Point, Result, Row, draw, write_html
from moedraft.showcase.shipped import Query
from moedraft.showcase.stream import ExpertProgress, rate, serve_and_learn
from moedraft.system.build import System
from moedraft.system.domains import register_all


@dataclass
class Demo:
    """One run of the demo in a fresh home. No update begins once the stream has taken `seconds`.

    `on_phase` is called with the name of each phase, `on_event` after each answer and each update.
    """

    system: System
    seconds: float
    on_phase: Callable[[str], None] = lambda _: None
    on_event: Callable[[Demo], None] = lambda _: None
    stream: list[Query] = field(default_factory=lambda: shipped.traffic())
    heldout: list[Query] = field(default_factory=lambda: shipped.heldout())
    views: dict[str, ExpertProgress] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    updates: list[int] = field(default_factory=list)

    def run(self) -> tuple[Result, bool]:
        """Run all phases. Returns the result, and whether all answers equalled plain decoding."""
        self.on_phase("registering the shipped domains")
        examples = shipped.examples()
        register_all(self.system.store, self.system.router, examples)
        warm_up(self.system)
        plain = self._serve("held-out prompts, plain decoding", draft=False)
        static = self._serve("held-out prompts, generic draft")
        before = self._acceptance(plain)
        self.on_phase("the stream, with learning on")
        seconds = self._serve_and_learn()
        learned = self._serve("held-out prompts, adapted experts")
        again = self._serve("held-out prompts, plain decoding once more", draft=False)
        after = self._acceptance(plain)
        answers = [[output.token_ids for output in s.outputs] for s in (plain, static, learned, again)]
        equal = all(answer == answers[0] for answer in answers)
        facts = {
            "domains": str(len(examples)),
            "stream": f"{len(self.stream)} requests, {len(self.updates)} updates in {seconds:.0f} s",
            "answers equal plain decoding, token for token": "yes" if equal else "NO",
            "batch": f"{self.system.settings.max_batch_size} sequences at once",
            "tokens per target step": f"{static.tokens_per_step:.2f} with the generic draft, "
            f"{learned.tokens_per_step:.2f} with the experts",
        }
        speed = {
            "plain decoding": (plain.tokens + again.tokens) / (plain.seconds + again.seconds),
            "generic draft": static.tokens_per_second,
            "adapted experts": learned.tokens_per_second,
        }
        rows = [Row(domain, before[domain], after[domain]) for domain in before]
        return Result(rows, self.points, self.updates, speed, facts), equal

    def _serve(self, what: str, *, draft: bool = True) -> Served:
        self.on_phase(what)
        return serve(self.system, self.heldout, draft=draft)

    def _acceptance(self, plain: Served) -> dict[str, float]:
        """Mean greedy acceptance by true domain, each prompt drafted by the expert the router chooses."""
        prompts = [query.prompt for query in self.heldout]
        experts = [route.domain for route in self.system.router.route(prompts)]
        answers = [output.token_ids for output in plain.outputs]
        return by_domain(self.heldout, greedy_acceptance(self.system, prompts, answers, experts))

    def _serve_and_learn(self) -> float:
        """Serve the stream without lookup in the text and return the seconds it took.

        Lookup would take the easy tokens, and the experts' acceptance would be measured on hard ones only.
        """
        loop = build_loop(self.system.settings, self.system.store)
        began = time.monotonic()
        with drafting_by(self.system, "model"):
            self._follow(loop, lambda: time.monotonic() - began < self.seconds)
        return time.monotonic() - began

    def _follow(self, loop: DistillLoop, may_train: Callable[[], bool]) -> None:
        for event in serve_and_learn(self.system, loop, self.stream, may_train=may_train):
            if event.output is not None:
                view = self.views.setdefault(event.output.expert, ExpertProgress())
                view.add(event.output)
                share = event.output.speculation.draft_acceptance_rate
                if share is not None:
                    self.points.append(Point(len(self.points), event.output.expert, share))
            if event.update is not None:
                view = self.views.setdefault(event.update.expert, ExpertProgress())
                view.version = event.update.version.version
                self.updates.append(len(self.points))
            self.on_event(self)

    def table(self) -> list[tuple[str, int, float | None, float | None, int, int]]:
        """Rows of (expert, requests, acceptance at the start, acceptance now, replay size, version)."""
        sizes = self.system.store.replay.sizes()
        return [
            (name, view.requests, rate(view.first), rate(view.recent), sizes.get(name, 0), view.version)
            for name, view in sorted(self.views.items())
        ]


def publish(result: Result, folder: Path) -> dict[str, Path]:
    """Write picture, page and numbers into `folder`. Returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"picture": "acceptance.png", "report": "report.html", "numbers": "demo.json"}
    paths = {name: folder / file for name, file in files.items()}
    draw(result, paths["picture"])
    write_html(result, paths["picture"], paths["report"])
    paths["numbers"].write_text(json.dumps(summary(result), indent=1) + "\n", encoding="utf-8")
    return paths


def summary(result: Result) -> dict[str, Any]:
    """The result as plain data."""
    return {
        "acceptance_before": round(result.before, 4),
        "acceptance_after": round(result.after, 4),
        "tokens_per_second": {name: round(value, 1) for name, value in result.speed.items()},
        "domains": {
            r.domain: {"before": round(r.before, 4), "after": round(r.after, 4)} for r in result.rows
        },
        "facts": result.facts,
    }
