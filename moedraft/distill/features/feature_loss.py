"""The loss of a joint update."""

from __future__ import annotations

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
    emitted: float = 0.0,
    missed: float = 1.0,
    shared: bool = True,
) -> torch.Tensor:
    """Divergence of the guesses from the target's distributions, nats; step j weighs `decay` ** (j − 1).

    `emitted` is the weight of a cross-entropy on the token that the target emitted, where it can be drafted:
    in greedy decoding only the most likely token is accepted. `missed` is the weight of rows whose most
    likely guess is not the target's.
    """
    total, weight = torch.zeros((), device=batch.states.device), 1.0
    for step, hidden in enumerate(student.outputs(batch, steps, shared=shared), start=1):
        taught = taught_at(batch, step)
        if not (sum(taught.counts) and weight):
            break
        parts = student.guesses(hidden[taught.rows], batch.owners, taught.counts)
        divisor = len(taught.tokens) / weight
        total = total + sum(
            _loss(part, taught, vocabulary, kind, (emitted, missed), divisor) for part in parts
        )
        weight *= decay
    return total


def _loss(
    part: Guesses,
    taught: Taught,
    vocabulary: DraftVocabulary,
    kind: Kind,
    weights: tuple[float, float],
    divisor: float,
) -> torch.Tensor:
    """The sum over the rows of one expert, divided by `divisor`. weights: `emitted` and `missed`."""
    emitted, missed = weights
    ids, logprobs = taught.topk_ids[part.rows], taught.topk_logprobs[part.rows]
    tokens, logits = vocabulary(taught.tokens[part.rows]), part.logits.float()
    if part.numbers is not None:
        own = DraftVocabulary(part.numbers, len(vocabulary))
        tokens, (ids, logprobs) = own(tokens), within(own(ids), logprobs)
    teacher = ids, taught_by(logprobs, kind)
    if missed == 1:
        loss = divergence(logits, teacher_topk=teacher, kind=kind, reduction="sum", divisor=divisor)
    else:
        rows = divergence(logits, teacher_topk=teacher, kind=kind, reduction="none")
        loss = torch.where(logits.argmax(-1) == ids[:, 0], rows, missed * rows).sum() / divisor
    if emitted:
        hard = cross_entropy(logits, tokens, ignore_index=OUTSIDE, reduction="sum") / divisor
        loss = (1 - emitted) * loss + emitted * hard
    return loss
