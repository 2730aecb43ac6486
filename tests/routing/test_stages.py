"""The first stage: what it decides without the embedder, when it may, and that the rest is as before."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from routing_fakes import WordEmbedder, distinct, prompts

from moedraft.core import SHARED
from moedraft.routing.embedder import Floats, char_ngrams, features, join, read_tensors, write_tensors
from moedraft.routing.router import ROUTER_FILE, Router
from moedraft.routing.stages import NEVER, TwoStage

STRANGE = "quasar nebula telescope xylophone 1234567"


class CountingEmbedder(WordEmbedder):
    """Keeps the batches that it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[str]] = []

    def embed(self, texts: Sequence[str]) -> Floats:
        self.batches.append(list(texts))
        return super().embed(texts)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Router:
    """Ten domains that n-grams tell apart, and two that hold each other's words."""
    made = Router(CountingEmbedder(), tmp_path_factory.mktemp("router"))
    mixed = [f"{a} {b}" for a, b in zip(prompts("sql", 24), prompts("python", 24), strict=True)]
    made.fit(distinct(10, 24) | {"mixed": mixed, "sql": prompts("sql", 24, seed=5)})
    return made


@pytest.fixture
def router(fitted: Router) -> Router:
    """Not to be fitted again: all tests share it."""
    return fitted


@pytest.fixture
def counting(fitted: Router) -> CountingEmbedder:
    """The router's."""
    assert isinstance(fitted.embedder, CountingEmbedder)
    fitted.embedder.batches.clear()
    return fitted.embedder


def own(domain: str, count: int = 4) -> list[str]:
    return distinct(10, count, seed=1)[domain]


def test_sure_prompts_are_not_embedded(router: Router, counting: CountingEmbedder) -> None:
    texts = [text for domain in ("d00", "d05", "d09") for text in own(domain)]
    routes = router.route(texts)
    assert [r.domain for r in routes] == ["d00"] * 4 + ["d05"] * 4 + ["d09"] * 4
    assert counting.batches == []
    for route in routes:
        assert sum(route.probabilities.values()) == pytest.approx(1, abs=1e-5)
        assert route.confidence == route.probabilities[route.domain] >= router.threshold


def test_unsure_prompts_are_embedded_in_one_batch(router: Router, counting: CountingEmbedder) -> None:
    unsure = [STRANGE, "select table method loop", "rows join tuple class"]
    texts = [unsure[0], *own("d03", 2), unsure[1], "", *own("d07", 1), unsure[2]]
    routes = router.route(texts)
    assert counting.batches == [unsure]
    assert [routes[i].domain for i in (0, 1, 2, 4, 5)] == [SHARED, "d03", "d03", SHARED, "d07"]
    alone = [router.route([text])[0] for text in texts]
    assert [r.domain for r in alone] == [r.domain for r in routes]


def test_unsure_prompts_get_the_full_models_route(router: Router, counting: CountingEmbedder) -> None:
    full = Router(counting, router.folder, first_stage=False)
    unsure = [STRANGE, "select table method loop", "rows join tuple class"]
    assert router.route(unsure) == full.route(unsure)
    for mixed, alone in zip(router.route([*own("d03"), *unsure])[-3:], full.route(unsure), strict=True):
        assert mixed.domain == alone.domain
        assert mixed.probabilities == pytest.approx(alone.probabilities, abs=1e-6)
    counting.batches.clear()
    sure = [text for domain in full.domains[:10] for text in own(domain)]
    assert [r.domain for r in full.route(sure)] == [r.domain for r in router.route(sure)]
    assert counting.batches == [sure], "without a first stage every prompt is embedded"


def test_strangers_are_not_claimed(router: Router, counting: CountingEmbedder) -> None:
    texts = [STRANGE, "z" * 5000, "\U0001f600" * 50, *prompts("weather", 8), *distinct(14, 4, seed=2)["d13"]]
    router.route(texts)
    assert counting.batches == [texts]


@pytest.mark.parametrize(("domains", "count"), [(1, 40), (2, 40), (9, 40), (10, 2), (10, 5), (10, 8)])
def test_few_examples_never_decide(
    tmp_path: Path, counting: CountingEmbedder, domains: int, count: int
) -> None:
    router = Router(counting, tmp_path)
    router.fit(distinct(domains, count))
    counting.batches.clear()
    texts = distinct(domains, 2, seed=1)["d00"]
    router.route(texts)
    assert counting.batches == [texts]


