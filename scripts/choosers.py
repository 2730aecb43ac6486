"""Ways of choosing who drafts, for benchmarks: each answers the same prompts through one engine.

What the benchmarks of who drafts have in common stands here too: their options, and reports that go on.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moedraft.core import RequestOutput, SamplingParams
from moedraft.core import Sequence as Row
from moedraft.drafting.arms import judges
from moedraft.routing.router import Route, Router
from moedraft.routing.selector import BackgroundSelector
from moedraft.selecting.selector import ArmJudge, EvidenceSelector
from moedraft.showcase.findings.estimates import Estimate
from moedraft.system.build import System

Counts = list[tuple[float, float]]  # by prompt: what is counted, and out of how much


class KnownRouter(Router):
    """Answers at once what the router has said of each prompt; `names` puts other domains in their place."""

    def __init__(self, router: Router, prompts: Sequence[str], names: dict[str, str]) -> None:
        self._names = router.domains
        self.known = {
            prompt: Route(
                names.get(route.domain, route.domain),
                route.confidence,
                {names.get(name, name): p for name, p in route.probabilities.items()},
            )
            for prompt, route in zip(prompts, router.route(prompts), strict=True)
        }

    @property
    def domains(self) -> tuple[str, ...]:
        return self._names

    def route(self, texts: Sequence[str]) -> list[Route]:
        return [self.known[text] for text in texts]


class PromptClassifier(BackgroundSelector):
    """Knows every expert before the first token, so that timing plays no part."""

    def assign(self, sequences: list[Row]) -> None:
        super().assign(sequences)
        for routed, _ in self._open:
            routed.result()


class PromptEvidence(EvidenceSelector):
    """As `PromptClassifier`. Who drafts follows from earlier answers too, though no records are kept."""

    def settle(self, ending: Row | None = None) -> list[Row]:
        if ending is None:
            return super().settle()
        ending.capture = True
        changed = super().settle(ending)
        ending.capture = False
        return changed

    def assign(self, sequences: list[Row]) -> None:
        super().assign(sequences)
        for routed, _ in self._open:
            routed.result()


class PausedClock:
    """A clock that stands still but for the time that is spent inside `running`."""

    def __init__(self) -> None:
        self.paused, self._since = 0.0, time.perf_counter()
        self._running = False

    def __call__(self) -> float:
        return (time.perf_counter() if self._running else self._since) - self.paused

    @contextmanager
    def running(self) -> Iterator[None]:
        self.paused += time.perf_counter() - self._since
        self._running = True
        yield
        self._since, self._running = time.perf_counter(), False


class FollowingOwner(BackgroundSelector):
    """Gives each answer the expert whose text it is; `owners` says by prompt from which token on whose."""

    def __init__(self, router: Router, owners: Mapping[str, Sequence[tuple[int, str]]]) -> None:
        super().__init__(router)
        self.owners = owners
        self.rows: list[Row] = []

    def assign(self, sequences: list[Row]) -> None:
        self.rows += sequences

    def settle(self, ending: Row | None = None) -> list[Row]:
        changed = []
        for row in self.rows:
            owner = [name for since, name in self.owners[row.prompt] if since <= row.num_generated][-1]
            if owner != row.expert:
                row.expert = owner
                changed.append(row)
        self.rows = [row for row in self.rows if row is not ending and row.finish_reason is None]
        return changed


class ChosenArms:
    """A judge that knows only some of the arms of another one."""

    def __init__(self, judge: ArmJudge, arms: Sequence[str]) -> None:
        self.arms, self.known, self.hits = list(arms), judge.known, judge.hits
        self.most_rows, self.comparable = judge.most_rows, judge.comparable
        self._judge = judge

    @property
    def ready(self) -> list[str]:
        return [arm for arm in self.arms if arm in self._judge.ready]


def answers(
    system: System,
    prompts: Sequence[str],
    experts: Sequence[str | None],
    max_tokens: int | Sequence[int],
) -> list[RequestOutput]:
    """Answers to all prompts at once; max_tokens: of all of them, or of each.

    Raises RuntimeError where experts could not be compared: a server goes on then, but figures mean nothing.
    """
    engine = system.engine
    most = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
    ids = [
        engine.add(prompt, SamplingParams(max_tokens=count), expert=expert, chat=True, topic=prompt)
        for prompt, expert, count in zip(prompts, experts, most, strict=True)
    ]
    done: dict[str, RequestOutput] = {}
    while engine.has_work:
        done |= {output.request_id: output for output in engine.step() if output.finish_reason}
    if getattr(engine.selector, "failures", 0):
        raise RuntimeError("The experts could not be compared; the log says why.")
    return [done[name] for name in ids]


def choosing(system: System, selector: BackgroundSelector) -> None:
    """Have the engine's experts chosen by `selector` from now on."""
    system.engine.selector = selector


def lengths(outputs: Sequence[RequestOutput]) -> Counts:
    return [(float(len(o.token_ids)), float(max(1, o.speculation.num_steps))) for o in outputs]


def rounded(estimate: Estimate) -> list[float]:
    """[figure, low, high], as it is stored."""
    return [round(each, 4) for each in (estimate.value, estimate.low, estimate.high)]


def options(doc: str) -> argparse.ArgumentParser:
    """The command line that all these benchmarks have. doc: what theirs is for, in its first line."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument(
        "--home", type=Path, required=True, help="with learned experts; nothing is kept there"
    )
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--data", type=Path, required=True, help="folder with stream/ and dev/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--draft-length", type=int, default=4)
    return parser


def judge_of(system: System) -> ArmJudge:
    """What compares the experts of the home."""
    judge = judges.judge_of(system.engine.chooser.model, system.bank)
    assert judge is not None, "only drafters with experts can be compared"
    return judge


def begun(settings: dict[str, str], file: Path, part: str) -> dict[str, Any]:
    """What an earlier run with the same settings has left in the file, to be gone on with.

    part: what such a run fills, empty at first.
    """
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if found.get("settings") == settings:
        return found
    return {"settings": settings, "date": datetime.now(UTC).date().isoformat(), part: {}}


def save(report: dict[str, Any], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
