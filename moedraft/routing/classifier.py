"""Features of a prompt → the probability of each domain, and of none: a calibrated logistic regression.

A softmax spends its whole mass on the domains it knows, and so is sure of itself even for prompts that belong
to none of them. Two things are therefore added to scikit-learn's multinomial logistic regression:

- a temperature, fitted on held-out examples;
- P(known), the probability that the prompt belongs to any known domain. It is a logistic regression on four
  figures that say how well a prompt fits its best domain: the evidence (log-sum-exp of the logits), the
  margin to the second best, and the similarity to the domain's centroid in each of the two parts of the
  features, standardised by the similarities that the domain's own examples show when they are left out. It
  is fitted by leaving out, in turn, a fifth of the domains (whose examples then belong to none) and of the
  other examples.

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
from sklearn.linear_model import LogisticRegression

from moedraft.routing.embedder import Floats, unit

Labels = NDArray[np.int64]

FOLDS = 5
INVERSE_PENALTY = 100.0  # features are unit vectors, so weights must be large to matter
TEMPERATURES = np.geomspace(0.2, 5.0, 65)
UNKNOWN_SHARE = 1 / 3  # assumed share of prompts that fit no domain; a higher one refuses more of all prompts
MIN_SPREAD = 0.05  # so that a domain with nearly equal examples does not reject every other prompt


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
    split: int  # the first `split` features are the embedding, the others n-grams

    @classmethod
    def fit(cls, rows: Mapping[str, Floats], split: int) -> DomainClassifier:
        """Fit {name: features [n, F] with n >= 2}, at least one domain. Deterministic."""
        return cls.fit_and_try(rows, split)[0]

    @classmethod
    def fit_and_try(cls, rows: Mapping[str, Floats], split: int) -> tuple[DomainClassifier, Floats]:
        """`fit`, with [m, D]: the probabilities that examples get when they or their domains are left out.

        Which examples these are, and in which order, depends on the numbers of domains and examples alone, so
        that classifiers of different features can be compared row by row. With two domains or one m is 0.
        """
        names = tuple(rows)
        x = np.vstack([rows[name] for name in names])
        y = np.repeat(np.arange(len(names)), [len(rows[name]) for name in names])
        model = _fit_base(names, x, y, split)
        if len(names) < 3:
            return replace(model, head=_distance_head(model, x, y)), np.zeros((0, len(names)), np.float32)
        held_out = [_held_out(names, x, y, split, fold) for fold in range(min(FOLDS, len(names)))]
        figures = np.vstack([part.figures for part in held_out])
        known = np.concatenate([part.known for part in held_out])
        model = replace(model, head=_known_head(figures, known), temperature=_temperature(held_out))
        return model, np.vstack([_opinions(model, part) for part in held_out])

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
        similar = (_similarities(x, self.centroids, self.split)[np.arange(len(x)), best] - mean) / spread
        return np.column_stack([_logsumexp(logits), margin, similar]).astype(np.float32)

    def known(self, x: Floats) -> Floats:
        """[n, F] → [n]: the probability that a prompt belongs to any of the domains."""
        return self._known(self.figures(x))

    def probabilities(self, x: Floats) -> Floats:
        """[n, F] → [n, D], calibrated; 1 − a row's sum is the probability of none."""
        return self._calibrated(self.logits(x), self.figures(x))

    def _known(self, figures: Floats) -> Floats:
        return _sigmoid(figures @ self.head[:-1] + self.head[-1])

    def _calibrated(self, logits: Floats, figures: Floats) -> Floats:
        return _softmax(logits / self.temperature) * self._known(figures)[:, None]

    def pack(self) -> tuple[dict[str, Floats], dict[str, str]]:
        """Tensors and text, as safetensors keeps them."""
        scalars = {"names": self.names, "temperature": self.temperature, "split": self.split}
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
            names, temperature = tuple(scalars["names"]), float(scalars["temperature"])
            model = cls(names=names, temperature=temperature, split=int(scalars["split"]), **arrays)
        except (KeyError, TypeError, ValueError, RecursionError):  # the last: nested too deeply
            return None
        d, f = len(model.names), model.weight.shape[-1]
        shapes = {"weight": (d, f), "bias": (d,), "centroids": (d, f), "typical": (d, 4), "head": (5,)}
        return model if all(arrays[name].shape == shape for name, shape in shapes.items()) else None


_TENSORS = ("weight", "bias", "centroids", "typical", "head")


@dataclass(frozen=True)
class _HeldOut:
    """What a classifier says of examples it was not fitted on; some belong to domains it does not know."""

    figures: Floats  # [n, 4]
    logits: Floats  # [n, D']
    classes: Labels  # [D']: which of all D domains the model knows
    labels: Labels  # [n], into D
    known: NDArray[np.bool_]  # [n]: whether the label is among the classes


def _fit_base(names: tuple[str, ...], x: Floats, y: Labels, split: int) -> DomainClassifier:
    """A classifier with weights and centroids, but without a fitted temperature or head."""
    weight, bias = _fit_linear(x, y, len(names))
    centroids, typical = _fit_centroids(x, y, len(names), split)
    head = np.zeros(5, dtype=np.float32)
    return DomainClassifier(names, weight, bias, centroids, typical, head, 1.0, split)


def _fit_linear(x: Floats, y: Labels, num_classes: int) -> tuple[Floats, Floats]:
    """Weights [D, F] and biases [D]; zeros where there is only one class."""
    if num_classes == 1:
        return np.zeros((1, x.shape[1]), dtype=np.float32), np.zeros(1, dtype=np.float32)
    fitted = new_regression().fit(x, y)
    weight, bias = fitted.coef_, fitted.intercept_
    if num_classes == 2:  # scikit-learn keeps one row, the second class against the first
        weight, bias = np.vstack([-weight, weight]) / 2, np.hstack([-bias, bias]) / 2
    return weight.astype(np.float32, order="C"), bias.astype(np.float32)  # safetensors keeps C order


