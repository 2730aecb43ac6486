"""Labels from the traffic: which are taken, how little they weigh, and who decides whether they help."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from routing_fakes import TOPICS, WordEmbedder, prompts

from moedraft.routing.fitting import Copies, Examples, fit_linear
from moedraft.routing.labels import (
    LEAST_LABELS,
    MOST_LABELS,
    TRAFFIC_SHARE,
    Label,
    Refit,
    beside,
    plausible,
)
from moedraft.routing.router import Router

EXAMPLES = {name: prompts(name, 12) for name in TOPICS}
# Another wording of the domain, of which no example has a word, beside a word that one has.
NEWER = ("inventory", "ledger", "invoice", "shipment", "warehouse", "customer", "tariff", "discount")


def newer(count: int, seed: int) -> list[str]:
    """Prompts in words that no example has, with one word of sql among them."""
    rng = np.random.default_rng(seed)
    return [" ".join([*rng.permutation(NEWER)[:5], str(rng.choice(TOPICS["sql"]))]) for _ in range(count)]


@pytest.fixture
def router(tmp_path: Path) -> Router:
    made = Router(WordEmbedder(), tmp_path)
    made.fit(EXAMPLES)
    return made


def refit(router: Router, examples: Mapping[str, list[str]], labels: list[Label]) -> Refit | None:
    """Have the router take what was tried with the labels."""
    if (trial := router.try_labels(examples, labels)) is None:
        return None
    router.take(trial)
    return trial.outcome


def routed(router: Router, texts: list[str], domain: str) -> int:
    return sum(route.domain == domain for route in router.route(texts))


def test_another_wording_is_learned_from_the_traffic(router: Router, tmp_path: Path) -> None:
    unseen = newer(40, seed=1)
    before = routed(router, unseen, "sql")
    found = refit(router, EXAMPLES, [Label(text, "sql", 0.95) for text in newer(30, seed=2)])
    assert found is not None
    assert found.taken
    assert found.labels == {"sql": len(set(newer(30, seed=2)))}
    assert 0 < found.right_before <= found.right_after <= found.examples
    assert before < 10
    assert routed(router, unseen, "sql") >= 30
    again = Router(WordEmbedder(), tmp_path)  # what another process reads
    assert routed(again, unseen, "sql") >= 30
    assert again.matches(EXAMPLES)


def test_labels_that_the_examples_contradict_are_dropped(router: Router) -> None:
    """Prompts that look like one domain, labelled as another because its expert has learned more."""
    wrong = [Label(text, "garten", 1.0) for text in prompts("maths", 40, seed=7)]
    assert refit(router, EXAMPLES, wrong) is None
    right = [Label(text, "sql", 0.9) for text in newer(30, seed=2)]
    found = refit(router, EXAMPLES, [*wrong, *right])
    assert found is not None
    assert set(found.labels) == {"sql"}
    assert routed(router, prompts("maths", 20, seed=11), "maths") == 20


def test_a_refit_that_loses_changes_nothing(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    """However good the labels look: what decides is how many examples are sent where they belong."""
    monkeypatch.setattr("moedraft.routing.labels.CONTRADICTED", 2.0)
    monkeypatch.setattr("moedraft.routing.labels.TRAFFIC_SHARE", 50.0)
    monkeypatch.setattr("moedraft.routing.labels.MOST_LABELS", 400)
    poison = [Label(text, "garten", 1.0) for text in prompts("maths", 400, seed=7)]
    file = (router.folder / "router.safetensors").read_bytes()
    found = refit(router, EXAMPLES, poison)
    assert found is not None
    assert found.right_after < found.right_before
    assert not found.taken
    assert (router.folder / "router.safetensors").read_bytes() == file


def test_nothing_is_tried_where_nothing_can_be_judged(router: Router) -> None:
    labels = [Label(text, "sql", 1.0) for text in newer(20, seed=2)]
    two = {name: EXAMPLES[name] for name in ("sql", "maths")}
    assert refit(router, two, labels) is None
    assert refit(router, EXAMPLES, []) is None
    assert refit(router, EXAMPLES, [Label(text, "sql", 1.0) for text in EXAMPLES["sql"]]) is None
    assert refit(router, EXAMPLES, [Label(text, "gone", 1.0) for text in newer(20, seed=2)]) is None


def test_the_traffic_is_embedded_once_and_never_written(router: Router) -> None:
    embedder = router.embedder
    assert isinstance(embedder, WordEmbedder)
    labels = [Label(text, "sql", 0.9) for text in dict.fromkeys(newer(12, seed=2))]
    kept = (router.folder / "embeddings.safetensors").read_bytes()
    refit(router, EXAMPLES, labels)
    embedder.embedded.clear()
    refit(router, EXAMPLES, labels)
    assert not set(embedder.embedded) & {label.text for label in labels}
    assert (router.folder / "embeddings.safetensors").read_bytes() == kept


def test_labels_are_bounded_and_balanced_and_few_are_none() -> None:
    many = [Label(str(i), "a", 0.9) for i in range(2 * MOST_LABELS)]
    few = [Label(f"few {i}", "b", 0.9) for i in range(LEAST_LABELS - 1)]
    chosen = plausible([*many, *few], np.full((len(many) + len(few), 2), 0.1, np.float32), ("a", "b"))
    assert [label.text for _, label in chosen] == [str(i) for i in range(MOST_LABELS)]
    sure_of_b = np.tile(np.array([[0.2, 0.7]], np.float32), (len(many), 1))
    assert plausible(many, sure_of_b, ("a", "b")) == []


def test_the_examples_weigh_more_than_all_labels() -> None:
    rng = np.random.default_rng(0)
    own, x = rng.normal(size=(10, 6)).astype(np.float32), rng.normal(size=(64, 6)).astype(np.float32)
    made = beside(own, x, np.full(64, 0.9, np.float32))
    assert made.weights.sum() == pytest.approx(TRAFFIC_SHARE * len(own), rel=1e-4)
    assert made.places.tolist() == (x @ own.T).argmax(1).tolist()
    assert beside(own, x[:2], np.full(2, 0.5, np.float32)).weights.tolist() == [0.5, 0.5]


def test_weights_of_one_are_no_weights() -> None:
    """And a row of half the weight moves the fit less than a whole one."""
    rng = np.random.default_rng(1)
    rows = {name: rng.normal(size=(12, 5)).astype(np.float32) for name in ("a", "b", "c")}
    extra, places = rng.normal(size=(6, 5)).astype(np.float32), np.zeros(6, np.int64)

    def fitted(weight: float | None) -> np.ndarray:  # type: ignore[type-arg]
        weights = None if weight is None else np.full(6, weight, np.float32)
        return fit_linear(Examples.of(rows, {"a": Copies(extra, places, weights)}), 3)[0]

    none = fit_linear(Examples.of(rows, {}), 3)[0]
    np.testing.assert_allclose(fitted(1.0), fitted(None))
    assert 0 < np.abs(fitted(0.1) - none).sum() < np.abs(fitted(1.0) - none).sum()
