"""How an independent draft model learns jointly from records and guesses them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from moedraft.core import ReplayRecord
from moedraft.distill.joint.plan import Guessed, JointPlan
from moedraft.distill.single.batches import RecordBatch, collate, grouped, taught_by
from moedraft.distill.text.text_guesses import guessed_rows
from moedraft.distill.text.text_student import TextStudent
from moedraft.kernels import divergence, linear_divergence

Group = tuple[RecordBatch, list[str]]  # some records, and whose each is: those of one expert side by side


class NoStates:
    """Stands where a feature drafter has the target's states: an independent draft model reads none."""

    def __init__(self) -> None:
        self.on_forward: Callable[[], None] = lambda: None

    def of(self, records: Sequence[ReplayRecord]) -> list[torch.Tensor]:
        return []

    def forget(self) -> None:
        """Do nothing."""


class TextLessons:
    """See `Lessons`. The records of a step are read in groups, whose gradients add up."""

    def __init__(self, student: TextStudent, tokens: int = 2048) -> None:
        """tokens: of one group, padding included, unless a single record has more."""
        self.student, self.tokens, self.states = student, tokens, NoStates()

    def learn(self, records: Sequence[ReplayRecord], owners: Sequence[str], plan: JointPlan) -> float:
        total = 0.0
        for part in self._losses(records, owners, plan):
            part.backward()  # type: ignore[no-untyped-call]
            total += part.item()
        return total

    @torch.no_grad()
    def loss(self, records: Sequence[ReplayRecord], owners: Sequence[str], plan: JointPlan) -> float:
        return sum(part.item() for part in self._losses(records, owners, plan))

    @torch.no_grad()
    def guessed(
        self, records: Sequence[ReplayRecord], owners: Sequence[str], depth: int, max_tokens: int
    ) -> tuple[list[str], Guessed]:
        found: list[str] = []
        counts, chances = [], []
        for batch, names in self._groups(records, owners, max_tokens):
            found += names
            for count, chance in guessed_rows(self.student.logits(batch, names), batch, depth):
                counts.append(count)
                chances.append(chance)
        return found, Guessed(
            torch.from_numpy(np.array(counts, np.int64).reshape(-1, depth, 2)),
            torch.tensor(chances, dtype=torch.float64).reshape(-1, 2),
        )

    def _losses(
        self, records: Sequence[ReplayRecord], owners: Sequence[str], plan: JointPlan
    ) -> Iterator[torch.Tensor]:
        """One addend of the loss for each group."""
        groups = list(self._groups(records, owners, plan.max_tokens))
        total = sum(int(batch.mask.sum()) for batch, _ in groups)
        for batch, names in groups:
            yield self._sum(batch, names, plan) / total

    def _groups(
        self, records: Sequence[ReplayRecord], owners: Sequence[str], max_tokens: int
    ) -> Iterator[Group]:
        """The records by owner; none is longer than `max_tokens`."""
        names = iter(sorted(owners))
        ordered = [records[i] for i in sorted(range(len(records)), key=lambda i: owners[i])]
        draft = self.student.draft
        for chosen in grouped(ordered, self.tokens):
            batch = collate(chosen, draft.device, max_tokens, draft.vocab_size)
            yield batch, [next(names) for _ in chosen]

    def _sum(self, batch: RecordBatch, names: list[str], plan: JointPlan) -> torch.Tensor:
        """The divergence of all rows, nats. Logits of all positions exist at once only where they must."""
        student, (ids, logprobs) = self.student, (batch.topk_ids, taught_by(batch.topk_logprobs, plan.kind))
        if not student.ends_in_head():
            logits = student.logits(batch, names)
            return divergence(logits, teacher_topk=(ids, logprobs), kind=plan.kind, reduction="sum")
        hidden, total = student.hidden(batch, names), []
        for name, rows in student.parts(batch, names):
            weight, bias, lora = student.output_layer(name)
            teacher = ids[rows], logprobs[rows]
            total.append(
                linear_divergence(
                    hidden[rows],
                    weight,
                    bias=bias,
                    lora=lora,
                    teacher_topk=teacher,
                    kind=plan.kind,
                    reduction="sum",
                )
            )
        return torch.stack(total).sum()
