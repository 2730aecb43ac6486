"""Measures adapters as they would serve, on held-out records: one class for each way to learn.

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
from moedraft.distill.guessing.text_guesses import guessed_rows
from moedraft.distill.joint.joint_trainer import JointTrainer
from moedraft.distill.lora.adapters import JointAdapters
from moedraft.distill.measuring.figures import FEW, Measured
from moedraft.distill.single.trainer import Trainer
from moedraft.distill.text.batches import collate as collate_text
from moedraft.distill.text.batches import grouped
from moedraft.storage.versions.candidate import Weights

Serving = Mapping[str, Weights | None]  # by name: the shared adapter and an expert; None: untrained


class Measure(Protocol):
    """Measures records of one domain."""

    def __call__(
        self, serving: Serving, domain: str, records: Sequence[ReplayRecord], on_batch: Callable[[], None]
    ) -> Measured:
        """Hits and tries of each record, in their order, and the loss where there are few of them."""


class JointMeasure:
    """Where adapters learn jointly: drafts as the answers were made, by base + shared adapter + own one."""

    def __init__(self, trainer: JointTrainer, depth: int) -> None:
        """depth: tokens drafted in a step. Call this before the trainer has learned anything."""
        self.trainer, self.depth = trainer, depth
        self.general = trainer.student.vocabulary  # drafted where an adapter has no list of its own

    @torch.no_grad()
    def __call__(
        self, serving: Serving, domain: str, records: Sequence[ReplayRecord], on_batch: Callable[[], None]
    ) -> Measured:
        student, lessons, plan = self.trainer.student, self.trainer.lessons, self.trainer.plan
        who = serving.get(domain) or serving.get(SHARED)
        own = self.general if who is None or who.vocabulary is None else who.vocabulary
        counted, losses = [np.zeros((0, self.depth, 2))], 0.0
        chances = [np.zeros((0, 2))]
        if lists := [one.vocabulary for one in serving.values() if one and one.vocabulary is not None]:
            self.trainer.widen(lists)  # after a start the student drafts no more than the base
        lessons.states.on_forward = on_batch
        with instead(student, serving):
            student.use_lists({domain: own})
            for first in range(0, len(records), plan.rows):
                chosen = records[first : first + plan.rows]
                owners = [domain] * len(chosen)
                _, found = lessons.guessed(chosen, owners, self.depth, plan.max_tokens)
                counted.append(found.counts.numpy())
                chances.append(found.chances.numpy())
                losses += lessons.loss(chosen, owners, plan) * len(chosen) if len(records) < FEW else 0.0
                on_batch()
        loss = losses / len(records) if 0 < len(records) < FEW else None
        return Measured(np.concatenate(counted), loss, np.concatenate(chances))


class TextMeasure:
    """Where an independent draft model's adapters learn in turns: runs of tokens that are guessed right.

    Draft and target have the same likeliest token then, and a draft of greedy decoding is accepted for as
    long as such a run goes on. Of sampled answers it is how likely drawn tokens are accepted.
    """

    def __init__(self, trainer: Trainer, depth: int) -> None:
        """depth: tokens drafted in a step."""
        self.trainer, self.depth = trainer, depth

    @torch.no_grad()
    def __call__(
        self, serving: Serving, domain: str, records: Sequence[ReplayRecord], on_batch: Callable[[], None]
    ) -> Measured:
        trainer, draft = self.trainer, self.trainer.student.draft
        counted, losses = [np.zeros((0, self.depth, 2))], 0.0
        chances = [np.zeros((0, 2))]
        with trainer.student.standing([one for one in serving.values() if one is not None]):
            for chosen in grouped(records, trainer.tokens_per_step):
                batch = collate_text(chosen, draft.device, trainer.tokens_per_step, draft.vocab_size)
                for counts, chance in guessed_rows([trainer.student.logits(batch)], batch, self.depth):
                    counted.append(counts[None])
                    chances.append(np.array([chance]))
                losses += trainer.loss(batch).item() * len(chosen) if len(records) < FEW else 0.0
                on_batch()
        loss = losses / len(records) if 0 < len(records) < FEW else None
        return Measured(np.concatenate(counted), loss, np.concatenate(chances))


@contextmanager
def instead(student: JointAdapters, serving: Serving) -> Iterator[None]:
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
