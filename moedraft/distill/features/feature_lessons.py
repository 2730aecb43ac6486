"""How a feature drafter learns from records and guesses them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from moedraft.core import ReplayRecord
from moedraft.distill.features.feature_batches import DraftVocabulary, FeatureBatch, collate
from moedraft.distill.features.feature_loss import loss_of
from moedraft.distill.features.feature_student import FeatureStudent
from moedraft.distill.features.record_states import States
from moedraft.distill.guessing.feature_guesses import guessed, guessed_from
from moedraft.distill.joint.plan import Guessed, JointPlan


class FeatureLessons:
    """See `Lessons`."""

    def __init__(self, student: FeatureStudent, states: States) -> None:
        self.student, self.states = student, states

    def learn(self, records: Sequence[ReplayRecord], owners: Sequence[str], plan: JointPlan) -> float:
        loss = self._loss(records, owners, plan)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    @torch.no_grad()
    def loss(self, records: Sequence[ReplayRecord], owners: Sequence[str], plan: JointPlan) -> float:
        return self._loss(records, owners, plan).item()

    @torch.no_grad()
    def guessed(
        self, records: Sequence[ReplayRecord], owners: Sequence[str], depth: int, max_tokens: int
    ) -> tuple[list[str], Guessed]:
        batch = self._batch(records, owners, max_tokens)
        with self.student.precision():
            return batch.owners, guessed(self.student, batch, depth)

    @torch.no_grad()
    def guessed_from(
        self, records: Sequence[ReplayRecord], lists: Mapping[str, Sequence[torch.Tensor]], max_tokens: int
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """See `guessing.feature_guesses.guessed_from`; each record's owner is its domain's expert."""
        batch = self._batch(records, [record.domain for record in records], max_tokens)
        with self.student.precision():
            yield from guessed_from(self.student, batch, lists)

    def _loss(self, records: Sequence[ReplayRecord], owners: Sequence[str], plan: JointPlan) -> torch.Tensor:
        batch = self._batch(records, owners, plan.max_tokens)
        with self.student.precision():
            return loss_of(
                self.student,
                batch,
                self._vocabulary(),
                steps=plan.unrolled,
                decay=plan.decay,
                kind=plan.kind,
                sampled=plan.sampled,
                emitted=plan.emitted,
                missed=plan.missed,
            )

    def _batch(self, records: Sequence[ReplayRecord], owners: Sequence[str], max_tokens: int) -> FeatureBatch:
        device = self.student.draft.fc.weight.device
        return collate(records, owners, self.states, self._vocabulary(), device, max_tokens)

    def _vocabulary(self) -> DraftVocabulary:
        return DraftVocabulary(self.student.vocabulary, self.student.vocab_size)
