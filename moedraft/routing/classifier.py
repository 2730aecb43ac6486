"""Features of a prompt → the probability of each domain, and of none: a calibrated logistic regression.

A softmax spends its whole mass on the domains it knows, and so is sure of itself even for prompts that belong
to none of them. Two things are therefore added to scikit-learn's multinomial logistic regression:

- a temperature, fitted on held-out examples;
- P(known), the probability that the prompt belongs to any known domain. It is a logistic regression on four
  figures that say how well a prompt fits its best domain: the evidence (log-sum-exp of the logits), the
  margin to the second best, and the similarity to the domain's centroid in each of the two parts of the
  features, standardised by the similarities that the domain's own examples show when they are left out, and
  clamped. It is fitted by leaving out, in turn, a fifth of the domains (whose examples then belong to none)
  and of the other examples, with the reworded copies of both.

With fewer than three domains none can be left out. P(known) then depends on the two similarities alone, and
is 1/2 for a prompt that is as far off as the worst twentieth of the left-out examples. With a single domain
there is nothing to classify, and the domain's probability is P(known).

The same classifier works with n-grams alone (`split` 0): the similarity of the missing part is 0 then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moedraft.routing.embedder import Floats
from moedraft.routing.fitting import (
    Copies,
    Examples,
    Labels,
    Mask,
    fit_centroids,
    fit_known,
    fit_linear,
    left_out_similarities,
    log_softmax,
    logsumexp,
    sigmoid,
    similarities,
    softmax,
)

FOLDS = 5
TEMPERATURES = np.geomspace(0.2, 5.0, 65)
# How far from its centroid a prompt counts, at most, in spreads. Another wording than the examples' is soon
# three spreads away, and without a bound that outweighs everything else.
CLAMP = 2.0
STRANGE = -1  # the label of an example whose domain was left out
LEAST = 1e-6  # probability that is taken for a smaller one, where logarithms are compared
FAR = 6.0  # the same where distance is all there is, with fewer than three domains


@dataclass(frozen=True)
class DomainClassifier:
    """A fitted classifier. Row i of `weight`, `bias`, `centroids` and `typical` belongs to `names[i]`."""

    names: tuple[str, ...]
    weight: Floats  # [D, F]
    bias: Floats  # [D]
    centroids: Floats  # [D, F], unit length in each of the two parts of the features
    typical: Floats  # [D, 4]: mean and spread of a left-out example's similarity, first part then second
    head: Floats  # [5]: weights of the four figures and a bias; P(known) = sigmoid
    temperature: float
    clamp: float  # CLAMP or FAR
    split: int  # the first `split` features are the embedding, the others n-grams

    @classmethod
    def fit(
        cls, rows: Mapping[str, Floats], split: int, copies: Mapping[str, Copies] | None = None
    ) -> DomainClassifier:
        """Fit {name: features [n, F] with n >= 2}, one domain or more, and reworded copies. Deterministic."""
        return cls.fit_and_try(rows, split, copies)[0]

    @classmethod
    def fit_and_try(
        cls, rows: Mapping[str, Floats], split: int, copies: Mapping[str, Copies] | None = None
    ) -> tuple[DomainClassifier, Opinions]:
        """`fit`, with what it says of m examples that were left out, or whose domains were.

        Which examples these are, and in which order, depends on the numbers of domains and examples alone, so
        that classifiers of different features can be compared row by row. With two domains or one m is 0.
        """
        names, examples = tuple(rows), Examples.of(rows, copies or {})
        model = _fit_base(names, examples, split)
        if len(names) < 3:
            model = replace(model, head=_distance_head(model, examples.originals), clamp=FAR)
            return model, Opinions(np.zeros((0, len(names)), np.float32), np.zeros(0, np.int64))
        held_out = [_held_out(names, examples, split, fold) for fold in range(min(FOLDS, len(names)))]
        figures = np.vstack([part.figures for part in held_out])
        known = np.concatenate([part.known for part in held_out])
        weight = np.concatenate([part.weight for part in held_out])
        model = replace(model, head=fit_known(figures, known, weight), temperature=_temperature(held_out))
        found = [_opinions(model, part) for part in held_out]
        labels = np.concatenate([one.labels for one in found])
        return model, Opinions(np.vstack([one.rows for one in found]), labels)

    def logits(self, x: Floats) -> Floats:
        """[n, F] → [n, D], uncalibrated: their softmax is scikit-learn's predict_proba."""
        return x @ self.weight.T + self.bias

    def figures(self, x: Floats) -> Floats:
        """[n, F] → [n, 4]: evidence, margin, similarities to the best domain's centroid (standardised)."""
        logits = self.logits(x)
        best = logits.argmax(axis=1)
        ranked = np.sort(logits, axis=1)
        margin = ranked[:, -1] - ranked[:, -2] if len(self.names) > 1 else np.zeros(len(x))
        mean, spread = self.typical[best, :2], self.typical[best, 2:]
        similar = (similarities(x, self.centroids, self.split)[np.arange(len(x)), best] - mean) / spread
        near = np.clip(similar, -self.clamp, self.clamp)
        return np.column_stack([logsumexp(logits), margin, near]).astype(np.float32)

    def known(self, x: Floats) -> Floats:
        """[n, F] → [n]: the probability that a prompt belongs to any of the domains."""
        return self._known(self.figures(x))

    def probabilities(self, x: Floats) -> Floats:
        """[n, F] → [n, D], calibrated; 1 − a row's sum is the probability of none."""
        return self._calibrated(self.logits(x), self.figures(x))

    def _known(self, figures: Floats) -> Floats:
        return sigmoid(figures @ self.head[:-1] + self.head[-1])

    def _calibrated(self, logits: Floats, figures: Floats) -> Floats:
        return softmax(logits / self.temperature) * self._known(figures)[:, None]

    def pack(self) -> tuple[dict[str, Floats], dict[str, str]]:
        """Tensors and text, as safetensors keeps them."""
        scalars = {
            "names": self.names,
            "temperature": self.temperature,
            "clamp": self.clamp,
            "split": self.split,
        }
        tensors = {name: getattr(self, name) for name in _TENSORS}
        return tensors, {"model": json.dumps(scalars)}

    @classmethod
    def unpack(
        cls, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]
    ) -> DomainClassifier | None:
        """The inverse of `pack`; None for what `pack` did not make."""
        try:
            scalars = json.loads(metadata["model"])
            arrays = {name: np.asarray(tensors[name], dtype=np.float32) for name in _TENSORS}
            names, split = tuple(scalars["names"]), int(scalars["split"])
            temperature, clamp = float(scalars["temperature"]), float(scalars["clamp"])
            model = cls(names=names, temperature=temperature, clamp=clamp, split=split, **arrays)
        except (KeyError, TypeError, ValueError, RecursionError):  # the last: nested too deeply
            return None
        d, f = len(model.names), model.weight.shape[-1]
        shapes = {"weight": (d, f), "bias": (d,), "centroids": (d, f), "typical": (d, 4), "head": (5,)}
        return model if all(arrays[name].shape == shape for name, shape in shapes.items()) else None


