"""Routing with a fake embedder: outcomes, refitting, what the folder keeps and what spoils it."""

from __future__ import annotations

import time
from dataclasses import FrozenInstanceError
from pathlib import Path

import numpy as np
import pytest
from routing_fakes import WordEmbedder, prompts
from threadpoolctl import threadpool_limits

from moedraft.core import SHARED, InvalidRequest, StorageError
from moedraft.routing.rewording import copies
from moedraft.routing.router import (
    CACHE_FILE,
    MAX_COPIES,
    MAX_EXAMPLES,
    ROUTER_FILE,
    ROUTER_VERSION,
    Router,
)

STRANGE = "quasar nebula telescope xylophone 1234567"


def test_without_domains_nothing_is_embedded(tmp_path: Path, embedder: WordEmbedder) -> None:
    router = Router(embedder, tmp_path / "router")
    assert router.domains == ()
    assert router.matches({})
    assert [r.domain for r in router.route(["one", "two"])] == [SHARED, SHARED]
    assert router.route(["one"])[0].probabilities == {SHARED: 1.0}
    assert router.probabilities(["one"])[1].shape == (1, 0)
    assert list(router.warm_up()) == []  # there is nothing to be ready for
    assert embedder.embedded == []
    assert not (tmp_path / "router").exists()


def test_routes_a_batch_in_order(
    tmp_path: Path, embedder: WordEmbedder, examples: dict[str, list[str]]
) -> None:
    router = Router(embedder, tmp_path)
    router.fit(examples)
    names = [name for name in examples for _ in range(6)]
    texts = [text for name in examples for text in prompts(name, 6, seed=1)]
    routes = router.route([*texts, STRANGE])
    assert np.mean([r.domain == name for r, name in zip(routes, names, strict=False)]) >= 0.9
    assert routes[-1].domain == SHARED
    for route in routes:
        assert set(route.probabilities) == {*examples, SHARED}
        assert sum(route.probabilities.values()) == pytest.approx(1, abs=1e-5)
        assert route.confidence == max(p for name, p in route.probabilities.items() if name != SHARED)
    with pytest.raises(FrozenInstanceError):
        routes[0].domain = "other"  # type: ignore[misc]


def test_the_answer_does_not_depend_on_the_batch(
    tmp_path: Path, embedder: WordEmbedder, examples: dict[str, list[str]]
) -> None:
    router = Router(embedder, tmp_path)
    router.fit(examples)
    texts = prompts("sql", 3, seed=1) + prompts("garten", 3, seed=1)
    for text, together in zip(texts, router.route(texts), strict=True):
        alone = router.route([text])[0]
        assert alone.domain == together.domain
        assert alone.confidence == pytest.approx(together.confidence, abs=1e-5)


@pytest.mark.parametrize(("threshold", "all_shared"), [(0.0, False), (1.01, True)])
def test_below_the_threshold_all_is_shared(
    tmp_path: Path, embedder: WordEmbedder, examples: dict[str, list[str]], threshold: float, all_shared: bool
) -> None:
    router = Router(embedder, tmp_path, threshold)
    router.fit(examples)
    assert all((r.domain == SHARED) == all_shared for r in router.route([STRANGE, *prompts("sql", 3)]))


def test_blank_prompts_are_shared(
    tmp_path: Path, embedder: WordEmbedder, examples: dict[str, list[str]]
) -> None:
    router = Router(embedder, tmp_path, threshold=0.0)
    router.fit(examples)
    blank, full, empty = router.route(["  \n", prompts("sql", 1)[0], ""])
    assert (blank.domain, full.domain, empty.domain) == (SHARED, "sql", SHARED)
    assert blank.probabilities[SHARED] == 1
    assert router.route([]) == []


def test_refit_embeds_only_new_examples(
    tmp_path: Path, embedder: WordEmbedder, examples: dict[str, list[str]]
) -> None:
    router = Router(embedder, tmp_path)
    router.fit(examples)
    embedder.embedded.clear()
    router.fit(examples | {"weather": prompts("weather", 12)})
    new = prompts("weather", 12)
    assert set(embedder.embedded) == {*new, *(text for _, text in copies(new, MAX_COPIES))}
    embedder.embedded.clear()
    del examples["sql"]
    router.fit(examples)
    assert embedder.embedded == []
    assert "sql" not in router.domains
    router.fit(examples | {"sql": prompts("sql", 16)})
    assert embedder.embedded, "what no domain uses is not kept"
    embedder.embedded.clear()
    for _ in router.warm_up():
        pass
    assert embedder.embedded, "it is ready for prompts"


