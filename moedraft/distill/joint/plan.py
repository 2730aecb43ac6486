"""How joint updates learn, and what they need of the kind of draft base that learns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from moedraft.config import DistillKind
from moedraft.core import ReplayRecord
from moedraft.distill.features.record_states import States
from moedraft.distill.lora.adapters import JointAdapters
from moedraft.distill.lora.ranks import MOST, Kept
from moedraft.kernels import Kind


@dataclass(frozen=True)
class JointPlan:
    """How joint updates learn."""

    steps: int = 16
    rows: int = 12  # records of one step
    max_tokens: int = 1024  # that an update reads of one record
    learning_rate: float = 4e-3
    unrolled: int = 2  # steps of a feature drafter
    decay: float = 0.8  # factor of the loss at each further step
    replayed: float = 0.5  # share of a batch that is replay of all domains
    emitted: float = 0.0  # weight of the emitted token's own loss, of a feature drafter
    missed: float = 1.0  # weight of places where a feature drafter guesses wrong now
    kind: Kind = "fkl"
    sampled: Kind | None = None  # of a feature drafter, for answers that were sampled; None: as `kind`
    kept: Kept = MOST  # of an expert that is published
    # Scaling of published adapters; what learns has a scaling of 1 (docs/experiments.md, "How strong adapters
    # are published").
    strength: float = 0.85


def kinds_for(setting: DistillKind) -> tuple[Kind, Kind]:
    """What greedy and sampled answers are learned by (docs/experiments.md, "What sampled answers teach")."""
    return ("fkl", "jsd") if setting == "auto" else (setting, setting)


@dataclass(frozen=True)
class Guessed:
    """How many guesses were right in each row of a batch.

    Where an answer was sampled these are expected numbers: of drafted tokens that would be accepted, and of
    those that would be drafted; its chances are then those of the first guesses to be accepted.
    """

    counts: torch.Tensor  # float64 [B, depth, 2]: guesses that are accepted, and all of them
    chances: torch.Tensor  # float64 [B, 2]: the probability that first guesses gave it, summed; how many


class Lessons(Protocol):
    """How one kind of draft base learns from records, and what it guesses of their answers.

    `owners` are the records' experts, one for each.
    """

    @property
    def student(self) -> JointAdapters:
        """The draft base that learns."""

    @property
    def states(self) -> States:
        """Where it has the target's hidden states from, if it reads any."""

    def learn(self, records: Sequence[ReplayRecord], owners: Sequence[str], plan: JointPlan) -> float:
        """Add the gradients of one step, of the owners' adapters and the shared one; the loss, nats."""

    def loss(self, records: Sequence[ReplayRecord], owners: Sequence[str], plan: JointPlan) -> float:
        """The loss alone."""

    def guessed(
        self, records: Sequence[ReplayRecord], owners: Sequence[str], depth: int, max_tokens: int
    ) -> tuple[list[str], Guessed]:
        """Drafts of `depth` tokens from every place: the owners in ascending order, and their figures.

        Records of one owner stay in their order.
        """