_TENSORS = ("weight", "bias", "centroids", "typical", "head")


@dataclass(frozen=True)
class Opinions:
    """What classifiers say of m examples that they were not fitted on."""

    rows: Floats  # [m, D]: probabilities of the domains; 1 − a row's sum is that of none
    labels: Labels  # [m]: the domain that an example belongs to, −1 where the classifier did not know that

    @property
    def known(self) -> Mask:
        return np.asarray(self.labels != STRANGE)

    def right(self, threshold: float) -> tuple[int, int]:
        """How many go where they belong, of known domains and of others, which belong to none.

        A probability below `threshold` sends an example to none.
        """
        best, sure = self.rows.argmax(axis=1), self.rows.max(axis=1, initial=0.0) >= threshold
        right = np.where(sure, best, STRANGE) == self.labels
        return int(right[self.known].sum()), int(right[~self.known].sum())

    def likelihood(self) -> float:
        """The mean logarithm of the probability of the right domain where that is known, nats."""
        found = self.rows[self.known, self.labels[self.known]]
        return float(np.log(np.maximum(found, LEAST)).mean())


@dataclass(frozen=True)
class _Fold:
    """What a classifier says of examples it was not fitted on; some belong to domains it does not know."""

    figures: Floats  # [n, 4]
    logits: Floats  # [n, D']
    classes: Labels  # [D']: which of all D domains the model knows
    labels: Labels  # [n], into D
    known: Mask  # [n]: whether the label is among the classes
    copied: Mask  # [n]: whether it is a reworded copy
    weight: Floats  # [n]


