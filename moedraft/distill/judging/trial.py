"""What an expert of its own would bring to a group of records: one is fitted, measured and thrown away.

The shared adapter stays as it is, so the gain is the expert's alone. Nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from moedraft.core import SHARED, ReplayRecord
from moedraft.distill.joint.joint_trainer import Drawn, JointTrainer
from moedraft.distill.judging.gate import compare, expected_tokens
from moedraft.distill.judging.measures import JointMeasure

STEPS = 24  # of the optimiser
HELD_OUT_EVERY = 4  # of the prompts, one is measured and not learned from
FEWEST = 3  # prompts that must be left to measure with


@dataclass(frozen=True)
class TriedExpert:
    """Tokens per target step on held-out records, drafted by the shared adapter and by a trial expert."""

    learned: int  # records
    held_out: int
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
        """depth: tokens drafted in a step."""
        self.trainer, self.measure = trainer, JointMeasure(trainer, depth)

    def __call__(self, name: str, records: Sequence[ReplayRecord]) -> TriedExpert | None:
        """Try an expert `name` for these records; None where they are too few. Raises FloatingPointError."""
        learn, test = split([one for one in records if len(one.topk_ids) > 1])
        if len({_prompt(one) for one in test}) < FEWEST:
            return None
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


def split(records: Sequence[ReplayRecord]) -> tuple[list[ReplayRecord], list[ReplayRecord]]:
    """Those to learn from, and those to measure with. Records of one prompt stay together."""
    order = {prompt: i for i, prompt in enumerate(dict.fromkeys(map(_prompt, records)))}
    held_out = [order[_prompt(one)] % HELD_OUT_EVERY == 0 for one in records]
    pairs = list(zip(records, held_out, strict=True))
    return [one for one, out in pairs if not out], [one for one, out in pairs if out]


def _prompt(record: ReplayRecord) -> tuple[int, ...]:
    return tuple(record.token_ids[: record.num_prompt_tokens])
