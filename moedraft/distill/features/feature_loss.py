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
from moedraft.distill.features.sampled import accepted, at_temperature
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
    """Drafts `depth` tokens from every place of the answers.

    In greedy answers each is the most likely one, and column j counts starts whose earlier guesses were all
    right. In sampled ones the tokens are drawn, and what is counted is how many of them are expected to be
    accepted, see `sampled`. The first token of an answer is never guessed.
    """
    alive = torch.ones(batch.answer_ids.shape, dtype=torch.float64, device=batch.lengths.device)
    counted = torch.zeros(len(batch.owners), depth, 2, dtype=torch.float64)
    chances = torch.zeros(len(batch.owners), 2, dtype=torch.float64)
    for step, hidden in enumerate(student.outputs(batch, depth, shared=shared), start=1):
        tried = (alive > 0) & taught_at(batch, step).rows
        hits, given = _accepted(student, batch, hidden, tried, step)
        before, alive = alive * tried, torch.zeros_like(alive)
        alive[tried] = before[tried] * hits
        counted[:, step - 1] = torch.stack([alive.sum(1), before.sum(1)], dim=1).cpu()
        if step == 1:
            each = torch.zeros_like(alive)
            each[tried] = given
            chances = torch.stack([each.sum(1), tried.sum(1).double()], dim=1).cpu()
    return Guessed(counted, chances)


def _accepted(
    student: FeatureStudent, batch: FeatureBatch, hidden: torch.Tensor, tried: torch.Tensor, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """By place of `tried`, whether its guess is accepted, or how likely that is; and `Guessed.chances`.

    hidden: [B, A, H] of this step. tried: bool [B, A]; N places. Two results [N], float64.
    """
    vocabulary = student.draft.vocabulary
    rows, places = tried.nonzero(as_tuple=True)
    places = places + step  # of what is guessed there
    tokens, temperatures = batch.answer_ids[rows, places], batch.temperatures[rows]
    ids, known = batch.topk_ids[rows, places], at_temperature(batch.known[rows, places], temperatures)
    hits = torch.zeros(len(rows), dtype=torch.float64, device=hidden.device)
    given = torch.zeros_like(hits)
    for part in student.guesses(hidden[tried], batch.owners, tried.sum(1).tolist()):
        mine, columns = part.rows, ids[part.rows]
        own = vocabulary if part.numbers is None else vocabulary[part.numbers]
        if part.numbers is not None:
            columns = DraftVocabulary(part.numbers, len(vocabulary))(columns)
        right = (own[part.logits.argmax(-1)] == tokens[mine]).double()
        chance = _chance(part.logits, own, tokens[mine]).double()
        drawn = accepted(part.logits, columns, known[mine], temperatures[mine])
        hits[mine] = torch.where(temperatures[mine] > 0, drawn, right)
        given[mine] = torch.where(temperatures[mine] > 0, drawn, chance)
    return hits, given


def _chance(logits: torch.Tensor, ids: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The probability [N] that logits [N, V] of the tokens `ids`, ascending, give to `tokens`."""
    columns = torch.searchsorted(ids, tokens.to(ids.dtype)).clamp(max=len(ids) - 1)
    found = logits.gather(1, columns[:, None])[:, 0].float() - logits.float().logsumexp(-1)
    return torch.where(ids[columns] == tokens, found.exp(), 0.0)


def acceptance(
    student: FeatureStudent, batch: FeatureBatch, depth: int, *, shared: bool = True
) -> torch.Tensor:
    """The counts of `guessed`, float64 [B, depth, 2]."""
    return guessed(student, batch, depth, shared=shared).counts
