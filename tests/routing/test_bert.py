"""The router that is a fine-tuned BERT: it learns, is kept in one file, and refuses what it cannot load."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from routing_fakes import TOPICS, WordEmbedder, prompts
from transformers import BertConfig, BertModel, BertTokenizerFast

from moedraft.config import Settings, load_settings
from moedraft.core import SHARED, InvalidRequest
from moedraft.routing import bert as bert_module
from moedraft.routing.bert import BERT_FILE, BertRouter
from moedraft.routing.labels import Label
from moedraft.routing.router import ROUTER_FILE, Router
from moedraft.storage.changes import REFIT, knows_deleted, last_refit
from moedraft.storage.store import Store
from moedraft.system import build as build_module
from moedraft.system.build import FITTING, ROUTER_FOLDER, open_router
from moedraft.system.domains.registering import register_all, register_domain, remove_domain

EXAMPLES = {name: prompts(name, 20) for name in ("sql", "maths", "python")}
LEARNS = {"epochs": 20, "learning_rate": 2e-3}


def tiny_bert(folder: Path, *, safe: bool = True) -> Path:
    """A BERT of random weights with a word for each that the topics have, as a folder of its own."""
    torch.manual_seed(0)
    words = [word.lower() for topic in TOPICS.values() for word in topic]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *dict.fromkeys(words)]
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=160,
        initializer_range=0.15,  # the usual 0.02 learns slowly in a model this small
    )
    BertModel(config).save_pretrained(folder)
    if not safe:
        weights = folder / "model.safetensors"
        weights.rename(folder / "pytorch_model.bin")
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(scope="module")
def fitted(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> BertRouter:
    made = BertRouter(WordEmbedder(), tmp_path_factory.mktemp("home"), source=str(bert), **LEARNS)
    made.fit(EXAMPLES)
    return made


def test_it_learns_the_domains(fitted: BertRouter) -> None:
    for name in EXAMPLES:
        routes = fitted.route(prompts(name, 20, seed=5))
        assert sum(route.domain == name for route in routes) >= 17, name
        assert all(sum(route.probabilities.values()) == pytest.approx(1, abs=1e-4) for route in routes)


def test_what_is_like_no_example_fits_less_than_what_is(fitted: BertRouter) -> None:
    own = [route.confidence for name in EXAMPLES for route in fitted.route(prompts(name, 20, seed=5))]
    strange = [route.confidence for name in ("kochen", "garten") for route in fitted.route(prompts(name, 20))]
    assert np.median(strange) < np.median(own)
    assert fitted.route(["", "  "])[0].domain == SHARED
    assert list(fitted.warm_up()) == [None]


def test_another_process_reads_the_same_router(fitted: BertRouter, bert: Path) -> None:
    again = BertRouter(WordEmbedder(), fitted.folder, source=str(bert))
    assert again.matches(EXAMPLES)
    assert not again.matches({"sql": EXAMPLES["sql"]})
    texts = prompts("sql", 6, seed=9)
    np.testing.assert_allclose(again.probabilities(texts)[1], fitted.probabilities(texts)[1], atol=1e-6)


def test_it_is_read_again_only_after_a_change(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bert_module, "LEAST_STEPS", 1)
    made, other = (BertRouter(WordEmbedder(), tmp_path, source=str(bert), epochs=1) for _ in range(2))
    made.fit(EXAMPLES)
    other.reload()
    assert other.domains == made.domains == tuple(sorted(EXAMPLES))
    for router in (made, other):
        held = router._tuned
        router.reload()
        assert router._tuned is held
    made.fit({name: EXAMPLES[name] for name in ("sql", "maths")})
    other.reload()
    assert other.domains == ("maths", "sql")
    (tmp_path / BERT_FILE).unlink()
    other.reload()
    assert other.domains == ()


def test_the_same_examples_give_the_same_router(fitted: BertRouter, bert: Path, tmp_path: Path) -> None:
    again = BertRouter(WordEmbedder(), tmp_path, source=str(bert), **LEARNS)
    again.fit(EXAMPLES)
    texts = prompts("sql", 6, seed=9)
    np.testing.assert_allclose(again.probabilities(texts)[1], fitted.probabilities(texts)[1], atol=1e-5)


def test_another_model_or_a_damaged_file_makes_it_empty(fitted: BertRouter, tmp_path: Path) -> None:
    other = tiny_bert(tmp_path / "other")
    assert BertRouter(WordEmbedder(), fitted.folder, source=str(other)).domains == ()
    (tmp_path / BERT_FILE).write_bytes(b"no tensors")
    assert BertRouter(WordEmbedder(), tmp_path, source=str(other)).route(["select"])[0].domain == SHARED


def test_the_new_layer_learns_at_a_rate_of_its_own(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the weights that it came with hardly move."""
    monkeypatch.setattr("moedraft.routing.bert.LEAST_STEPS", 40)
    sure = []
    for rate in (5e-5, 5e-2):
        made = BertRouter(
            WordEmbedder(), tmp_path / str(rate), source=str(bert), learning_rate=0.0, new_rate=rate
        )
        made.fit(EXAMPLES)
        names, found = made.probabilities(prompts("sql", 10, seed=3))
        sure.append(found[:, names.index("sql")].mean())
    assert sure[1] > 2 * sure[0]


