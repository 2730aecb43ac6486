"""A command line to call, a home, a tiny pair of models on disk and an embedder that needs no weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cli_fakes import LetterEmbedder, Pair, Result, Run, numbers, save_tokenizer, write_rows

from moedraft.cli import main
from moedraft.core import Domain
from moedraft.storage.store import Store

from random_models import random_model


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """These models are so small that a second thread costs more than it brings."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    for name in ("HOME", "TARGET", "DRAFT"):
        monkeypatch.delenv(f"MOEDRAFT_{name}", raising=False)

    def call(*arguments: object) -> Result:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Result(code, *capsys.readouterr())

    return call


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home that is not there yet."""
    return tmp_path / "home"


@pytest.fixture
def store(home: Path) -> Iterator[Store]:
    """The home opened for writing, with the domain "sql"; close it before a command that writes."""
    store = Store.open(home)
    store.registry.add_domain(Domain("sql", "queries", tuple(f"SELECT {i}" for i in range(8)), 1.0))
    yield store
    store.close()


@pytest.fixture(autouse=True)
def _no_embedder_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moedraft.system.build.Embedder", LetterEmbedder)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """--target and --draft of a random pair over the words 0 … 96, with a context of 128."""
    root = tmp_path_factory.mktemp("pair")
    for name, seed, layers in (("target", 0, 3), ("draft", 1, 2)):
        model = random_model("llama", seed, layers)
        model.hf.config.max_position_embeddings = 128
        model.hf.save_pretrained(root / name)
        save_tokenizer(root / name)
    return "--target", str(root / "target"), "--draft", str(root / "draft")


@pytest.fixture
def low(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "low.jsonl", numbers(0))


@pytest.fixture
def high(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "high.jsonl", numbers(60))
