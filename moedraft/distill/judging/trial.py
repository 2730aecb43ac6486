"""What an expert of its own would bring to a group of records: one is fitted, measured and thrown away.

The shared adapter stays as it is, so the gain is the expert's alone. Nothing is written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from moedraft.core import SHARED, ReplayRecord
from moedraft.distill.features.record_states import RecordStates
from moedraft.distill.joint.joint_trainer import JointTrainer
from moedraft.distill.judging.gate import compare
from moedraft.distill.measuring.figures import expected_tokens
from moedraft.distill.measuring.measures import JointMeasure
from moedraft.distill.rows.drawn import Drawn
from moedraft.storage.last_target import check_target
from moedraft.storage.store import TARGET_ID

STEPS = 24  # of the optimiser
HELD_OUT_EVERY = 4  # of the prompts, one is measured and not learned from
FEWEST = 3  # prompts that must be left to measure with

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TriedExpert:
    """Tokens per target step on held-out records, drafted by the shared adapter and by a trial expert."""

    learned: int  # records
    held_out: int  # records that the expert did not learn from; the shared adapter may have
    before: float
    after: float
    low: float  # the gain lies between these with a probability of 80 %
    high: float

    @property
    def gain(self) -> float:
        return self.after - self.before


class TrialTrainer(JointTrainer):
    """Learns from the records that it is given, and teaches the expert alone."""

    drawn = Drawn([], [], [])

    def draw(self, steps: int, on_record: Callable[[], None] = lambda: None) -> Drawn:
        return self.drawn

    def _learners(self, owners: Sequence[str]) -> list[str]:
        return sorted({*owners} - {SHARED})


class ExpertTrials:
    """Tries experts for groups of records, one after another, on copies of the home's models."""

    def __init__(self, trainer: TrialTrainer, depth: int) -> None:
        """depth: tokens drafted in a step.

        Raises InvalidRequest where the home has served another target than the trainer has loaded, if any.
        """
        self.trainer, self.measure = trainer, JointMeasure(trainer, depth)
        states, self.target_id = trainer.lessons.states, trainer.registry.get_meta(TARGET_ID)
        if isinstance(states, RecordStates):
            self.target_id = states.target.weights_hash()
            check_target(trainer.registry, self.target_id)

    def __call__(self, name: str, records: Sequence[Sequence[ReplayRecord]]) -> TriedExpert | None:
        """Try an expert `name` for these records, which are given by what was asked.

        None where too few of them can be learned from, or no step was finite.
        """
        usable = [[one for one in alike if self._is_usable(one)] for alike in records]
        learn, test = split([alike for alike in usable if alike])
        if len(test) < FEWEST:
            return None
        try:
            return self._tried(name, [*chain(*learn)], [*chain(*test)])
        except FloatingPointError:
            log.warning("The trial expert %r could not be trained: no step had a finite loss.", name)
            return None

    def _is_usable(self, record: ReplayRecord) -> bool:
        return len(record.topk_ids) > 1 and self.target_id in (None, record.target_id)

    def _tried(self, name: str, learn: list[ReplayRecord], test: list[ReplayRecord]) -> TriedExpert | None:
        trainer = self.trainer
        trainer.drawn = Drawn([replace(one, domain=name, weights={}) for one in learn], [], [])
        try:
            made = trainer.update(steps=STEPS)
            if made is None:
                return None
            [expert] = [one for one in made.candidates if one.expert == name]
            live = trainer.adapters.load_live(SHARED, trainer.student.base_hash)
            shared = live[1] if live else None
            before, after = (
                self.measure({SHARED: shared, name: one}, name, test, lambda: None) for one in (None, expert)
            )
        finally:
            trainer.forget(SHARED)
        verdict = compare(before, after)
        old, new = (float(expected_tokens(one.counts.sum(0).astype(float))) for one in (before, after))
        low, high = verdict.low, verdict.high
        assert low is not None, "there are records to measure with"
        assert high is not None
        return TriedExpert(len(learn), len(test), old, new, low, high)


def split(
    records: Sequence[list[ReplayRecord]],
) -> tuple[list[list[ReplayRecord]], list[list[ReplayRecord]]]:
    """Those to learn from, and those to measure with; what was asked alike stays together."""
    learn = [alike for i, alike in enumerate(records) if i % HELD_OUT_EVERY]
    return learn, [alike for i, alike in enumerate(records) if i % HELD_OUT_EVERY == 0]
