"""The loss of a joint update, and the share of right guesses that the update is measured by."""

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
from moedraft.distill.joint.plan import Guessed
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


@torch.no_grad()
def guessed(student: FeatureStudent, batch: FeatureBatch, depth: int, *, shared: bool = True) -> Guessed:
    """Drafts `depth` tokens from every place of the answers, each time the most likely one.

    Column j counts starts whose earlier guesses were all right. The first token of an answer is never
    guessed. The answers should be the target's own greedy ones.
    """
    vocabulary = student.draft.vocabulary
    alive = torch.ones_like(batch.answer_ids, dtype=torch.bool)
    counted = torch.zeros(len(batch.owners), depth, 2, dtype=torch.int64)
    chances = torch.zeros(len(batch.owners), 2, dtype=torch.float64)
    for step, hidden in enumerate(student.outputs(batch, depth, shared=shared), start=1):
        taught = taught_at(batch, step)
        tried = alive & taught.rows
        right = torch.full_like(batch.answer_ids, -1)
        right[taught.rows] = taught.tokens
        best = torch.full((int(tried.sum()),), -2, device=vocabulary.device)
        chance = torch.zeros(len(best), dtype=torch.float64, device=vocabulary.device)
        for part in student.guesses(hidden[tried], batch.owners, tried.sum(1).tolist()):
            ids = vocabulary if part.numbers is None else vocabulary[part.numbers]
            best[part.rows] = ids[part.logits.argmax(-1)]
            if step == 1:
                chance[part.rows] = _chance(part.logits, ids, right[tried][part.rows]).double()
        guesses = torch.full_like(batch.answer_ids, -2)
        guesses[tried] = best
        alive = tried & (guesses == right)
        counted[:, step - 1] = torch.stack([alive.sum(1), tried.sum(1)], dim=1).cpu()
        if step == 1:
            rows = torch.zeros(tried.shape, dtype=torch.float64, device=tried.device)
            rows[tried] = chance
            chances = torch.stack([rows.sum(1), tried.sum(1).double()], dim=1).cpu()
    return Guessed(counted, chances)


def _chance(logits: torch.Tensor, ids: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The probability [N] that logits [N, V] of the tokens `ids`, ascending, give to `tokens`."""
    columns = torch.searchsorted(ids, tokens.to(ids.dtype)).clamp(max=len(ids) - 1)
    found = logits.gather(1, columns[:, None])[:, 0].float() - logits.float().logsumexp(-1)
    return torch.where(ids[columns] == tokens, found.exp(), 0.0)


def acceptance(
    student: FeatureStudent, batch: FeatureBatch, depth: int, *, shared: bool = True
) -> torch.Tensor:
    """The counts of `guessed`, int64 [B, depth, 2]."""
    return guessed(student, batch, depth, shared=shared).counts
