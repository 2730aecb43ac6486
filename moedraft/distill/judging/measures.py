"""Measures adapters as they would serve, on held-out records: one class for each kind of draft base.

Stored or exported weights are measured. They take the place of the weights that learn only for so long: the
trainer's own are not changed, whether or not they were published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch

from moedraft.core import SHARED, ReplayRecord
from moedraft.distill.joint.feature_batches import DraftVocabulary, FeatureBatch, collate
from moedraft.distill.joint.joint_loss import guessed, loss_of
from moedraft.distill.joint.joint_student import JointStudent
from moedraft.distill.joint.joint_trainer import JointTrainer
from moedraft.distill.judging.gate import FEW, Counts, Measured
from moedraft.distill.single.batches import collate as collate_text
from moedraft.distill.single.batches import grouped
from moedraft.distill.single.trainer import Trainer
from moedraft.storage.candidate import Weights

Serving = Mapping[str, Weights | None]  # by name: the shared adapter and an expert; None: untrained


class Measure(Protocol):
    """Measures records of one domain."""

    def __call__(
        self, serving: Serving, domain: str, records: Sequence[ReplayRecord], on_batch: Callable[[], None]
    ) -> Measured:
        """Hits and tries of each record, in their order, and the loss where there are few of them."""


class JointMeasure:
    """For feature drafters: drafts as in greedy decoding, by base + shared adapter + the domain's expert."""

    def __init__(self, trainer: JointTrainer, depth: int) -> None:
        """depth: tokens drafted in a step. Call this before the trainer has learned anything."""
        self.trainer, self.depth = trainer, depth
        self.general = trainer.student.draft.vocabulary  # drafted where an adapter has no list of its own

    @torch.no_grad()
    def __call__(
        self, serving: Serving, domain: str, records: Sequence[ReplayRecord], on_batch: Callable[[], None]
    ) -> Measured:
        student, rows = self.trainer.student, self.trainer.plan.rows
        who = serving.get(domain) or serving.get(SHARED)
        own = self.general if who is None or who.vocabulary is None else who.vocabulary
        counted, losses = [np.zeros((0, self.depth, 2), np.int64)], 0.0
        chances = [np.zeros((0, 2))]
        with instead(student, serving), student.precision():
            student.use_lists({domain: own})
            for first in range(0, len(records), rows):
                batch = self._batch(domain, records[first : first + rows])
                found = guessed(student, batch, self.depth)
                counted.append(found.counts.numpy())
                chances.append(found.chances.numpy())
                losses += self._loss(batch) * len(batch.owners) if len(records) < FEW else 0.0
                on_batch()
        loss = losses / len(records) if 0 < len(records) < FEW else None
        return Measured(np.concatenate(counted), loss, np.concatenate(chances))

    def _batch(self, domain: str, records: Sequence[ReplayRecord]) -> FeatureBatch:
        trainer, device = self.trainer, self.trainer.student.draft.fc.weight.device
        owners = [domain] * len(records)
        return collate(records, owners, trainer.states, self._vocabulary(), device, trainer.plan.max_tokens)

    def _loss(self, batch: FeatureBatch) -> float:
        plan = self.trainer.plan
        weights = {"steps": plan.unrolled, "decay": plan.decay, "emitted": plan.emitted}
        loss = loss_of(self.trainer.student, batch, self._vocabulary(), kind=plan.kind, **weights)  # type: ignore[arg-type]
        return loss.item()

    def _vocabulary(self) -> DraftVocabulary:
        draft = self.trainer.student.draft
        return DraftVocabulary(draft.vocabulary, draft.config.vocab_size)


class TextMeasure:
    """For independent draft models: runs of tokens for which draft and target have the same likeliest token.

    A draft of greedy decoding is accepted for as long as such a run goes on.
    """

    def __init__(self, trainer: Trainer, depth: int) -> None:
        """depth: tokens drafted in a step."""
        self.trainer, self.depth = trainer, depth

    @torch.no_grad()
    def __call__(
        self, serving: Serving, domain: str, records: Sequence[ReplayRecord], on_batch: Callable[[], None]
    ) -> Measured:
        trainer, draft = self.trainer, self.trainer.student.draft
        counted, losses = [np.zeros((0, self.depth, 2), np.int64)], 0.0
        chances = [np.zeros((0, 2))]
        with trainer.student.standing([one for one in serving.values() if one is not None]):
            for chosen in grouped(records, trainer.tokens_per_step):
                batch = collate_text(chosen, draft.device, trainer.tokens_per_step, draft.vocab_size)
                logits, best = trainer.student.logits(batch), batch.topk_ids[:, 0]
                lengths = batch.mask.sum(1).tolist()
                rows = torch.split(logits.argmax(-1) == best, lengths)
                counted += [runs(row.cpu().numpy(), self.depth)[None] for row in rows]
                given = (logits.gather(1, best[:, None])[:, 0].float() - logits.float().logsumexp(-1)).exp()
                sums = [(float(row.sum()), len(row)) for row in torch.split(given, lengths)]
                chances.append(np.array(sums).reshape(-1, 2))
                losses += trainer.loss(batch).item() * len(chosen) if len(records) < FEW else 0.0
                on_batch()
        loss = losses / len(records) if 0 < len(records) < FEW else None
        return Measured(np.concatenate(counted), loss, np.concatenate(chances))


def runs(right: np.ndarray[tuple[int], np.dtype[np.bool_]], depth: int) -> Counts:
    """bool [tokens], which are guessed right → hits and tries [depth, 2] of the drafts from every token."""
    counts = np.zeros((depth, 2), np.int64)
    alive = np.ones(len(right), bool)
    for step in range(min(depth, len(right))):
        tried = alive[: len(right) - step]
        alive = tried & right[step:]
        counts[step] = alive.sum(), tried.sum()
    return counts


@contextmanager
def instead(student: JointStudent, serving: Serving) -> Iterator[None]:
    """A context in which these adapters replace the student's own."""
    own = {name: {module: layer.take(name) for module, layer in student.layers.items()} for name in serving}
    known, lists = student.names & serving.keys(), student.lists
    student.names -= known
    try:
        for name, weights in serving.items():
            if weights is not None:
                student.load(name, 0, weights.config, weights.tensors, weights.vocabulary)
        yield
    finally:
        for name, parts in own.items():
            student.remove(name)
            for module, part in parts.items():
                if part is not None:
                    student.layers[module].put(name, part)
        student.names |= known
        student.lists = lists
