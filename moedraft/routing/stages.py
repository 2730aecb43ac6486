"""Two classifiers in a row: the first decides by n-grams alone where it is sure, the second sees everything.

N-grams cost a fraction of a millisecond, the sentence embedding many. So a prompt is embedded only where the
first stage might choose another domain than the full model would. How sure the first stage must be is
measured on examples that were left out while fitting; some of them belong to domains that were left out
altogether. This module knows no embedder: it asks for vectors through a function when it needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moedraft.routing.classifier import DomainClassifier, Opinions
from moedraft.routing.embedder import Floats, join, unit
from moedraft.routing.fitting import Copies

AGREEMENT = 0.99  # expected share of the first stage's decisions that the full model would make too
CAUTION = 2.0  # the doubt that is allowed is divided by this: real prompts of no domain may be odder still
MIN_DOMAINS = 10  # with fewer, prompts of no domain are seen too seldom: with 8, 1.7 % more were accepted
NEVER = float("inf")


@dataclass(frozen=True)
class TwoStage:
    """Both fitted classifiers. The first stage decides nothing until `deciding` has set `sure`."""

    full: DomainClassifier
    ngrams: DomainClassifier  # the same domains, by the n-grams alone
    # [m, 2]: for each left-out example the first stage's confidence in its best domain, and the full model's
    # confidence in that domain, or -1 where the full model prefers another one.
    trials: Floats
    sure: float = NEVER  # the first stage decides from this confidence on

    @classmethod
    def fit(
        cls, rows: Mapping[str, Floats], split: int, copies: Mapping[str, Copies] | None = None
    ) -> TwoStage:
        """From {name: features [n, F] with n >= 2}, one domain or more, and copies. Deterministic."""
        return cls.fit_and_try(rows, split, copies)[0]

    @classmethod
    def fit_and_try(
        cls, rows: Mapping[str, Floats], split: int, copies: Mapping[str, Copies] | None = None
    ) -> tuple[TwoStage, Opinions]:
        """`fit`, and what the full model says of examples that were left out."""
        full, opinions = DomainClassifier.fit_and_try(rows, split, copies)
        ngrams, first = DomainClassifier.fit_and_try(
            {name: unit(x[:, split:]) for name, x in rows.items()},
            0,
            {name: replace(made, x=unit(made.x[:, split:])) for name, made in (copies or {}).items()},
        )
        return cls(full, ngrams, _compare(first.rows, opinions.rows)), opinions

    @property
    def names(self) -> tuple[str, ...]:
        return self.full.names

    def deciding(self, threshold: float) -> TwoStage:
        """A copy whose first stage decides where it is sure; below `threshold` a prompt fits no domain."""
        known_enough = len(self.names) >= MIN_DOMAINS
        return replace(self, sure=_sure(self.trials, threshold) if known_enough else NEVER)

    def probabilities(self, ngrams: Floats, embed: Callable[[NDArray[np.intp]], Floats]) -> Floats:
        """n-grams [n, g] → calibrated probabilities [n, D]; 1 − a row's sum is the probability of none.

        `embed` gives the vectors [k, d] of k rows. It is called once, or never where no row needs it.
        """
        rows = self.ngrams.probabilities(ngrams)
        unsure = np.flatnonzero(rows.max(axis=1) < self.sure)
        if len(unsure):
            rows[unsure] = self.full.probabilities(join(embed(unsure), ngrams[unsure]))
        return rows

    def pack(self) -> tuple[dict[str, Floats], dict[str, str]]:
        """Tensors and text, as safetensors keeps them."""
        tensors, text = {"trials": self.trials}, dict[str, str]()
        for stage, model in (("full", self.full), ("ngrams", self.ngrams)):
            weights, scalars = model.pack()
            tensors |= {f"{stage}.{name}": tensor for name, tensor in weights.items()}
            text |= {f"{stage}.{name}": value for name, value in scalars.items()}
        return tensors, text

    @classmethod
    def unpack(cls, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> TwoStage | None:
        """The inverse of `pack`; None for what `pack` did not make."""
        full, ngrams = (
            DomainClassifier.unpack(_inside(tensors, stage), _inside(metadata, stage))
            for stage in ("full", "ngrams")
        )
        trials = np.asarray(tensors.get("trials", ()), dtype=np.float32)
        if full is None or ngrams is None or full.names != ngrams.names or trials.shape[1:] != (2,):
            return None
        widths = full.weight.shape[1] - full.split, ngrams.weight.shape[1]
        return cls(full, ngrams, trials) if widths[0] == widths[1] else None


def _inside(contents: Mapping[str, Any], stage: str) -> dict[str, Any]:
    return {k.removeprefix(f"{stage}."): v for k, v in contents.items() if k.startswith(f"{stage}.")}


def _compare(first: Floats, full: Floats) -> Floats:
    """What both stages say of the left-out examples, [m, D] each → `trials`."""
    best = first.argmax(axis=1)
    same = np.where(full.argmax(axis=1) == best, full.max(axis=1), -1)
    return np.column_stack([first.max(axis=1), same]).astype(np.float32)


def _sure(trials: Floats, threshold: float) -> float:
    """The lowest confidence at which AGREEMENT is expected, raised by CAUTION.

    The agreement is estimated by the rule of succession, (right + 1) / (all + 2), so that few examples never
    suffice: at 99 % it takes at least 98.
    """
    trials = trials[np.argsort(-trials[:, 0], kind="stable")]
    wrong = np.cumsum(trials[:, 1] < max(threshold, 0.0))
    enough = np.flatnonzero((wrong + 1) / (np.arange(len(trials)) + 3) <= 1 - AGREEMENT)
    if not len(enough):
        return NEVER
    return max(threshold, 1 - (1 - float(trials[enough[-1], 0])) / CAUTION)
