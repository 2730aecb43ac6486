"""Two classifiers in a row: n-grams alone where they are sure, the full features for the rest.

The n-grams cost a fraction of a millisecond, the sentence embedding beside them many. So a prompt is embedded
only where the first stage may be wrong, by which we mean: may send it elsewhere than the full model would.
How sure it must be is read off the examples left out in fitting, some of them of domains that the models of
that fold did not know. Knows no embedder: the vectors are asked for when they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moedraft.routing.classifier import DomainClassifier
from moedraft.routing.embedder import Floats, join, unit

AGREEMENT = 0.99  # with the full model, expected of what the first stage decides
CAUTION = 2.0  # the domains left out are not all strangers there are: this much less doubt than they ask for
MIN_DOMAINS = 10  # fewer say too little of what strangers look like: with 8, 1.7 % more of them were claimed
NEVER = float("inf")


@dataclass(frozen=True)
class TwoStage:
    """A fitted router. Decides nothing in the first stage until `deciding` says how sure it must be."""

    full: DomainClassifier
    ngrams: DomainClassifier  # the same domains, of the n-grams alone
    trials: Floats  # [m, 2], a left-out example each: the first stage's confidence, and what the full model
    # gives the same domain if that is its best, else -1
    sure: float = NEVER  # the first stage decides from this confidence on

    @classmethod
    def fit(cls, rows: Mapping[str, Floats], split: int) -> TwoStage:
        """From {name: features [n, F] with n >= 2}, at least one domain. Deterministic."""
        full, opinions = DomainClassifier.fit_and_try(rows, split)
        ngrams, first = DomainClassifier.fit_and_try(
            {name: unit(x[:, split:]) for name, x in rows.items()}, 0
        )
        return cls(full, ngrams, _compare(first, opinions))

    @property
    def names(self) -> tuple[str, ...]:
        return self.full.names

    def deciding(self, threshold: float) -> TwoStage:
        """One whose first stage decides what it may, where less than `threshold` means no domain."""
        known_enough = len(self.names) >= MIN_DOMAINS
        return replace(self, sure=_sure(self.trials, threshold) if known_enough else NEVER)

    def probabilities(self, ngrams: Floats, embed: Callable[[NDArray[np.intp]], Floats]) -> Floats:
        """[n, g] → [n, D], calibrated; what a row lacks to 1 is the probability of none.

        `embed` gives the vectors [k, d] of the k rows it is asked for: once, or never where all are sure.
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
    """[m, D] of both stages → `trials`."""
    best = first.argmax(axis=1)
    same = np.where(full.argmax(axis=1) == best, full.max(axis=1), -1)
    return np.column_stack([first.max(axis=1), same]).astype(np.float32)


def _sure(trials: Floats, threshold: float) -> float:
    """The confidence from which on AGREEMENT is to be expected, made more careful by CAUTION.

    Expected by the rule of succession, so that a handful of examples never suffices (98 at least, at 99 %).
    """
    trials = trials[np.argsort(-trials[:, 0], kind="stable")]
    wrong = np.cumsum(trials[:, 1] < max(threshold, 0.0))
    enough = np.flatnonzero((wrong + 1) / (np.arange(len(trials)) + 3) <= 1 - AGREEMENT)
    if not len(enough):
        return NEVER
    return max(threshold, 1 - (1 - float(trials[enough[-1], 0])) / CAUTION)
