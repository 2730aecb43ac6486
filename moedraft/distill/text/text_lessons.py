"""How an independent draft model learns jointly from records and guesses them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from moedraft.core import ReplayRecord
from moedraft.distill.guessing.text_guesses import guessed_rows
from moedraft.distill.joint.plan import Guessed, JointPlan
from moedraft.distill.text.batches import RecordBatch, collate, grouped, taught_by
from moedraft.distill.text.text_student import TextStudent
from moedraft.kernels import divergence, linear_divergence

BLOCK = 256  # rows whose logits exist at a time, where nothing is learned
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
        """tokens: of one group, padding included; longer records are cut."""
        self.student, self.tokens, self.states = student, tokens, NoStates()

    def learn(self, records: Sequence[ReplayRecord], owners: Sequence[str], plan: JointPlan) -> float:
        groups = list(self._groups(records, owners, plan.max_tokens))
        total = sum(int(batch.mask.sum()) for batch, _ in groups)
        return sum(self._step(batch, names, plan, total) for batch, names in groups)

    @torch.no_grad()
    def loss(self, records: Sequence[ReplayRecord], owners: Sequence[str], plan: JointPlan) -> float:
        found, total = 0.0, 0
        for batch, names in self._groups(records, owners, plan.max_tokens):
            found += sum(float(part) for part in self._divergences(batch, names, plan))
            total += int(batch.mask.sum())
        return found / total

    @torch.no_grad()
    def guessed(
        self, records: Sequence[ReplayRecord], owners: Sequence[str], depth: int, max_tokens: int
    ) -> tuple[list[str], Guessed]:
        found: list[str] = []
        counts, chances = [], []
        for batch, names in self._groups(records, owners, max_tokens):
            found += names
            for count, chance in guessed_rows(self._logits(batch, names), batch, depth):
                counts.append(count)
                chances.append(chance)
        return found, Guessed(
            torch.from_numpy(np.array(counts, float).reshape(-1, depth, 2)),
            torch.tensor(chances, dtype=torch.float64).reshape(-1, 2),
        )

    def _groups(
        self, records: Sequence[ReplayRecord], owners: Sequence[str], max_tokens: int
    ) -> Iterator[Group]:
        """The records by owner; none is longer than `max_tokens` or than a group. A heartbeat after each."""
        names = iter(sorted(owners))
        ordered = [records[i] for i in sorted(range(len(records)), key=lambda i: owners[i])]
        draft = self.student.draft
        for chosen in grouped(ordered, self.tokens):
            batch = collate(chosen, draft.device, min(max_tokens, self.tokens), draft.vocab_size)
            yield batch, [next(names) for _ in chosen]
            self.states.on_forward()

    def _step(self, batch: RecordBatch, names: list[str], plan: JointPlan, total: int) -> float:
        """Add the gradients of one group, whose loss is divided by `total`; returns its part of the loss."""
        student = self.student
        hidden = student.hidden(batch, names) if student.ends_in_head() else None
        # Backwards through the output layer expert by expert: only one's gradients of it are in memory then;
        # what they say of its inputs then goes into the layers below at once.
        inputs = None if hidden is None else hidden.detach().requires_grad_(hidden.requires_grad)
        found = 0.0
        for part in self._divergences(batch, names, plan, inputs, total):
            part.backward()  # type: ignore[no-untyped-call]
            found += part.item()
        if hidden is not None and inputs is not None and inputs.grad is not None:
            hidden.backward(inputs.grad)  # type: ignore[no-untyped-call]
        self.states.on_forward()
        return found

    def _divergences(
        self,
        batch: RecordBatch,
        names: list[str],
        plan: JointPlan,
        inputs: torch.Tensor | None = None,
        divisor: float = 1.0,
    ) -> Iterator[torch.Tensor]:
        """The divergence, nats, summed over the rows of one expert after another, and divided by `divisor`.

        inputs [N, H]: of the output layer; None: they are computed. Where the logits are not simply that
        layer's output, those of all rows have to exist, and there is one divergence of all.
        """
        student, (ids, logprobs) = self.student, (batch.topk_ids, taught_by(batch.topk_logprobs, plan.kind))
        if not student.ends_in_head():
            logits = student.logits(batch, names)
            topk = ids, logprobs
            yield divergence(logits, teacher_topk=topk, kind=plan.kind, reduction="sum", divisor=divisor)
            return
        hidden = student.hidden(batch, names) if inputs is None else inputs
        for name, rows in student.parts(batch, names):
            weight, bias, lora = student.output_layer(name)
            yield linear_divergence(
                hidden[rows],
                weight,
                bias=bias,
                lora=lora,
                teacher_topk=(ids[rows], logprobs[rows]),
                kind=plan.kind,
                reduction="sum",
                divisor=divisor,
            )

    def _logits(self, batch: RecordBatch, names: list[str]) -> Iterator[torch.Tensor]:
        """The logits [n, V] of some rows after others, all rows of `batch.mask` in the end."""
        student = self.student
        if not student.ends_in_head():
            yield student.logits(batch, names)
            return
        hidden = student.hidden(batch, names)
        for name, rows in student.parts(batch, names):
            for some in torch.split(hidden[rows], BLOCK):
                student.routing.parts = [(name, len(some))]
                yield student.head(some)
