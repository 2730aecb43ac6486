"""The loss of a joint update."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.functional import cross_entropy

from moedraft.distill.features.feature_batches import (
    OUTSIDE,
    DraftVocabulary,
    FeatureBatch,
    Taught,
    taught_at,
    within,
)
from moedraft.distill.features.feature_student import FeatureStudent, Guesses
from moedraft.distill.text.batches import taught_by
from moedraft.kernels import Kind, divergence


def loss_of(
    student: FeatureStudent,
    batch: FeatureBatch,
    vocabulary: DraftVocabulary,
    *,
    steps: int = 3,
    decay: float = 0.8,
    kind: Kind = "fkl",
    sampled: Kind | None = None,
    emitted: float = 0.0,
    missed: float = 1.0,
    shared: bool = True,
) -> torch.Tensor:
    """Divergence of the guesses from the target's distributions, nats; step j weighs `decay` ** (j − 1).

    `sampled` is the kind for answers that were sampled; None: the same as for greedy ones. `emitted` is the
    weight of a cross-entropy on the token that the target emitted, where it can be drafted: in greedy
    decoding only the most likely token is accepted. `missed` is the weight of rows whose most likely guess is
    not the target's.
    """
    total, weight = torch.zeros((), device=batch.states.device), 1.0
    for step, hidden in enumerate(student.outputs(batch, steps, shared=shared), start=1):
        taught = taught_at(batch, step)
        if not (sum(taught.counts) and weight):
            break
        parts = student.guesses(hidden[taught.rows], batch.owners, taught.counts)
        divisor = len(taught.tokens) / weight
        kinds, weights = (kind, sampled or kind), (emitted, missed)
        total = total + sum(_loss(part, taught, vocabulary, kinds, weights, divisor) for part in parts)
        weight *= decay
    return total


def _loss(
    part: Guesses,
    taught: Taught,
    vocabulary: DraftVocabulary,
    kinds: tuple[Kind, Kind],
    weights: tuple[float, float],
    divisor: float,
) -> torch.Tensor:
    """The sum over the rows of one expert, divided by `divisor`.

    kinds: for greedy answers and for sampled ones. weights: `emitted` and `missed`.
    """
    emitted, missed = weights
    ids, logprobs = taught.topk_ids[part.rows], taught.topk_logprobs[part.rows]
    tokens, logits = vocabulary(taught.tokens[part.rows]), part.logits.float()
    if part.numbers is not None:
        own = DraftVocabulary(part.numbers, len(vocabulary))
        tokens, (ids, logprobs) = own(tokens), within(own(ids), logprobs)
    loss = torch.zeros((), device=logits.device)
    for chosen, kind in _by_kind(taught.temperatures[part.rows] > 0, kinds):
        some, teacher = logits[chosen], (ids[chosen], taught_by(logprobs[chosen], kind))
        if missed == 1:
            loss = loss + divergence(some, teacher_topk=teacher, kind=kind, reduction="sum", divisor=divisor)
        else:
            rows = divergence(some, teacher_topk=teacher, kind=kind, reduction="none")
            rows = torch.where(some.argmax(-1) == teacher[0][:, 0], rows, missed * rows)
            loss = loss + rows.sum() / divisor
    if emitted:
        hard = cross_entropy(logits, tokens, ignore_index=OUTSIDE, reduction="sum") / divisor
        loss = (1 - emitted) * loss + emitted * hard
    return loss


def _by_kind(drawn: torch.Tensor, kinds: tuple[Kind, Kind]) -> Iterable[tuple[slice | torch.Tensor, Kind]]:
    """Which rows learn by which divergence. drawn: bool, whether a row's answer was sampled."""
    greedy, sampled = kinds
    if greedy == sampled or not bool(drawn.any()):
        return [(slice(None), greedy)]
    if bool(drawn.all()):
        return [(slice(None), sampled)]
    return [(~drawn, greedy), (drawn, sampled)]
