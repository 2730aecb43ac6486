"""One update: replay records in, a candidate for the next adapter version out.

The trainer reads storage but writes nothing, and does not know what becomes of the candidate. It minimises a
divergence from the target's stored top-k (the rest of its vocabulary counts as one more token) to the draft,
at every position of the answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import torch

from moedraft.core import SHARED, AdapterVersion, ReplayRecord
from moedraft.distill.single.student import Student, modules_of
from moedraft.distill.text.batches import (
    RecordBatch,
    collate,
    grouped,
    length_of,
    shuffled_groups,
    taught_by,
)
from moedraft.kernels import Kind, divergence, linear_divergence
from moedraft.models import LanguageModel
from moedraft.storage.retention.holding import is_held_out
from moedraft.storage.store import TARGET_ID, Store
from moedraft.storage.versions.candidate import Candidate

MEASURED = 32  # held-out records that one update is measured by, at most
SAMPLE = 512  # records that one update looks at, at most
LAST_RATE = 0.2  # share of the learning rate that is left at the end of an update, so that the result settles

OnStep = Callable[[int, float | None], None]  # optimiser steps done, their mean loss (None before the first)


def domains_taught(records: Iterable[ReplayRecord], least: int) -> set[str]:
    """The domains of which an update has at least so many of these records to learn from."""
    counts = Counter(record.domain for record in records if not is_held_out(record))
    return {name for name, count in counts.items() if count >= least}


def distinct(records: Iterable[ReplayRecord]) -> Iterator[ReplayRecord]:
    """The first of each prompt in a domain: what is asked again and again counts once in an update."""
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for record in records:
        prompt = record.domain, tuple(record.token_ids[: record.num_prompt_tokens])
        if prompt not in seen:
            seen.add(prompt)
            yield record


def _say_nothing(done: int, loss: float | None) -> None:
    """The default `on_step`: nobody wants to know how far an update is."""


class Trainer:
    """Makes candidates for the adapters of one home, on its own copy of the draft base, in float32."""

    def __init__(
        self,
        draft: LanguageModel,
        store: Store,
        *,
        scope: str = "tail",
        rank: int = 64,
        shared_rank: int = 64,
        learning_rate: float = 3e-3,
        steps: int = 16,
        tokens_per_step: int = 2048,
        kind: Kind = "fkl",
    ) -> None:
        self.student = Student(draft, store.adapters, scope=scope, rank=rank, shared_rank=shared_rank)
        self.registry, self.replay = store.registry, store.replay
        self.learning_rate, self.steps, self.tokens_per_step = learning_rate, steps, tokens_per_step
        self.kind = kind
        self.seed = 0  # of the next draw of records

    def update(
        self, expert: str, *, steps: int | None = None, on_step: OnStep | None = None
    ) -> Candidate | None:
        """Train `expert` (or SHARED) for `steps` optimiser steps; None where there is nothing to learn from.

        Call `published` or `forget` with the outcome before the next update. `on_step` is called after every
        batch, also one that only measures, and for every record read: it serves as the heartbeat.
        Raises StorageError, UnsupportedModel where PEFT covers other modules than the engine does, and
        FloatingPointError where no step was finite; the next update starts from the live version then.
        """
        steps, say = steps or self.steps, on_step or _say_nothing
        train, held_out = self.draw(expert, steps, lambda: say(0, None))
        if not train:
            return None
        try:
            self.student.activate(expert)
            before = self.measure(held_out, lambda: say(0, None))
            loss = self._train(expert, train, steps, say)
            after = self.measure(held_out, lambda: say(steps, loss))
            sizes = len(train), len(held_out), steps
            return self._candidate(expert, sizes, loss, (before, after))
        except BaseException:
            self.student.forget(expert)
            raise

    def published(self, version: AdapterVersion) -> None:
        """Note that the last candidate is live as `version`; the next update continues from memory."""
        self.student.published(version)

    def kept(self, candidate: Candidate) -> None:
        """Note that the last candidate was not published, but that its adapter's next update continues it."""
        self.student.kept(candidate)

    def forget(self, expert: str) -> None:
        """Drop the last candidate, which was not published; the next update starts from the live version."""
        self.student.forget(expert)

    # -- the records -----------------------------------------------------------------------------

    def draw(
        self, expert: str, steps: int, on_record: Callable[[], None]
    ) -> tuple[list[ReplayRecord], list[ReplayRecord]]:
        """Records to train on and records to measure by, no more of each than `steps` batches take."""
        train: list[ReplayRecord] = []
        held_out: list[ReplayRecord] = []
        room = {False: steps * self.tokens_per_step, True: steps * self.tokens_per_step}  # tokens
        for record in distinct(one for one in self._sample(expert) if one.topk_ids):
            on_record()
            measures = is_held_out(record)
            if room[measures] > 0:
                (held_out if measures else train).append(record)
                room[measures] -= length_of(record, self.tokens_per_step)
            if len(held_out) == MEASURED:
                room[True] = 0
            if max(room.values()) <= 0:
                break
        return train, held_out

    def _sample(self, expert: str) -> Iterator[ReplayRecord]:
        """Records of the target in use, at random; the shared adapter draws equally from all domains."""
        self.seed += 1
        target = self.registry.get_meta(TARGET_ID)
        if expert == SHARED:
            return self.replay.sample_stratified(SAMPLE, self.seed, target)
        return self.replay.sample(expert, SAMPLE, self.seed, target)

    def _collated(self, records: list[ReplayRecord]) -> RecordBatch:
        draft = self.student.draft
        return collate(records, draft.device, self.tokens_per_step, draft.vocab_size)

    # -- the steps -------------------------------------------------------------------------------

    def _train(self, expert: str, records: list[ReplayRecord], steps: int, on_step: OnStep) -> float:
        """Make the optimiser steps; returns their mean loss. Raises FloatingPointError if none was finite."""
        optimiser, total, done = self.student.optimiser(expert), 0.0, 0
        for number, chosen in enumerate(shuffled_groups(records, steps, self.tokens_per_step, self.seed)):
            for group in optimiser.param_groups:
                group["lr"] = self.learning_rate * (1 - (1 - LAST_RATE) * number / steps)
            loss = self._step(optimiser, self._collated(chosen))
            if loss is not None:
                total, done = total + loss, done + 1
            on_step(number + 1, total / max(done, 1))
        if not done:
            raise FloatingPointError(f"no step of the update of {expert!r} had a finite loss.")
        return total / done

    def _step(self, optimiser: torch.optim.Optimizer, batch: RecordBatch) -> float | None:
        """One optimiser step; None, and no step, where the loss or its gradient is not finite."""
        loss = self.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
        finite = bool(loss.isfinite()) and bool(norm.isfinite())
        if finite:
            optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return loss.item() if finite else None

    def loss(self, batch: RecordBatch) -> torch.Tensor:
        """The training loss: the divergence `kind` between target and draft, nats per answer token."""
        teacher = (batch.topk_ids, taught_by(batch.topk_logprobs, self.kind))
        layer = self.student.output_layer()
        if layer is None:
            return divergence(self.student.logits(batch), teacher_topk=teacher, kind=self.kind)
        weight, bias, lora = layer
        hidden = self.student.hidden(batch)
        return linear_divergence(hidden, weight, bias=bias, lora=lora, teacher_topk=teacher, kind=self.kind)

    @torch.no_grad()
    def measure(self, records: list[ReplayRecord], on_batch: Callable[[], None]) -> float | None:
        """Share of the answer tokens for which draft and target have the same most likely token."""
        hits = total = 0
        ordered = sorted(records, key=lambda record: length_of(record, self.tokens_per_step))
        for chosen in grouped(ordered, self.tokens_per_step):
            batch = self._collated(chosen)
            best = self.student.logits(batch).argmax(-1)
            hits += int((best == batch.topk_ids[:, 0]).sum())
            total += best.numel()
            on_batch()
        return hits / total if total else None

    def _candidate(
        self,
        expert: str,
        sizes: tuple[int, int, int],
        loss: float,
        rates: tuple[float | None, float | None],
    ) -> Candidate:
        """The adapter as it is now. `sizes`: records, those held out, steps; `rates`: before and after."""
        config, tensors = self.student.export(expert)
        records, held_out, steps = sizes
        return Candidate(
            expert=expert,
            parent=self.student.versions[expert],
            base_hash=self.student.base_hash,
            rank=config["r"],
            modules=tuple(sorted(modules_of(tensors))),
            records=records,
            held_out=held_out,
            steps=steps,
            loss=loss,
            acceptance_before=rates[0],
            acceptance_after=rates[1],
            config=config,
            tensors=tensors,
        )
