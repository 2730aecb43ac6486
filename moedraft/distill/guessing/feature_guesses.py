"""How many guesses of a feature drafter's adapters are accepted, by which updates are measured."""

from __future__ import annotations

import torch

from moedraft.distill.features.feature_batches import DraftVocabulary, FeatureBatch, taught_at
from moedraft.distill.features.feature_student import FeatureStudent
from moedraft.distill.guessing.sampled import accepted, at_temperature
from moedraft.distill.joint.plan import Guessed


@torch.no_grad()
def guessed(student: FeatureStudent, batch: FeatureBatch, depth: int, *, shared: bool = True) -> Guessed:
    """Drafts `depth` tokens from every place of the answers.

    In greedy answers each is the most likely one, and column j counts starts whose earlier guesses were all
    right. In sampled ones the tokens are drawn, and what is counted is how many of them are expected to be
    accepted, see `sampled`; of the later ones along the answer, as if it did not depend on which tokens were
    accepted before. The first token of an answer is never guessed.
    """
    alive = torch.ones(batch.answer_ids.shape, dtype=torch.float64, device=batch.lengths.device)
    counted = torch.zeros(len(batch.owners), depth, 2, dtype=torch.float64)
    chances = torch.zeros(len(batch.owners), 2, dtype=torch.float64)
    for step, hidden in enumerate(student.outputs(batch, depth, shared=shared), start=1):
        tried = (alive > 0) & taught_at(batch, step).rows
        hits, given = _accepted(student, batch, hidden, tried, step)
        before, alive = torch.where(tried, alive, 0.0), torch.zeros_like(alive)
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
    """For each place of `tried`: how likely its guess is accepted, and what `Guessed.chances` sums up.

    The first is 0 or 1 in greedy answers.

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
        sampled = temperatures[mine] > 0
        if bool(sampled.any()):
            drawn = accepted(
                part.logits[sampled], columns[sampled], known[mine][sampled], temperatures[mine][sampled]
            )
            right[sampled], chance[sampled] = drawn, drawn
        hits[mine], given[mine] = right, chance
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
