"""Versions that are loaded beside decoding: none is missed, none comes half, and nobody waits for them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moedraft.core import SHARED, AdapterVersion, Domain, StorageError
from moedraft.distill.publish import HomeOutlet
from moedraft.drafting.lora import PREFIX, ExpertBank
from moedraft.engine.loader import AdapterLoader
from moedraft.storage.store import Store

from random_models import VOCAB, random_model


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(tmp_path / "home")
    for name in ("code", "prose"):
        store.registry.add_domain(Domain(name, "", ("x",) * 8, 0.0))
    yield store
    store.close()


@pytest.fixture
def bank() -> ExpertBank:
    return ExpertBank(random_model("llama", 1), "tail")


@pytest.fixture
def loader(store: Store, bank: ExpertBank, monkeypatch: pytest.MonkeyPatch) -> Iterator[AdapterLoader]:
    monkeypatch.setattr("moedraft.engine.loader.POLL_SECONDS", 0.0)
    made = AdapterLoader(store, bank)
    made.refresh([], now=True)
    made.load_beside()
    yield made
    made.close()


@pytest.fixture
def gate(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Closed: nothing is read from storage until it is set."""
    opened, load = threading.Event(), store.adapters.load

    def waits(version: AdapterVersion, base_hash: str | None = None) -> object:
        assert opened.wait(20)
        return load(version, base_hash)

    monkeypatch.setattr(store.adapters, "load", waits)
    yield opened
    opened.set()


def publish(store: Store, bank: ExpertBank, name: str) -> int:
    """A new version with random weights; its number."""
    tensors = {}
    for module in sorted(bank.tail):
        out, inner = bank.layers[module].base_weight().shape
        tensors[f"{PREFIX}{module}.lora_A.weight"] = torch.randn(4, inner)
        tensors[f"{PREFIX}{module}.lora_B.weight"] = torch.randn(out, 4)

    def write(folder: Path) -> None:
        (folder / "adapter_config.json").write_text(
            json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4})
        )
        save_file(tensors, folder / "adapter_model.safetensors")

    live = store.registry.live(name)
    made = HomeOutlet(store).publish(
        name,
        write,
        parent=live.version if live else 0,
        base_hash=bank.base_hash,
        acceptance=None,
        extra={"rank": 4},
    )
    return made.version


def until(loader: AdapterLoader, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        loader.refresh([])
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)


def logits(bank: ExpertBank, expert: str) -> torch.Tensor:
    bank.select([expert])
    hidden = torch.ones(1, 3, bank.layers["lm_head"].base_weight().shape[1])
    found: torch.Tensor = bank.layers["lm_head"](hidden)
    assert found.shape == (1, 3, VOCAB)
    return found


def test_who_knows_of_something_new_is_not_told_to_wait(
    loader: AdapterLoader, store: Store, bank: ExpertBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moedraft.engine.loader.POLL_SECONDS", 1000.0)
    loader.refresh([])
    made = publish(store, bank, "code")
    for _ in range(50):
        loader.refresh([])
        time.sleep(0.001)
    assert (bank.version("code"), loader._job) == (0, None)
    loader.hurry()
    until(loader, lambda: bank.version("code") == made)


def test_the_engine_does_not_wait_for_a_slow_disk(
    loader: AdapterLoader, store: Store, bank: ExpertBank, gate: threading.Event
) -> None:
    made = publish(store, bank, "code")
    began = time.monotonic()
    for _ in range(100):
        loader.refresh([])
    assert time.monotonic() - began < 20
    assert bank.version("code") == 0
    gate.set()
    until(loader, lambda: bank.version("code") == made)


def test_now_is_now_even_while_others_are_being_loaded(
    loader: AdapterLoader, store: Store, bank: ExpertBank, gate: threading.Event
) -> None:
    publish(store, bank, "code")
    loader.refresh([])
    last, other = publish(store, bank, "code"), publish(store, bank, "prose")
    gate.set()
    loader.refresh([], now=True)
    assert (bank.version("code"), bank.version("prose")) == (last, other)


def test_what_is_published_meanwhile_is_not_missed(
    loader: AdapterLoader, store: Store, bank: ExpertBank, gate: threading.Event
) -> None:
    """Of an expert that was looked at already."""
    publish(store, bank, "prose")
    loader.refresh([])  # "code" comes before "prose", where it waits
    time.sleep(0.1)
    made = publish(store, bank, "code")
    gate.set()
    until(loader, lambda: bank.version("code") == made)


def test_those_in_use_are_ready_and_what_they_should_be(
    loader: AdapterLoader, store: Store, bank: ExpertBank
) -> None:
    for name in (SHARED, "code", "prose"):
        publish(store, bank, name)
    loader.refresh([], now=True)
    before = logits(bank, "code")
    for name in (SHARED, "code"):
        made = publish(store, bank, name)
        until(loader, lambda name=name, made=made: bank.version(name) == made)  # type: ignore[misc]
        assert list(bank.merged) == ["code"], "and nobody else"
        ready = logits(bank, "code")
        bank.merged.clear()
        bank.selected = None
        torch.testing.assert_close(ready, logits(bank, "code"))
        assert (ready - before).abs().max() > 0.01
        before = ready


def test_ready_weights_of_a_version_that_was_replaced_meanwhile_are_dropped(
    store: Store, bank: ExpertBank, loader: AdapterLoader
) -> None:
    publish(store, bank, "code")
    loader.refresh([], now=True)
    logits(bank, "code")
    prepared = bank.prepare({SHARED: bank.experts["code"]}, ["code"])
    bank.publish("code", bank.experts["code"].__class__(9, bank.experts["code"].deltas))
    bank.take(prepared)
    assert bank.version("code") == 9
    assert not bank.merged


def test_a_failing_store_is_asked_again(
    loader: AdapterLoader, store: Store, bank: ExpertBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise StorageError("the disk is gone")

    made = publish(store, bank, "code")
    with monkeypatch.context() as patch:
        patch.setattr(store.registry, "lineage", fails)
        for _ in range(20):
            loader.refresh([])
            time.sleep(0.002)
    assert bank.version("code") == 0
    until(loader, lambda: bank.version("code") == made)
