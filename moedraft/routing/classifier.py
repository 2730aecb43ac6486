"""The numbers behind the router: multinomial logistic regression, calibrated, with a probability of none.

Two things are added to scikit-learn's classifier, because a softmax must spend its whole mass on domains
it knows and so is sure of itself on prompts of none:

- a temperature, fitted on held-out examples;
- P(known), a logistic regression on four figures that say how well a prompt fits its best domain: the
  classifier's evidence (log-sum-exp of the logits), its margin, and the similarity to the domain's centroid
  in each part of the features, standardised by what the domain's own examples show when left out. It is
  fitted by leaving out, in turn, a fifth of the domains (prompts of none) and of the other examples.

With fewer than three domains there is nothing to leave out: P(known) then rests on the two similarities
alone, and is 1/2 for a prompt as far off as the worst twentieth of the left-out examples. With one domain
a classifier cannot be fitted at all, and the domain's probability is P(known).

The same model serves n-grams alone (`split` 0): the similarity of the part that is not there is always 0.
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
UNKNOWN_SHARE = 1 / 3  # of prompts assumed to fit no domain; more of it refuses more prompts of either kind
MIN_SPREAD = 0.05  # examples that hardly differ must not make every other prompt a stranger


@dataclass(frozen=True)
class DomainClassifier:
    """A fitted classifier. Rows of `weight`, `bias`, `centroids`, `typical` follow `names`."""

    names: tuple[str, ...]
    weight: Floats  # [D, F]
    bias: Floats  # [D]
    centroids: Floats  # [D, F], unit length in each of the two parts of the features
    typical: Floats  # [D, 4]: mean and spread of a left-out example's similarity, first part then second
    head: Floats  # [5]: weights of the four figures and a bias; P(known) = sigmoid
    temperature: float
    split: int  # features before it are the embedding, the others n-grams

    @classmethod
    def fit(cls, rows: Mapping[str, Floats], split: int) -> DomainClassifier:
        """From {name: features [n, F] with n >= 2}, at least one domain. Deterministic."""
        return cls.fit_and_try(rows, split)[0]

    @classmethod
    def fit_and_try(cls, rows: Mapping[str, Floats], split: int) -> tuple[DomainClassifier, Floats]:
        """Also [m, D]: what it says of examples when they, or their whole domains, are left out.

        Which examples these are, and their order, depend on the numbers of domains and examples alone, so
        that models of different features can be compared row by row. None with fewer than three domains.
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
        """[n, F] → [n, D], calibrated; what a row lacks to 1 is the probability of none."""
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
    """What a model says of examples it was not fitted on, some of them of domains it does not know."""

    figures: Floats  # [n, 4]
    logits: Floats  # [n, D']
    classes: Labels  # [D']: which of all D domains the model knows
    labels: Labels  # [n], into D
    known: NDArray[np.bool_]  # [n]: is the label among the classes?


def _fit_base(names: tuple[str, ...], x: Floats, y: Labels, split: int) -> DomainClassifier:
    """Classifier and centroids; temperature and head are still neutral."""
    weight, bias = _fit_linear(x, y, len(names))
    centroids, typical = _fit_centroids(x, y, len(names), split)
    head = np.zeros(5, dtype=np.float32)
    return DomainClassifier(names, weight, bias, centroids, typical, head, 1.0, split)


def _fit_linear(x: Floats, y: Labels, num_classes: int) -> tuple[Floats, Floats]:
    """Weights [D, F] and biases [D]; zeros where there is one class and nothing to tell apart."""
    if num_classes == 1:
        return np.zeros((1, x.shape[1]), dtype=np.float32), np.zeros(1, dtype=np.float32)
    fitted = new_regression().fit(x, y)
    weight, bias = fitted.coef_, fitted.intercept_
    if num_classes == 2:  # scikit-learn keeps one row, the second class against the first
        weight, bias = np.vstack([-weight, weight]) / 2, np.hstack([-bias, bias]) / 2
    return weight.astype(np.float32, order="C"), bias.astype(np.float32)  # the order it is kept in


def new_regression() -> Any:
    """Unfitted. Balanced, since how many examples a domain has says nothing of its traffic."""
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
    """Fit without every fifth domain and a fifth of the others' examples; look at what was left out.

    That fifth is a run of neighbours: examples listed by origin then show how far prompts of the domain
    can lie from those it was fitted on.
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
    """[n, D]: probabilities of the examples left out, calibrated as `model` is; 0 for a domain left out."""
    rows = np.zeros((len(part.logits), len(model.names)), dtype=np.float32)
    rows[:, part.classes] = model._calibrated(part.logits, part.figures)
    return rows


def _temperature(parts: list[_HeldOut]) -> float:
    """The one that makes held-out examples most likely."""
    inside = [(p.logits[p.known], np.searchsorted(p.classes, p.labels[p.known])) for p in parts]

    def loss(temperature: float) -> float:
        rows = [_log_softmax(logits / temperature)[np.arange(len(y)), y] for logits, y in inside]
        return -float(np.concatenate(rows).mean())

    return float(min(TEMPERATURES, key=loss))


def _known_head(figures: Floats, known: NDArray[np.bool_]) -> Floats:
    """[n, 4], [n] → [5]: a balanced logistic regression, moved to the prior odds of UNKNOWN_SHARE.

    Its standardisation is folded into the weights.
    """
    mean, spread = figures.mean(axis=0), np.maximum(figures.std(axis=0), 1e-6)
    fitted = LogisticRegression(class_weight="balanced").fit((figures - mean) / spread, known)
    weight = fitted.coef_[0] / spread
    prior = np.log((1 - UNKNOWN_SHARE) / UNKNOWN_SHARE)
    return np.append(weight, fitted.intercept_[0] - weight @ mean + prior).astype(np.float32)


def _distance_head(model: DomainClassifier, x: Floats, y: Labels) -> Floats:
    """Equal weights on both similarities; 1/2 at the 5 % quantile of left-out examples."""
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