def test_the_order_of_examples_does_not_matter(
    tmp_path: Path, embedder: WordEmbedder, examples: dict[str, list[str]]
) -> None:
    first, second = Router(embedder, tmp_path / "a"), Router(embedder, tmp_path / "b")
    first.fit(examples)
    second.fit(dict(reversed(examples.items())))
    assert first.domains == second.domains
    assert first.route([STRANGE])[0].probabilities == second.route([STRANGE])[0].probabilities


def test_a_router_comes_back_from_its_folder(
    tmp_path: Path, embedder: WordEmbedder, examples: dict[str, list[str]]
) -> None:
    first = Router(embedder, tmp_path)
    first.fit(examples)
    texts = [*prompts("maths", 4, seed=2), STRANGE]
    second = Router(embedder, tmp_path)
    assert second.domains == first.domains
    assert second.route(texts) == first.route(texts)
    assert second.matches(examples)
    assert not second.matches({**examples, "sql": prompts("sql", 9)})
    second.fit({})
    assert Router(embedder, tmp_path).domains == ()
    assert sorted(p.name for p in tmp_path.iterdir()) == [CACHE_FILE, ROUTER_FILE]


def test_another_embedder_or_version_starts_empty(
    tmp_path: Path, embedder: WordEmbedder, examples: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    Router(embedder, tmp_path).fit(examples)
    other = Router(WordEmbedder("words/2"), tmp_path)
    assert other.domains == ()
    assert not other.matches(examples)
    monkeypatch.setattr("moedraft.routing.router.ROUTER_VERSION", ROUTER_VERSION + 1)
    assert Router(embedder, tmp_path).domains == ()


@pytest.mark.parametrize("name", [ROUTER_FILE, CACHE_FILE])
@pytest.mark.parametrize("damage", ["cut", "garbage", "gone"])
def test_damaged_files_only_cost_a_refit(
    tmp_path: Path, embedder: WordEmbedder, examples: dict[str, list[str]], name: str, damage: str
) -> None:
    Router(embedder, tmp_path).fit(examples)
    file = tmp_path / name
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:100] if damage == "cut" else b"\x07garbage" * 20)
    router = Router(embedder, tmp_path)
    assert router.matches(examples) == (name == CACHE_FILE)
    router.fit(examples)
    assert router.route(prompts("sql", 1))[0].domain == "sql"
    assert Router(embedder, tmp_path).matches(examples)


def test_too_few_examples_change_nothing(
    tmp_path: Path, embedder: WordEmbedder, examples: dict[str, list[str]]
) -> None:
    router = Router(embedder, tmp_path)
    router.fit(examples)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(InvalidRequest, match="'new' needs at least two"):
        router.fit(examples | {"new": ["only one"]})
    assert "new" not in router.domains
    assert before == {p.name: p.read_bytes() for p in tmp_path.iterdir()}


def test_a_failed_write_keeps_the_old_router(
    tmp_path: Path, embedder: WordEmbedder, examples: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    router = Router(embedder, tmp_path)
    router.fit(examples)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        router.fit({"sql": examples["sql"], "weather": prompts("weather", 8)})
    monkeypatch.undo()
    assert set(router.domains) == set(examples)
    assert set(Router(embedder, tmp_path).domains) == set(examples)
    assert not list(tmp_path.glob(".*")), "no temporary file stays"


def test_many_examples_are_thinned_evenly(tmp_path: Path, embedder: WordEmbedder) -> None:
    many = {name: [f"{text} {i}" for i, text in enumerate(prompts(name, 300))] for name in ("sql", "maths")}
    router = Router(embedder, tmp_path)
    router.fit(many)
    assert len(embedder.embedded) == 2 * (MAX_EXAMPLES + MAX_COPIES)
    taken = sorted({many["sql"].index(text) for text in embedder.embedded if text in many["sql"]})
    assert max(np.diff(taken)) <= 3
    assert (taken[0], taken[-1] >= 297) == (0, True)
    assert router.matches(many)


def test_fifteen_domains_are_refitted_in_seconds(tmp_path: Path) -> None:
    """Of the processor, so that a busy machine does not count; and threads that wait for each other do not
    spend more than the work itself."""
    rng = np.random.default_rng(0)
    words = [f"word{i}" for i in range(300)]
    many = {
        f"d{i}": [" ".join(rng.permutation(words[i * 20 : i * 20 + 20])[:8]) for _ in range(40)]
        for i in range(15)
    }
    router = Router(WordEmbedder(size=384), tmp_path)
    with threadpool_limits(2, user_api="blas"):
        began, own = time.process_time(), time.thread_time()
        router.fit(many)
        spent, own = time.process_time() - began, time.thread_time() - own
    assert spent < 10  # about half a second, and eleven with two threads
    assert spent < 1.5 * own + 0.2
