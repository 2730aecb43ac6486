"""What a joint update lowers, and the share of guesses that it is measured by."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

from moedraft.distill.feature_batches import OUTSIDE, DraftVocabulary, FeatureBatch, taught_at
from moedraft.distill.joint_student import JointStudent
from moedraft.kernels import Kind, divergence


def loss_of(
    student: JointStudent,
    batch: FeatureBatch,
    vocabulary: DraftVocabulary,
    *,
    steps: int = 3,
    decay: float = 0.8,
    kind: Kind = "fkl",
    emitted: float = 0.0,
    shared: bool = True,
) -> torch.Tensor:
    """Divergence of the guesses from the target's distributions, nats; step j weighs `decay` ** (j − 1).

    `emitted` is the weight of a cross-entropy on the token that the target went on with, where it can be
    drafted: a greedy answer is accepted by the most likely token alone.
    """
    total, weight = torch.zeros((), device=batch.states.device), 1.0
    for step, hidden in enumerate(student.outputs(batch, steps, shared=shared), start=1):
        taught = taught_at(batch, step)
        if not sum(taught.counts):
            break
        logits = student.logits(hidden[taught.rows], batch.owners, taught.counts).float()
        loss = divergence(logits, teacher_topk=(taught.topk_ids, taught.topk_logprobs), kind=kind)
        if emitted:
            hard = cross_entropy(logits, vocabulary(taught.tokens), ignore_index=OUTSIDE, reduction="sum")
            loss = (1 - emitted) * loss + emitted * hard / len(logits)
        total = total + weight * loss
        weight *= decay
    return total


@torch.no_grad()
def acceptance(
    student: JointStudent,
    batch: FeatureBatch,
    depth: int,
    *,
    shared: bool = True,
    only: torch.Tensor | None = None,
) -> torch.Tensor:
    """How often the most likely guess is the target's next token, int64 [B, depth, 2]: hits and tries.

    Column j counts starts whose earlier guesses were all right. The first token of an answer is never
    guessed. The answers should be the target's own greedy ones. only: tokens that may be guessed, int64 and
    ascending, where these are fewer than the draft vocabulary.
    """
    vocabulary = student.draft.vocabulary
    barred = None if only is None else ~torch.isin(vocabulary, only)
    alive = torch.ones_like(batch.answer_ids, dtype=torch.bool)
    counted = torch.zeros(len(batch.owners), depth, 2, dtype=torch.int64)
    for step, hidden in enumerate(student.outputs(batch, depth, shared=shared), start=1):
        taught = taught_at(batch, step)
        tried = alive & taught.rows
        logits = student.logits(hidden[tried], batch.owners, tried.sum(1).tolist())
        if barred is not None:
            logits = logits.masked_fill(barred, -torch.inf)
        right = torch.full_like(batch.answer_ids, -1)
        right[taught.rows] = taught.tokens
        guesses = torch.full_like(batch.answer_ids, -2)
        guesses[tried] = vocabulary[logits.argmax(-1)]
        alive = tried & (guesses == right)
        counted[:, step - 1] = torch.stack([alive.sum(1), tried.sum(1)], dim=1).cpu()
    return counted
