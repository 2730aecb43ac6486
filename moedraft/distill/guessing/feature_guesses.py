"""How many guesses of a feature drafter's adapters are accepted, by which updates are measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from moedraft.distill.features.feature_batches import DraftVocabulary, FeatureBatch, taught_at
from moedraft.distill.features.feature_student import FeatureStudent
from moedraft.distill.guessing.sampled import accepted, at_temperature
from moedraft.distill.joint.plan import Guessed
from moedraft.feature.text_tokens import GrowingText, ListAndText


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
    rows, at = tried.nonzero(as_tuple=True)
    at = at + step  # of what is guessed there
    hits = torch.zeros(len(rows), dtype=torch.float64, device=hidden.device)
    given, states = torch.zeros_like(hits), student.draft.normed(hidden[tried])
    for part in student.guesses(hidden[tried], batch.owners, tried.sum(1).tolist()):
        vocabulary = student.draft.vocabulary
        names = vocabulary if part.numbers is None else vocabulary[part.numbers]
        for b in sorted(set(rows[part.rows].tolist())):
            mine = (rows[part.rows] == b).nonzero()[:, 0]  # of this part; all places of a row are in one
            chosen, before = mine + part.rows.start, batch.prompts[b] - 1
            text = _text_of(student, batch, b).beside(names)
            logits = text.add(part.logits[mine], states[chosen], before + at[chosen])
            hits[chosen], given[chosen] = _of_row(batch, b, at[chosen], logits, text)
    return hits, given


def _text_of(student: FeatureStudent, batch: FeatureBatch, b: int) -> GrowingText:
    """A row's text from its second token on, as far as the batch holds it."""
    context, before = batch.context_ids[b], int(batch.prompts[b]) - 1
    text = [*context[len(context) - before :].tolist(), *batch.answer_ids[b].tolist()]
    return GrowingText(student.draft, text, before)


def _of_row(
    batch: FeatureBatch, b: int, at: torch.Tensor, logits: torch.Tensor, text: ListAndText
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_accepted`, for some places of row b's answer. logits [T, v] of the tokens `text.names`."""
    tokens, temperature = batch.answer_ids[b, at], batch.temperatures[b].expand(len(at))
    if temperature[0] > 0:
        columns = text.columns(batch.known_ids[b, at])
        likely = at_temperature(batch.known[b, at], temperature)
        drawn = accepted(logits, columns, likely, temperature)
        return drawn, drawn
    right = (text.names[logits.argmax(-1)] == tokens).double()
    column = text.columns(tokens[:, None])
    found = logits.gather(1, column.clamp(min=0))[:, 0].float() - logits.float().logsumexp(-1)
    return right, torch.where(column[:, 0] >= 0, found.exp(), 0.0).double()


@torch.no_grad()
def guessed_from(
    student: FeatureStudent, batch: FeatureBatch, lists: Mapping[str, Sequence[torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """For each row: its owner and, float64 [n + 1], how many first guesses are accepted, and their number.

    lists: by owner, n lists of tokens, int64 and ascending, from which it guesses one after the other.
    """
    hidden, tried = next(iter(student.outputs(batch, 1))), taught_at(batch, 1).rows
    numbers = DraftVocabulary(student.vocabulary, student.vocab_size)
    for b, owner in enumerate(batch.owners):
        states, at = hidden[b][tried[b]], tried[b].nonzero()[:, 0] + 1
        logits, normed = student.logits(states, [owner], [len(states)]), student.draft.normed(states)
        found, whole = torch.zeros(len(lists[owner]) + 1, dtype=torch.float64), _text_of(student, batch, b)
        for i, names in enumerate(lists[owner]):
            names = names.to(states.device)
            text = whole.beside(names)
            known = text.add(logits[:, numbers(names)], normed, batch.prompts[b] - 1 + at)
            found[i] = _of_row(batch, b, at, known, text)[0].sum()
        found[-1] = len(states)
        yield owner, found


def acceptance(
    student: FeatureStudent, batch: FeatureBatch, depth: int, *, shared: bool = True
) -> torch.Tensor:
    """The counts of `guessed`, float64 [B, depth, 2]."""
    return guessed(student, batch, depth, shared=shared).counts