def test_no_domains_and_one_domain(bert: Path, tmp_path: Path) -> None:
    made = BertRouter(WordEmbedder(), tmp_path, source=str(bert), **LEARNS)
    made.fit({})
    assert made.domains == ()
    assert made.matches({})
    made.fit({"sql": EXAMPLES["sql"]})
    assert made.route([EXAMPLES["sql"][0]])[0].domain == "sql"
    with pytest.raises(InvalidRequest, match="at least two"):
        made.fit({"sql": ["one"]})


def test_what_cannot_be_loaded_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"router's model '.*nothing' cannot be loaded"):
        BertRouter(WordEmbedder(), tmp_path, source=str(tmp_path / "nothing"))
    pickled = BertRouter(WordEmbedder(), tmp_path, source=str(tiny_bert(tmp_path / "pickled", safe=False)))
    with pytest.raises(InvalidRequest, match="cannot be loaded") as caught:
        pickled.fit(EXAMPLES)
    assert "\n" not in str(caught.value)
    assert pickled.domains == ()


def test_the_settings_choose_it(bert: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moedraft.system.build.Embedder", lambda *_, **__: WordEmbedder())
    settings = load_settings(home=store.home.path, router="bert", router_model=str(bert))
    router = open_router(settings, store)
    assert isinstance(router, BertRouter)
    register_domain(store, router, "sql", EXAMPLES["sql"])
    register_domain(store, router, "maths", EXAMPLES["maths"])
    assert open_router(settings, store).domains == ("maths", "sql")
    remove_domain(store, router, "sql")
    assert router.domains == ("maths",)
    with pytest.raises(InvalidRequest, match="router"):
        load_settings(home=store.home.path, router="word2vec")


@pytest.fixture
def learned(bert: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """A home whose embedding router has learned from the traffic, and settings that choose the BERT."""
    monkeypatch.setattr("moedraft.system.build.Embedder", lambda *_, **__: WordEmbedder())
    monkeypatch.setattr(bert_module, "LEAST_STEPS", 1)
    settings = load_settings(home=store.home.path)
    router = open_router(settings, store)
    register_all(store, router, {name: list(texts) for name, texts in EXAMPLES.items()})
    labels = [Label(text, "sql", 1.0) for text in prompts("garten", 12)]
    trial = router.try_labels(EXAMPLES, labels)
    assert trial is not None
    router.take(replace(trial, outcome=replace(trial.outcome, taken=True)))
    store.registry.set_meta(REFIT, json.dumps({"labels": {"sql": 12}, "purges": store.registry.purges()}))
    return settings.model_copy(update={"router": "bert", "router_model": str(bert)})


def test_a_purge_reaches_a_router_that_is_out_of_use(
    store: Store, learned: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """What the embedding router learned from the traffic does not wait in its file to serve again."""
    open_router(learned, store)
    assert FITTING in caplog.text  # or a start would seem to hang
    assert last_refit(store.registry) == {}
    store.replay.purge()
    again = open_router(learned.model_copy(update={"router": "embedding"}), store)
    plain = Router(WordEmbedder(), store.home.path / "plain")
    plain.fit(EXAMPLES)
    texts = prompts("garten", 12)
    np.testing.assert_allclose(again.probabilities(texts)[1], plain.probabilities(texts)[1], atol=1e-5)


def test_a_purge_costs_a_bert_that_knows_no_traffic_no_fit(
    store: Store, learned: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_router(learned, store)
    file = store.home.path / ROUTER_FOLDER / ROUTER_FILE
    open_router(learned.model_copy(update={"router": "embedding"}), store)
    assert file.exists()
    store.registry.set_meta(REFIT, json.dumps({"labels": {"sql": 12}, "purges": -1}))
    monkeypatch.setattr(BertRouter, "fit", lambda *_: pytest.fail("it was fitted again"))
    open_router(learned, store)
    assert not knows_deleted(store.registry)
    assert not file.exists()


def test_a_model_for_a_router_that_is_not_chosen_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_models(_: Settings) -> None:
        raise InvalidRequest("no models here")

    monkeypatch.setattr(build_module, "load_pair", no_models)
    model = {"router_model": "x"}
    for options, told in ((model, True), ({}, False), ({**model, "router": "bert"}, False)):
        caplog.clear()
        with pytest.raises(InvalidRequest, match="no models here"):
            build_module.build(load_settings(home=tmp_path / "home", **options))
        assert (build_module.NO_BERT in caplog.text) == told
