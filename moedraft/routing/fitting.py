"""The arithmetic of fitting a classifier: examples as rows of features, weights, centroids, calibration.

Knows arrays only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from moedraft.routing.embedder import Floats, unit

Labels = NDArray[np.int64]
Mask = NDArray[np.bool_]

INVERSE_PENALTY = 100.0  # features are unit vectors, so weights must be large to matter
UNKNOWN_SHARE = 1 / 3  # assumed share of prompts that fit no domain; a higher one refuses more of all prompts
MIN_SPREAD = 0.05  # so that a domain with nearly equal examples does not reject every other prompt
POOLED = 0.5  # of a domain's spread (its square), how much is the mean over all domains


@dataclass(frozen=True)
class Copies:
    """Features of more texts of one domain: reworded copies of its examples, or labelled prompts."""

    x: Floats  # [m, F]
    places: Labels  # [m]: which of the domain's examples each was made from, or is most like
    weight: Floats | None = None  # [m]: how much each counts beside an example; None: as much

    @property
    def weights(self) -> Floats:
        return np.ones(len(self.x), dtype=np.float32) if self.weight is None else self.weight

    def joined(self, other: Copies) -> Copies:
        return Copies(
            np.vstack([self.x, other.x]),
            np.concatenate([self.places, other.places]),
            np.concatenate([self.weights, other.weights]),
        )


@dataclass(frozen=True)
class Examples:
    """The examples of all domains, and the reworded copies of some of them."""

    x: Floats  # [n, F]
    y: Labels  # [n]: the domain
    place: Floats  # [n]: where in its domain's list an example stands, 0 to 1; a copy where its original does
    copied: Mask  # [n]: whether it is a reworded copy, or a prompt that is no example
    weight: Floats  # [n]: 1 for an example

    @classmethod
    def of(cls, rows: Mapping[str, Floats], copies: Mapping[str, Copies]) -> Examples:
        """Of {name: features [n, F]}, and copies of some or of none; domains are numbered in that order."""
        parts = []
        for label, (name, own) in enumerate(rows.items()):
            made = copies.get(name, Copies(own[:0], np.zeros(0, dtype=np.int64)))
            places = np.concatenate([np.arange(len(own)), made.places]) / len(own)
            copied = np.arange(len(places)) >= len(own)
            weight = np.append(np.ones(len(own), dtype=np.float32), made.weights)
            parts.append((np.vstack([own, made.x]), np.full(len(places), label), places, copied, weight))
        x, y, place, copied, weight = (np.concatenate(column) for column in zip(*parts, strict=True))
        return cls(x, y, place.astype(np.float32), copied, weight)

    def where(self, mask: Mask) -> Examples:
        place, copied, weight = self.place[mask], self.copied[mask], self.weight[mask]
        return Examples(self.x[mask], self.y[mask], place, copied, weight)

    @property
    def originals(self) -> Examples:
        return self.where(~self.copied)


def new_regression() -> Any:
    """A logistic regression, not fitted yet. Balanced: examples do not tell how common a domain is."""
    return LogisticRegression(C=INVERSE_PENALTY, max_iter=1000, class_weight="balanced")


def fit_linear(examples: Examples, num_classes: int) -> tuple[Floats, Floats]:
    """Weights [D, F] and biases [D]; zeros where there is only one class."""
    if num_classes == 1:
        return np.zeros((1, examples.x.shape[1]), dtype=np.float32), np.zeros(1, dtype=np.float32)
    fitted = new_regression().fit(examples.x, examples.y, _evened(examples))
    weight, bias = fitted.coef_, fitted.intercept_
    if num_classes == 2:  # scikit-learn keeps one row, the second class against the first
        weight, bias = np.vstack([-weight, weight]) / 2, np.hstack([-bias, bias]) / 2
    return weight.astype(np.float32, order="C"), bias.astype(np.float32)  # safetensors keeps C order


def _evened(examples: Examples) -> Floats:
    """The weights [n], such that those of a domain add up to their number, which the regression balances."""
    counts, totals = np.bincount(examples.y), np.bincount(examples.y, examples.weight)
    return np.asarray(examples.weight * (counts / totals)[examples.y], dtype=np.float32)


def fit_centroids(examples: Examples, num_classes: int, split: int) -> tuple[Floats, Floats]:
    """Centroids [D, F] and the mean and spread of left-out examples' similarities [D, 4], without copies.

    Domains with prompts of one wording lie close together and have a small spread, against which another
    wording would be very far away; so each spread is mixed with those of the others.
    """
    x, y = examples.originals.x, examples.originals.y
    parts = unit_parts(x, split)
    sums = np.stack([parts[y == label].sum(axis=0) for label in range(num_classes)])
    similar = left_out_similarities(x, y, split)
    mean = np.stack([similar[y == label].mean(axis=0) for label in range(num_classes)])
    spread = np.stack([similar[y == label].std(axis=0) for label in range(num_classes)])
    spread = np.sqrt((1 - POOLED) * spread**2 + POOLED * (spread**2).mean(axis=0))
    typical = np.hstack([mean, np.maximum(spread, MIN_SPREAD)]).astype(np.float32)
    return unit_parts(sums, split), typical


def left_out_similarities(x: Floats, y: Labels, split: int) -> Floats:
    """[n, F] → [n, 2]: each example against the centroid of its domain's other examples, in both parts."""
    parts = unit_parts(x, split)
    sums = np.stack([parts[y == label].sum(axis=0) for label in range(int(y.max()) + 1)])
    products = parts * unit_parts(sums[y] - parts, split)
    return np.column_stack([products[:, :split].sum(axis=1), products[:, split:].sum(axis=1)])


def fit_known(figures: Floats, known: Mask, weight: Floats) -> Floats:
    """Figures [n, 4], labels [n] and weights [n] → [5]: the weights and the bias of P(known).

    A balanced logistic regression on standardised figures, moved to the prior odds of UNKNOWN_SHARE; the
    standardisation is folded into the weights.
    """
    mean, spread = figures.mean(axis=0), np.maximum(figures.std(axis=0), 1e-6)
    fitted = LogisticRegression(class_weight="balanced").fit((figures - mean) / spread, known, weight)
    weight = fitted.coef_[0] / spread
    prior = np.log((1 - UNKNOWN_SHARE) / UNKNOWN_SHARE)
    return np.append(weight, fitted.intercept_[0] - weight @ mean + prior).astype(np.float32)


def unit_parts(x: Floats, split: int) -> Floats:
    """The rows, with each of their two parts scaled to length one."""
    return np.hstack([unit(x[:, :split]), unit(x[:, split:])])


def similarities(x: Floats, centroids: Floats, split: int) -> Floats:
    """Cosines of both parts: [n, F], [D, F] → [n, D, 2]."""
    parts = unit_parts(x, split)
    return np.stack(
        [parts[:, :split] @ centroids[:, :split].T, parts[:, split:] @ centroids[:, split:].T], axis=2
    )


def logsumexp(logits: Floats) -> Floats:
    """[n, D] → [n]."""
    top = logits.max(axis=1)
    return np.asarray(top + np.log(np.exp(logits - top[:, None]).sum(axis=1)), dtype=np.float32)


def log_softmax(logits: Floats) -> Floats:
    return logits - logsumexp(logits)[:, None]


def softmax(logits: Floats) -> Floats:
    return np.exp(log_softmax(logits))


def sigmoid(values: Floats) -> Floats:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * values)), dtype=np.float32)