def new_regression() -> Any:
    """A logistic regression, not fitted yet. Balanced: examples do not tell how common a domain is."""
    return LogisticRegression(C=INVERSE_PENALTY, max_iter=1000, class_weight="balanced")


def _fit_centroids(x: Floats, y: Labels, num_classes: int, split: int) -> tuple[Floats, Floats]:
    """Centroids [D, F] and the mean and spread of left-out examples' similarities [D, 4]."""
    parts = _unit_parts(x, split)
    sums = np.stack([parts[y == label].sum(axis=0) for label in range(num_classes)])
    similar = _left_out_similarities(x, y, split)
    mean = np.stack([similar[y == label].mean(axis=0) for label in range(num_classes)])
    spread = np.stack([similar[y == label].std(axis=0) for label in range(num_classes)])
    typical = np.hstack([mean, np.maximum(spread, MIN_SPREAD)]).astype(np.float32)
    return _unit_parts(sums, split), typical


def _left_out_similarities(x: Floats, y: Labels, split: int) -> Floats:
    """[n, F] → [n, 2]: each example against the centroid of its domain's other examples, in both parts."""
    parts = _unit_parts(x, split)
    sums = np.stack([parts[y == label].sum(axis=0) for label in range(int(y.max()) + 1)])
    products = parts * _unit_parts(sums[y] - parts, split)
    return np.column_stack([products[:, :split].sum(axis=1), products[:, split:].sum(axis=1)])


def _held_out(names: tuple[str, ...], x: Floats, y: Labels, split: int, fold: int) -> _HeldOut:
    """Fit without every fifth domain and without a fifth of the others' examples; classify what was left out.

    That fifth is a run of consecutive examples. Where examples are listed by origin, this shows how far other
    prompts of the domain can lie from those that it was fitted on.
    """
    folds = min(FOLDS, len(names))
    block = np.concatenate([np.arange(n) * folds // n for n in np.bincount(y)])
    stranger = y % folds == fold
    kept = ~stranger & (block != fold)
    rest = ~kept
    classes, labels = np.unique(y[kept], return_inverse=True)
    model = _fit_base(tuple(names[label] for label in classes), x[kept], labels, split)
    return _HeldOut(model.figures(x[rest]), model.logits(x[rest]), classes, y[rest], ~stranger[rest])


def _opinions(model: DomainClassifier, part: _HeldOut) -> Floats:
    """[n, D]: probabilities of the left-out examples, calibrated as `model` is; 0 for left-out domains."""
    rows = np.zeros((len(part.logits), len(model.names)), dtype=np.float32)
    rows[:, part.classes] = model._calibrated(part.logits, part.figures)
    return rows


def _temperature(parts: list[_HeldOut]) -> float:
    """The temperature under which the labels of the held-out examples are most likely."""
    inside = [(p.logits[p.known], np.searchsorted(p.classes, p.labels[p.known])) for p in parts]

    def loss(temperature: float) -> float:
        rows = [_log_softmax(logits / temperature)[np.arange(len(y)), y] for logits, y in inside]
        return -float(np.concatenate(rows).mean())

    return float(min(TEMPERATURES, key=loss))


def _known_head(figures: Floats, known: NDArray[np.bool_]) -> Floats:
    """Figures [n, 4] and labels [n] → [5]: the weights and the bias of P(known).

    A balanced logistic regression on standardised figures, moved to the prior odds of UNKNOWN_SHARE; the
    standardisation is folded into the weights.
    """
    mean, spread = figures.mean(axis=0), np.maximum(figures.std(axis=0), 1e-6)
    fitted = LogisticRegression(class_weight="balanced").fit((figures - mean) / spread, known)
    weight = fitted.coef_[0] / spread
    prior = np.log((1 - UNKNOWN_SHARE) / UNKNOWN_SHARE)
    return np.append(weight, fitted.intercept_[0] - weight @ mean + prior).astype(np.float32)


def _distance_head(model: DomainClassifier, x: Floats, y: Labels) -> Floats:
    """P(known) by the two similarities alone, equally weighted; 1/2 at 5 % of the left-out examples."""
    similar = _left_out_similarities(x, y, model.split)
    scores = ((similar - model.typical[y, :2]) / model.typical[y, 2:]).sum(axis=1)
    return np.array([0, 0, 1, 1, -np.quantile(scores, 0.05)], dtype=np.float32)


def _unit_parts(x: Floats, split: int) -> Floats:
    return np.hstack([unit(x[:, :split]), unit(x[:, split:])])


def _similarities(x: Floats, centroids: Floats, split: int) -> Floats:
    """Cosines of both parts: [n, F], [D, F] → [n, D, 2]."""
    parts = _unit_parts(x, split)
    return np.stack(
        [parts[:, :split] @ centroids[:, :split].T, parts[:, split:] @ centroids[:, split:].T], axis=2
    )


def _logsumexp(logits: Floats) -> Floats:
    top = logits.max(axis=1)
    return np.asarray(top + np.log(np.exp(logits - top[:, None]).sum(axis=1)), dtype=np.float32)


def _log_softmax(logits: Floats) -> Floats:
    return logits - _logsumexp(logits)[:, None]


def _softmax(logits: Floats) -> Floats:
    return np.exp(_log_softmax(logits))


def _sigmoid(values: Floats) -> Floats:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * values)), dtype=np.float32)
