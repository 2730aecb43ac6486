"""The classifier's numbers: scikit-learn's probabilities, calibration, prompts of none, loading."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from routing_fakes import WordEmbedder, prompts

from moedraft.routing.classifier import TEMPERATURES, DomainClassifier
from moedraft.routing.embedder import Floats, features
from moedraft.routing.fitting import new_regression

EMBEDDER = WordEmbedder()


def rows_of(texts: Sequence[str]) -> Floats:
    return features(EMBEDDER.embed(texts), texts)


def training_rows(*domains: str, count: int = 16) -> dict[str, Floats]:
    return {domain: rows_of(prompts(domain, count)) for domain in domains}


def softmax(logits: Floats) -> Floats:
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(e / e.sum(axis=1, keepdims=True))


@pytest.mark.parametrize(
    "domains", [("sql", "maths"), ("sql", "maths", "python"), ("sql", "maths", "garten", "kochen")]
)
def test_weights_give_what_sklearn_predicts(domains: tuple[str, ...]) -> None:
    rows = training_rows(*domains)
    x, y = np.vstack(list(rows.values())), np.repeat(np.arange(len(domains)), 16)
    reference = new_regression().fit(x, y)
    tests = rows_of([text for domain in domains for text in prompts(domain, 5, seed=1)])
    model = DomainClassifier.fit(rows, EMBEDDER.size)
    kept = DomainClassifier.unpack(*model.pack())
    assert kept is not None
    np.testing.assert_allclose(softmax(kept.logits(tests)), reference.predict_proba(tests), atol=2e-6)
    # Negative control: other weights would not have passed.
    assert np.abs(softmax(1.05 * kept.logits(tests)) - reference.predict_proba(tests)).max() > 1e-4


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_own_prompts_are_known_and_others_are_not(count: int) -> None:
    domains = ("sql", "maths", "python", "kochen", "garten", "weather")[:count]
    model = DomainClassifier.fit(training_rows(*domains), EMBEDDER.size)
    for index, domain in enumerate(domains):
        own = model.probabilities(rows_of(prompts(domain, 20, seed=1)))
        assert own.shape == (20, count)
        assert (own.argmax(axis=1) == index).mean() == 1
        assert (own[:, index] >= 0.35).mean() >= 0.8
    strange = model.probabilities(
        rows_of([f"quasar {i} nebula telescope xylophone {i * 7}" for i in range(20)])
    )
    assert (strange.max(axis=1) < 0.35).mean() >= 0.8


def test_rows_are_probabilities() -> None:
    model = DomainClassifier.fit(training_rows("sql", "maths", "python"), EMBEDDER.size)
    rows = model.probabilities(rows_of(["", "select rows", "apples total 3", "\U0001f600" * 50, "z" * 5000]))
    assert np.isfinite(rows).all()
    assert (rows >= 0).all()
    assert (rows.sum(axis=1) <= 1 + 1e-6).all()


def test_one_domain_is_judged_by_likeness_alone() -> None:
    rows = training_rows("sql", count=40)
    model = DomainClassifier.fit(rows, EMBEDDER.size)
    assert not model.weight.any()
    np.testing.assert_allclose(model.probabilities(rows["sql"])[:, 0], model.known(rows["sql"]))
    assert (model.known(rows["sql"]) > 0.5).mean() >= 0.95


def test_temperature_is_fitted_and_sharpens() -> None:
    """Weights of a penalised fit are too careful on domains this easy."""
    model = DomainClassifier.fit(training_rows("sql", "maths", "python", "kochen"), EMBEDDER.size)
    assert TEMPERATURES[0] <= model.temperature < 1


def test_fit_is_deterministic_on_few_examples() -> None:
    rows = training_rows("sql", "maths", "python", count=2)
    first, second = DomainClassifier.fit(rows, EMBEDDER.size), DomainClassifier.fit(rows, EMBEDDER.size)
    np.testing.assert_array_equal(first.weight, second.weight)
    np.testing.assert_array_equal(first.head, second.head)
    same = {name: np.repeat(block[:1], 8, axis=0) for name, block in rows.items()}
    assert np.isfinite(DomainClassifier.fit(same, EMBEDDER.size).probabilities(rows["sql"])).all()


def test_unequal_numbers_of_examples_do_not_bias() -> None:
    rows = training_rows("sql", "maths") | {"python": rows_of(prompts("python", 120))}
    model = DomainClassifier.fit(rows, EMBEDDER.size)
    tests = rows_of(prompts("sql", 20, seed=1))
    assert (model.logits(tests).argmax(axis=1) == 0).all()


def test_damaged_contents_are_refused() -> None:
    tensors, text = DomainClassifier.fit(training_rows("sql", "maths"), EMBEDDER.size).pack()
    assert DomainClassifier.unpack(tensors, text) is not None
    assert DomainClassifier.unpack({**tensors, "bias": tensors["bias"][:1]}, text) is None
    assert DomainClassifier.unpack({k: v for k, v in tensors.items() if k != "head"}, text) is None
    assert DomainClassifier.unpack(tensors, {}) is None
    assert DomainClassifier.unpack(tensors, {"model": "{"}) is None
    assert DomainClassifier.unpack(tensors, {"model": "[" * 100_000}) is None
