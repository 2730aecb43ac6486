"""Warm start of a new expert: the target answers some of its examples, and the expert learns from them.

What it gained is measured on other examples: the share of drafted tokens that the target accepts in greedy
decoding, before and after. Turn `adaptive_budget` off to compare the two figures: a budget that drafts only
what is sure to be accepted hides what was learned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from moedraft.core import Domain, InvalidRequest, RequestOutput, SamplingParams, StorageError
from moedraft.distill.entries import withdrawal_entry
from moedraft.distill.judging.gate import Verdict
from moedraft.distill.judging.judge import JudgeLike
from moedraft.distill.judging.watch import Withdrawal
from moedraft.distill.measuring.figures import FEW
from moedraft.speculation import SpeculationStats
from moedraft.storage.versions.candidate import Candidate

if TYPE_CHECKING:
    from moedraft.distill.loop import DistillLoop, Update
    from moedraft.system.build import System

STEPS = 60  # optimiser steps, over UPDATES versions
UPDATES = 3
MIN_HELD_OUT, MAX_HELD_OUT = 4, 24
PARAMS = SamplingParams(max_tokens=64)
NO_TRIAL = "It was on trial, and was taken back, since other examples did worse with it."

Progress = Callable[[int, str, int], None]  # how many are done, what is being done, how many there are


@dataclass(frozen=True)
class WarmStart:
    """What a warm start did. Rates are None where nothing was drafted."""

    answered: int
    held_out: int
    updates: list[Update]
    acceptance_before: float | None
    acceptance_after: float | None  # also of a version that was taken back for it
    reason: str | None = None  # why nothing of it serves, where the gate or a trial said so


def split_examples(examples: Sequence[str], count: int) -> tuple[list[str], list[str]]:
    """`count` examples to answer, and the others to measure on.

    Where fewer than 4 would be left to measure on, a quarter of all, at least 4, is held out.
    """
    shuffled = Random(0).sample(list(examples), len(examples))
    least = max(MIN_HELD_OUT, len(examples) // 4)
    cut = count if count <= len(examples) - MIN_HELD_OUT else len(examples) - least
    return shuffled[:cut], shuffled[cut:][:MAX_HELD_OUT]


def warm_start(
    system: System,
    loop: DistillLoop,
    domain: Domain,
    count: int,
    *,
    steps: int = STEPS,
    chat: bool = True,
    on_progress: Progress = lambda done, text, total: None,
) -> WarmStart:
    """Teach `domain` from `count` of its examples. Versions that pass the gate are published and loaded.

    Where fewer than four answers are held out, what is published of the domain's own expert is on trial: all
    of it is taken back if the other examples do worse with it. Where the gate has published nothing by so
    few, the last update is published on trial. No other adapter is changed: these examples say nothing of
    their domains.

    chat: the examples go through the model's chat template, where it has one.

    Raises InvalidRequest where an example cannot be answered, StorageError where nothing can be stored.
    """
    chosen, held_out = split_examples(domain.examples, count)
    before = _measure(system, domain.name, held_out, on_progress, "Measuring before", chat)
    _answer(system, domain.name, chosen, on_progress, "Answering examples", chat, learn=True)
    updates: list[Update] = []
    doubtful: list[int] = []  # versions that too few held-out records speak for
    with loop.only(domain.name):
        for part in range(UPDATES):
            on_trial = part == UPDATES - 1 and not updates and _cannot_tell(loop)
            update = _update(loop, domain.name, steps // UPDATES, part, on_progress, on_trial=on_trial)
            updates += [update] if update is not None else []
            doubtful += _doubtful(loop, domain.name)
    system.refresh()
    after = _measure(system, domain.name, held_out, on_progress, "Measuring after", chat)
    why = None if updates else "The gate did not find it surely better."
    if doubtful and (before or 0.0) > (after or 0.0):
        taken = _take_back(system, loop, domain.name, doubtful)
        updates = [one for one in updates if one.version.version not in taken]
        why = None if updates else NO_TRIAL
    return WarmStart(len(chosen), len(held_out), updates, before, after, why)


def _answer(
    system: System,
    name: str,
    prompts: list[str],
    on_progress: Progress,
    text: str,
    chat: bool,
    *,
    learn: bool,
) -> list[RequestOutput]:
    done = 0

    def count(_: RequestOutput) -> None:
        nonlocal done
        done += 1
        on_progress(done, text, len(prompts))

    on_progress(0, text, len(prompts))
    return system.engine.generate(
        prompts, PARAMS, expert=name, learn=learn, counted=learn, chat=chat, on_finish=count
    )


def _measure(
    system: System, name: str, prompts: list[str], on_progress: Progress, text: str, chat: bool
) -> float | None:
    """Accepted of drafted tokens on `prompts`; leaves nothing in the home's statistics."""
    outputs = _answer(system, name, prompts, on_progress, text, chat, learn=False)
    return sum((output.speculation for output in outputs), SpeculationStats()).draft_acceptance_rate


