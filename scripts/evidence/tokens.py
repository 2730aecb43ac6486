"""Which tokens are guessed right: precision and recall of the most frequent ones, before and after learning.

As in the paper: of all places where the target says a token, at how many it was guessed (recall), and of all
places where it was guessed, at how many the target says it (precision). First guesses of a feature drafter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from moedraft.core import ReplayRecord
from moedraft.distill.features.feature_batches import DraftVocabulary, collate, taught_at
from moedraft.distill.features.feature_lessons import FeatureLessons
from moedraft.distill.joint.joint_trainer import JointTrainer
from moedraft.distill.measuring.measures import Serving, instead
from moedraft.feature.text_tokens import GrowingText

KEPT = 100  # tokens, the most frequent ones in the target's answers
Pair = tuple[int, int]  # what the target says, and what was guessed
Counts = list[list[int]]  # of each token kept: its id, how often it was said, guessed, and both


def list_of(serving: Serving, owner: str, general: torch.Tensor) -> torch.Tensor:
    """The tokens that are drafted: the expert's list, else that of the shared adapter, else `general`."""
    who = next((one for one in (serving.get(owner), *serving.values()) if one), None)
    return general if who is None or who.vocabulary is None else who.vocabulary


@torch.no_grad()
def first_guesses(
    trainer: JointTrainer,
    serving: Serving,
    owner: str,
    records: Sequence[ReplayRecord],
    vocabulary: torch.Tensor,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Read these answers, and guess each of their tokens but the first from this list and the text before it.

    Yields, for one answer after the other, what the target says [N], the tokens that may be guessed [V], and
    the logits [N, V] of these.
    """
    student, lessons = trainer.student, trainer.lessons
    assert isinstance(lessons, FeatureLessons)
    device = lessons.student.draft.fc.weight.device
    with instead(student, serving):
        student.use_lists({owner: vocabulary})
        known = DraftVocabulary(student.vocabulary, student.vocab_size)
        for record in records:
            batch = collate([record], [owner], lessons.states, known, device, trainer.plan.max_tokens)
            with lessons.student.precision():
                hidden, taught = next(iter(lessons.student.outputs(batch, 1))), taught_at(batch, 1)
                [part] = lessons.student.guesses(hidden[taught.rows], [owner], taught.counts)
                ids = student.vocabulary if part.numbers is None else student.vocabulary[part.numbers]
                whole = GrowingText(lessons.student.draft, record.token_ids, record.num_prompt_tokens)
                text = whole.beside(ids)
                before = record.num_prompt_tokens + taught.rows.nonzero()[:, 1] + 1
                normed = lessons.student.draft.normed(hidden[taught.rows])
                yield taught.tokens, text.names, text.add(part.logits, normed, before)


def pairs(
    trainer: JointTrainer,
    serving: Serving,
    owner: str,
    records: Sequence[ReplayRecord],
    general: torch.Tensor,
) -> list[Pair]:
    """What is said and what is guessed at each token of these answers but the first.

    general: the tokens that are drafted where no adapter has a list of its own.
    """
    found: list[Pair] = []
    for said, ids, logits in first_guesses(
        trainer, serving, owner, records, list_of(serving, owner, general)
    ):
        found += zip(said.tolist(), ids[logits.argmax(-1)].tolist(), strict=True)
    return found


def counted(found: Sequence[Pair]) -> Counts:
    """The KEPT most frequent tokens, and in a last row, with the id −1, all others together."""
    said, guessed = Counter(a for a, _ in found), Counter(b for _, b in found)
    both = Counter(a for a, b in found if a == b)
    top = [token for token, _ in said.most_common(KEPT)]
    rows = [[token, said[token], guessed[token], both[token]] for token in top]
    rest = [sum(of.values()) - sum(of[token] for token in top) for of in (said, guessed, both)]
    return [*rows, [-1, *rest]]


def rates(rows: Counts) -> dict[str, dict[str, float]]:
    """By how often tokens are said: their share of all that is said, precision and recall."""
    frequent = rows[:-1]
    parts = {"the 10 most frequent": frequent[:10], "the next 90": frequent[10:], "all others": rows[-1:]}
    return {what: _rates(part, sum(row[1] for row in rows)) for what, part in parts.items()}


def _rates(rows: Counts, every: int) -> dict[str, float]:
    said, guessed, both = (sum(row[i] for row in rows) for i in (1, 2, 3))
    precision, recall = both / max(guessed, 1), both / max(said, 1)
    return {"share": said / max(every, 1), "precision": precision, "recall": recall}
