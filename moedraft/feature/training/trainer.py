"""Trains a drafter on texts that the target reads: steps that can be stopped anywhere and taken up again.

The matrices learn by Muon, which makes the most of few steps, everything else by AdamW. The learning rate
rises for a few steps, stays, and falls to nothing; how far the training is, the caller says, so that it can
be counted in steps or in minutes. What is measured and kept in the end is a moving average of the steps'
weights, which guesses better than the last step's do. Checkpoints are safetensors: nothing is read or written
by pickle.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from moedraft.core import InvalidRequest
from moedraft.cpu.products import multiplies_bfloat16
from moedraft.feature.features import Teacher
from moedraft.feature.model import FeatureDraft
from moedraft.feature.training.corpus import TrainingText
from moedraft.feature.training.reading import Reader
from moedraft.feature.unroll import Batch, acceptance, loss_of
from moedraft.kernels import Kind

WARM_UP = 40  # steps
FALLS = 0.6  # share of the training from which on the learning rate falls
UNROLLED = 0.5  # share of the training from which on several steps are unrolled
REMEMBERED = 0.995  # of the average of all steps' weights, at each step; less at first
MEASURED = 8  # texts read at a time when acceptance is measured


@dataclass(frozen=True)
class TrainingPlan:
    """How a drafter learns."""

    rows: int = 16  # texts a step
    longest: int = 256  # tokens of a text that are read
    matrix_lr: float = 0.02  # Muon
    other_lr: float = 2e-3  # AdamW
    unrolled: int = 3  # steps of the drafter in the later part of the training
    decay: float = 0.8  # weight of each further step
    kind: Kind = "fkl"  # of divergence from the target, see `moedraft.kernels.divergence`
    skip: int = 0  # first tokens of every text that teach nothing: a system prompt that is always the same
    seed: int = 0


class FeatureTrainer:
    """One training: the drafter, its optimisers, and how far it has come."""

    def __init__(
        self,
        draft: FeatureDraft,
        teacher: Teacher,
        texts: list[TrainingText],
        plan: TrainingPlan | None = None,
    ) -> None:
        if not texts:
            raise InvalidRequest("there is no text to train a drafter on.")
        self.draft, self.teacher, self.texts = draft.train(), teacher, texts
        self.reader = Reader(teacher)
        self.plan = plan or TrainingPlan()
        self.steps, self.tokens, self.seconds = 0, 0, 0.0
        draft.lm_head.weight.requires_grad_(False)
        trained = [p for p in draft.parameters() if p.requires_grad]
        self.optimisers: dict[str, torch.optim.Optimizer] = {
            "muon": torch.optim.Muon(
                [p for p in trained if p.ndim == 2], lr=self.plan.matrix_lr, weight_decay=0.0
            ),
            "adam": torch.optim.AdamW(
                [p for p in trained if p.ndim != 2],
                lr=self.plan.other_lr,
                betas=(0.9, 0.95),
                weight_decay=0.0,
            ),
        }
        self.average = self._weights()
        self._rates = {"muon": self.plan.matrix_lr, "adam": self.plan.other_lr}

    def step(self, share: float) -> float:
        """Learn from the next few texts; `share` of the training is done. Returns the loss in nats."""
        chosen = [(i, self.texts[i].token_ids[: self.plan.longest]) for i in self._next()]
        unrolled = self.plan.unrolled if share >= UNROLLED else 1
        batch = self.reader.batch(chosen)
        plan = self.plan
        with self._precision():
            loss = loss_of(self.draft, self.teacher, batch, unrolled, plan.decay, plan.skip, plan.kind)
        self.draft.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for name, optimiser in self.optimisers.items():
            for group in optimiser.param_groups:
                group["lr"] = self._rates[name] * rate(self.steps, share)
            optimiser.step()
        self._remember()
        self.steps += 1
        self.tokens += int(batch.lengths.sum())
        return loss.item()

    @torch.no_grad()
    def _remember(self) -> None:
        kept = min(REMEMBERED, 1 - 1 / (1 + 0.1 * (self.steps + 1)))
        for name, value in self._learning():
            self.average[name].lerp_(value, 1 - kept)

    @contextmanager
    @torch.no_grad()
    def averaged(self) -> Iterator[FeatureDraft]:
        """The drafter with the average of its weights, for a while."""
        own = self._weights()
        self._set(self.average)
        try:
            yield self.draft
        finally:
            self._set(own)

    def _set(self, weights: Mapping[str, torch.Tensor]) -> None:
        for name, value in self._learning():
            value.copy_(weights[name])

    def _learning(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, value) for name, value in self.draft.named_parameters() if value.requires_grad)

    def _weights(self) -> dict[str, torch.Tensor]:
        """Copies of all weights that learn."""
        return {name: value.detach().clone() for name, value in self._learning()}

    def _next(self) -> Iterator[int]:
        """Numbers of the next texts. Every pass has an order of its own, which depends on the seed alone."""
        count, rows = len(self.texts), self.plan.rows
        for place in range(self.steps * rows, (self.steps + 1) * rows):
            generator = torch.Generator().manual_seed(self.plan.seed + place // count)
            yield int(torch.randperm(count, generator=generator)[place % count])

    def _precision(self) -> Any:
        """bfloat16 where the processor multiplies it."""
        device = self.teacher.hf.device.type
        if device != "cpu" or multiplies_bfloat16():
            return torch.autocast(device, torch.bfloat16)
        return nullcontext()

    def acceptance(self, held_out: list[TrainingText], depth: int = 5) -> list[float]:
        """Share of the target's tokens that are guessed, by step; each given that the earlier ones were."""
        counted = torch.zeros(depth, 2, dtype=torch.int64)
        for first in range(0, len(held_out), MEASURED):
            texts = held_out[first : first + MEASURED]
            batch = Batch.read(self.teacher, [text.token_ids for text in texts])
            with self._precision():
                counted += acceptance(self.draft, batch, [text.num_prompt_tokens for text in texts], depth)
        return [hits / max(tries, 1) for hits, tries in counted.tolist()]

    def save(self, file: Path) -> None:
        """All that going on needs, at once or not at all."""
        tensors = {f"draft.{name}": value for name, value in self.draft.state_dict().items()}
        tensors["vocabulary"] = self.draft.vocabulary
        tensors |= {f"average.{name}": value for name, value in self.average.items()}
        for name, optimiser in self.optimisers.items():
            for number, state in optimiser.state_dict()["state"].items():
                tensors |= {f"{name}.{number}.{key}": torch.as_tensor(v) for key, v in state.items()}
        far = {"steps": self.steps, "tokens": self.tokens, "seconds": self.seconds}
        scratch = file.with_suffix(".tmp")
        contiguous = {name: value.detach().clone().contiguous() for name, value in tensors.items()}
        save_file(contiguous, scratch, metadata={"far": json.dumps(far)})
        scratch.rename(file)

    def load(self, file: Path) -> None:
        """Take up a training where `save` left it."""
        try:
            with safe_open(file, "pt") as stored:
                tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
                far = json.loads(stored.metadata()["far"])
        except (SafetensorError, OSError, TypeError, KeyError, ValueError) as error:
            raise InvalidRequest(f"{file} is damaged; delete it to train from the beginning.") from error
        own = {name.removeprefix("draft."): v for name, v in tensors.items() if name.startswith("draft.")}
        before = tensors.get("vocabulary", self.draft.vocabulary)
        if not torch.equal(before.to(self.draft.vocabulary), self.draft.vocabulary):
            raise InvalidRequest(f"{file} is of other prompts or another --vocabulary; name another folder.")
        try:
            self.draft.load_state_dict(own)
        except RuntimeError as error:
            raise InvalidRequest(f"{file} belongs to a training of another drafter; name another.") from error
        for name, value in self.average.items():
            value.copy_(tensors.get(f"average.{name}", own[name]))
        for name, optimiser in self.optimisers.items():
            restore(optimiser, {key: v for key, v in tensors.items() if key.startswith(f"{name}.")})
        self.steps, self.tokens, self.seconds = far["steps"], far["tokens"], far["seconds"]


def rate(steps: int, share: float) -> float:
    """The learning rate as a part of the highest."""
    return min(1.0, (steps + 1) / WARM_UP, max(0.02, (1 - share) / (1 - FALLS)))


def restore(optimiser: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    """Put what `save` wrote as NAME.number.key back."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in tensors.items():
        _, number, key = name.split(".", 2)
        state.setdefault(int(number), {})[key] = value
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