def _cannot_tell(loop: DistillLoop) -> bool:
    """Whether the gate had too few held-out records to judge the last update by."""
    return any(one.decision == "keep" and (one.gate_records or 0) < FEW for one in loop.outcomes)


def _doubtful(loop: DistillLoop, name: str) -> list[int]:
    """The version of the expert that the last update published by too few held-out records, if it did."""
    made = [one for one in loop.outcomes if one.expert == name and one.decision in ("promote", "along")]
    return [one.version for one in made if one.gate_records is not None and one.gate_records < FEW]


def _take_back(system: System, loop: DistillLoop, name: str, versions: Sequence[int]) -> list[int]:
    """Roll the expert back as long as one of these versions serves; returns which were, and logs them."""
    taken: list[int] = []
    try:
        while (live := system.store.registry.live(name)) is not None and live.version in versions:
            verdict = Verdict("withdraw", reason=NO_TRIAL)
            now = loop.outlet.withdraw(name, live.version)
            taken.append(live.version)
            used = int(system.store.registry.get_meta(f"trained:{name}") or 0)
            loop.outlet.learned(name, used, withdrawal_entry(Withdrawal(live, verdict), now))
    finally:
        system.refresh()
    return taken


@dataclass(frozen=True)
class OnTrial:
    """Asks the gate, but publishes the expert `name` where it has too few records to judge it by."""

    judge: JudgeLike
    name: str

    def __call__(
        self, candidates: Sequence[Candidate], on_batch: Callable[[], None] = lambda: None
    ) -> dict[str, Verdict]:
        verdicts = self.judge(candidates, on_batch)
        own = verdicts.get(self.name)
        if own is not None and own.decision == "keep" and own.records < FEW:
            reason = "On trial: too few records are held out to judge it by."
            verdicts[self.name] = replace(own, decision="along", reason=reason, unadapted=False)
        return verdicts

    def untaught(self) -> frozenset[str]:
        return self.judge.untaught() - {self.name}

    def forget(self) -> None:
        self.judge.forget()


def _update(
    loop: DistillLoop, name: str, steps: int, part: int, on_progress: Progress, *, on_trial: bool
) -> Update | None:
    """One update; None where nothing of the domain's or of the shared adapter was published."""
    judge = loop.judge
    if judge is not None and on_trial:
        loop.judge = OnTrial(judge, name)
    try:
        update = loop.run_once(
            name,
            steps=max(steps, 1),
            on_step=lambda done, _: on_progress(part * steps + done, "Learning", UPDATES * steps),
        )
    finally:
        loop.judge = judge
    if update is None and loop.state.is_paused:
        raise StorageError(loop.state.reason)
    if update is None and not loop.outcomes:
        too_few = "the answers were too few to learn from; let more examples be answered."
        raise InvalidRequest(loop.held_up() or too_few)
    return update