def _fit_base(names: tuple[str, ...], examples: Examples, split: int) -> DomainClassifier:
    """A classifier with weights and centroids, but without a fitted temperature or head."""
    weight, bias = fit_linear(examples, len(names))
    centroids, typical = fit_centroids(examples, len(names), split)
    head = np.zeros(5, dtype=np.float32)
    return DomainClassifier(names, weight, bias, centroids, typical, head, 1.0, CLAMP, split)


def _held_out(names: tuple[str, ...], examples: Examples, split: int, fold: int) -> _Fold:
    """Fit without every fifth domain and without a fifth of the others' examples; classify what was left out.

    That fifth is a run of consecutive examples, with their copies. Where examples are listed by origin, this
    shows how far other prompts of the domain can lie from those that it was fitted on.
    """
    folds = min(FOLDS, len(names))
    stranger = examples.y % folds == fold
    kept = ~stranger & (np.floor(examples.place * folds + 1e-4) != fold)
    rest = examples.where(~kept)
    classes, labels = np.unique(examples.y[kept], return_inverse=True)
    model = _fit_base(
        tuple(names[label] for label in classes), replace(examples.where(kept), y=labels), split
    )
    known = ~stranger[~kept]
    figures, logits = model.figures(rest.x), model.logits(rest.x)
    return _Fold(figures, logits, classes, rest.y, known, rest.copied, rest.weight)


def _opinions(model: DomainClassifier, part: _Fold) -> Opinions:
    """Of the left-out examples, calibrated as `model` is; probabilities are 0 for left-out domains.

    Copies are no further evidence, so they are not among them.
    """
    own = ~part.copied
    rows = np.zeros((int(own.sum()), len(model.names)), dtype=np.float32)
    rows[:, part.classes] = model._calibrated(part.logits[own], part.figures[own])
    return Opinions(rows, np.where(part.known[own], part.labels[own], STRANGE))


def _temperature(parts: list[_Fold]) -> float:
    """The temperature under which the labels of the held-out examples are most likely."""
    inside = [(p.logits[p.known], np.searchsorted(p.classes, p.labels[p.known])) for p in parts]

    def loss(temperature: float) -> float:
        rows = [log_softmax(logits / temperature)[np.arange(len(y)), y] for logits, y in inside]
        return -float(np.concatenate(rows).mean())

    return float(min(TEMPERATURES, key=loss))


def _distance_head(model: DomainClassifier, examples: Examples) -> Floats:
    """P(known) by the two similarities alone, equally weighted; 1/2 at 5 % of the left-out examples."""
    similar = left_out_similarities(examples.x, examples.y, model.split)
    typical = model.typical[examples.y]
    scores = np.clip((similar - typical[:, :2]) / typical[:, 2:], -FAR, FAR).sum(axis=1)
    return np.array([0, 0, 1, 1, -np.quantile(scores, 0.05)], dtype=np.float32)