def test_both_stages_come_back_from_the_file(router: Router, counting: CountingEmbedder) -> None:
    again = Router(counting, router.folder)
    texts = [*own("d01"), STRANGE, *own("d02")]
    assert again.route(texts) == router.route(texts)
    assert counting.batches == [[STRANGE], [STRANGE]]


@pytest.mark.parametrize("version", ["1", "0", ""])
def test_an_old_file_is_fitted_again(
    router: Router, counting: CountingEmbedder, tmp_path: Path, version: str
) -> None:
    file = shutil.copy(router.folder / ROUTER_FILE, tmp_path / ROUTER_FILE)
    contents = read_tensors(file)
    assert contents is not None
    write_tensors(file, contents[0], contents[1] | {"version": version})
    old = Router(counting, tmp_path)
    assert old.domains == ()
    assert not old.matches(distinct(10, 24))
    old.fit(distinct(10, 24))
    assert old.route(own("d04"))[0].domain == "d04"
    assert Router(counting, tmp_path).matches(distinct(10, 24))


@pytest.fixture(scope="module")
def model() -> TwoStage:
    words = WordEmbedder()
    examples = distinct(10, 24)
    return TwoStage.fit({d: features(words.embed(t), t) for d, t in examples.items()}, words.size)


def test_damaged_contents_are_refused(model: TwoStage) -> None:
    tensors, text = model.pack()
    kept = TwoStage.unpack(tensors, text)
    assert kept is not None
    np.testing.assert_array_equal(kept.trials, model.trials)
    for name in tensors:
        assert TwoStage.unpack({k: v for k, v in tensors.items() if k != name}, text) is None
        assert TwoStage.unpack(tensors | {name: tensors[name].ravel()[:3]}, text) is None
    for name in text:
        assert TwoStage.unpack(tensors, {k: v for k, v in text.items() if k != name}) is None
    narrow = replace(model, ngrams=replace(model.ngrams, weight=model.ngrams.weight[:, 1:]))
    assert TwoStage.unpack(*narrow.pack()) is None
    fewer = replace(model, ngrams=replace(model.ngrams, names=("other", *model.names[1:])))
    assert TwoStage.unpack(*fewer.pack()) is None


def test_without_a_threshold_it_decides_nothing(model: TwoStage) -> None:
    words, texts = WordEmbedder(), distinct(10, 1, seed=1)["d00"]
    asked: list[list[int]] = []

    def embed(rows: np.ndarray) -> Floats:
        asked.append(rows.tolist())
        return words.embed([texts[row] for row in rows])

    found = model.probabilities(char_ngrams(texts), embed)
    assert asked == [[0]]
    reference = model.full.probabilities(join(words.embed(texts), char_ngrams(texts)))
    np.testing.assert_array_equal(found, reference)
    assert model.deciding(0.35).probabilities(char_ngrams(texts), embed).argmax() == 0
    assert asked == [[0]]
    assert model.deciding(1.01).sure == NEVER, "where all is shared there is nothing to agree on"


def test_confidence_needed_follows_the_trials(model: TwoStage) -> None:
    """Confidences 1.00, 0.99, 0.98 …; the full model agrees with all but those below 0.5."""

    def needed(trials: Floats, threshold: float) -> float:
        return replace(model, trials=trials).deciding(threshold).sure

    confidence = np.linspace(1, 0, 101)
    agree = np.where(confidence > 0.495, 0.9, -1)
    repeated = np.column_stack([confidence, agree]).repeat(10, axis=0)
    # 510 agree, so 4 more may be wrong: (4 + 1) / (514 + 2) is below 1 %; doubt .51 is halved.
    assert needed(repeated, 0.35) == pytest.approx(1 - 0.51 / 2)
    assert needed(repeated, 0.8) == pytest.approx(0.8), "never below the threshold"
    assert needed(repeated[:98], 0.35) < 1
    assert needed(repeated[:97], 0.35) == NEVER
    assert needed(repeated, 0.95) == NEVER, "the full model would have said shared"
    assert needed(repeated[:0], 0.35) == NEVER
