"""Versions that are loaded beside decoding: none is missed, none comes half, and nobody waits for them."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from candidates import candidate
from safetensors.torch import save
from waiting import wait_for

from moedraft.core import SHARED, AdapterVersion, Domain, StorageError
from moedraft.distill.outlet import HomeOutlet
from moedraft.drafting.experts.adapter import PREFIX
from moedraft.drafting.experts.lora import ExpertBank, Prepared
from moedraft.storage.store import Store
from moedraft.storage.versions.adapter_files import sealed
from moedraft.system.sources.loader import AdapterLoader

from random_models import VOCAB, random_model


@pytest.fixture
def store(store: Store) -> Store:
    """With two domains."""
    for name in ("code", "prose"):
        store.registry.add_domain(Domain(name, "", ("x",) * 8, 0.0))
    return store


@pytest.fixture
def bank() -> ExpertBank:
    return ExpertBank(random_model("llama", 1))


@pytest.fixture
def loader(store: Store, bank: ExpertBank, monkeypatch: pytest.MonkeyPatch) -> Iterator[AdapterLoader]:
    monkeypatch.setattr("moedraft.system.sources.loader.POLL_SECONDS", 0.0)
    made = AdapterLoader(store, bank)
    made.refresh([], now=True)
    made.load_beside()
    yield made
    made.close()


class Gate:
    """Nothing is read from storage until it is opened."""

    def __init__(self, load: Callable[..., object]) -> None:
        self.arrived = threading.Event()  # somebody wants to read
        self._opened, self._load = threading.Event(), load

    def __call__(self, version: AdapterVersion, base_hash: str | None = None) -> object:
        self.arrived.set()
        assert self._opened.wait(20)
        return self._load(version, base_hash)

    def open(self) -> None:
        self._opened.set()


@pytest.fixture
def gate(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(store.adapters.load)
    monkeypatch.setattr(store.adapters, "load", gate)
    yield gate
    gate.open()


def publish(store: Store, bank: ExpertBank, name: str) -> int:
    """A new version with random weights; its number."""
    tensors = {}
    for module in sorted(bank.tail):
        out, inner = bank.layers[module].base_weight().shape
        tensors[f"{PREFIX}{module}.lora_A.weight"] = torch.randn(4, inner)
        tensors[f"{PREFIX}{module}.lora_B.weight"] = torch.randn(out, 4)

    live, config = store.registry.live(name), {"peft_type": "LORA", "r": 4, "lora_alpha": 4}
    facts = {"parent": live.version if live else 0, "base_hash": bank.base_hash, "rank": 4}
    [made] = HomeOutlet(store).publish([candidate(name, config=config, tensors=tensors, **facts)])
    return made.version


def until(loader: AdapterLoader, holds: Callable[[], bool]) -> None:
    """Refresh, as the engine does between its steps, until it holds."""

    def held() -> bool:
        loader.refresh([])
        return holds()

    wait_for(held)


def logits(bank: ExpertBank, expert: str) -> torch.Tensor:
    bank.select([expert])
    hidden = torch.ones(1, 3, bank.layers["lm_head"].base_weight().shape[1])
    found: torch.Tensor = bank.layers["lm_head"](hidden)
    assert found.shape == (1, 3, VOCAB)
    return found


def test_who_knows_of_something_new_is_not_told_to_wait(
    loader: AdapterLoader, store: Store, bank: ExpertBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moedraft.system.sources.loader.POLL_SECONDS", 1000.0)
    loader.refresh([])
    made = publish(store, bank, "code")
    with monkeypatch.context() as patch:
        patch.setattr(store.registry, "generation", lambda: pytest.fail("it looks already"))
        for _ in range(50):
            loader.refresh([])
    assert bank.version("code") == 0
    loader.hurry()
    until(loader, lambda: bank.version("code") == made)


def test_the_engine_does_not_wait_for_a_slow_disk(
    loader: AdapterLoader, store: Store, bank: ExpertBank, gate: Gate
) -> None:
    made = publish(store, bank, "code")
    began = time.monotonic()
    for _ in range(100):
        loader.refresh([])
    assert time.monotonic() - began < 20
    assert bank.version("code") == 0
    gate.open()
    until(loader, lambda: bank.version("code") == made)


def test_now_is_now_even_while_others_are_being_loaded(
    loader: AdapterLoader, store: Store, bank: ExpertBank, gate: Gate
) -> None:
    publish(store, bank, "code")
    loader.refresh([])
    last, other = publish(store, bank, "code"), publish(store, bank, "prose")
    gate.open()
    loader.refresh([], now=True)
    assert (bank.version("code"), bank.version("prose")) == (last, other)


def test_what_is_published_meanwhile_is_not_missed(
    loader: AdapterLoader, store: Store, bank: ExpertBank, gate: Gate
) -> None:
    """Of an expert that was looked at already."""
    publish(store, bank, "prose")
    loader.refresh([])  # "code" comes before "prose", where it waits
    assert gate.arrived.wait(20)
    made = publish(store, bank, "code")
    gate.open()
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
    tried: list[object] = []

    def fails(*wanted: object) -> None:
        tried.append(wanted)
        raise StorageError("the disk is gone")

    made = publish(store, bank, "code")
    with monkeypatch.context() as patch:
        patch.setattr(store.registry, "lineage", fails)
        until(loader, lambda: len(tried) > 3)
    assert bank.version("code") == 0
    until(loader, lambda: bank.version("code") == made)


# -- what goes wrong -----------------------------------------------------------------------------


def spoil(store: Store, bank: ExpertBank, name: str, version: int, weights: bytes) -> None:
    """Other weights in the place of a version's, with a manifest that says that they are right."""
    folder = store.adapters.folder(name, version)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["adapter_model.safetensors"] = hashlib.sha256(weights).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(sealed(manifest)))


def odd_type() -> bytes:
    """A file that is right, of a type that safetensors has no tensors for."""
    names = [f"{PREFIX}lm_head.lora_{letter}.weight" for letter in "AB"]
    places = [{"dtype": "F8_E8M0", "shape": [4], "data_offsets": [4 * i, 4 * i + 4]} for i in range(2)]
    header = json.dumps(dict(zip(names, places, strict=True))).encode()
    return len(header).to_bytes(8, "little") + header + bytes(8)


def pair(a: torch.Tensor, b: torch.Tensor, prefix: str = PREFIX) -> bytes:
    return save({f"{prefix}lm_head.lora_A.weight": a, f"{prefix}lm_head.lora_B.weight": b})


BAD = {
    "a type that safetensors does not know": odd_type(),
    "a type that torch hardly knows": pair(torch.ones(4, 32).to(torch.float8_e4m3fn), torch.ones(VOCAB, 4)),
    "no prefix": pair(torch.ones(4, 32), torch.ones(VOCAB, 4), ""),
    "no dimensions": pair(torch.tensor(1.0), torch.tensor(1.0)),
}


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("weights", BAD.values(), ids=BAD)
def test_a_version_that_does_not_fit_is_refused_and_the_older_one_serves(
    store: Store, bank: ExpertBank, weights: bytes, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moedraft.system.sources.loader.POLL_SECONDS", 0.0)
    older, newer = publish(store, bank, "code"), publish(store, bank, "code")
    only, other = publish(store, bank, SHARED), publish(store, bank, "prose")
    spoil(store, bank, "code", newer, weights)
    spoil(store, bank, SHARED, only, weights)
    loader = AdapterLoader(store, bank)
    if beside:
        loader.load_beside()
    until(loader, lambda: bank.version("prose") == other)
    assert (bank.version("code"), bank.version(SHARED)) == (older, 0)
    assert loader.refused == {("code", newer), (SHARED, only)}
    live = store.registry.live("code")
    assert live is not None
    assert (live.version, store.registry.live(SHARED)) == (older, None)
    loader.close()


@pytest.mark.parametrize("tend_memory", [True, False])
def test_memory_of_replaced_weights_is_given_back_only_where_that_is_wanted(
    store: Store, bank: ExpertBank, tend_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[int] = []
    number = publish(store, bank, "code")
    monkeypatch.setattr(
        "moedraft.system.sources.loader.return_free_memory", lambda: given_back.append(bank.version("code"))
    )
    loader = AdapterLoader(store, bank, tend_memory=tend_memory)
    loader.refresh([], now=True)
    loader.refresh([], now=True)  # nothing is new
    assert bank.version("code") == number
    assert given_back == [number] * tend_memory


def no_memory(*_: object) -> None:
    raise MemoryError


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("fault", [MemoryError, torch.OutOfMemoryError, TypeError])
def test_without_memory_the_old_ones_serve_until_there_is_some(
    store: Store,
    bank: ExpertBank,
    beside: bool,
    fault: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A fault of ours is no other: it ends no step either."""
    monkeypatch.setattr("moedraft.system.sources.loader.POLL_SECONDS", 0.0)
    tries: list[object] = []

    def fails(*_: object, **__: object) -> None:
        tries.append(None)
        raise fault

    loader = AdapterLoader(store, bank)
    if beside:
        loader.load_beside()
    older = publish(store, bank, "code")
    until(loader, lambda: bank.version("code") == older)
    newer = publish(store, bank, "code")
    with monkeypatch.context() as patch:
        patch.setattr(bank, "prepare", fails)
        until(loader, lambda: len(tries) > 3)
        loader.refresh([], now=True)
    assert bank.version("code") == older
    assert caplog.text.count(f"Adapters were not refreshed ({fault.__name__})") == 1
    until(loader, lambda: bank.version("code") == newer)
    assert not loader.refused
    with monkeypatch.context() as patch:
        patch.setattr(bank, "prepare", fails)
        publish(store, bank, "code")
        loader.refresh([], now=True)
    assert caplog.text.count(f"Adapters were not refreshed ({fault.__name__})") == 2, "it is another time"
    loader.close()


@pytest.mark.parametrize("fault", [MemoryError, StorageError])
def test_a_version_that_cannot_be_read_now_is_tried_again(
    store: Store,
    bank: ExpertBank,
    fault: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Too many open files, say. Meanwhile its ancestor serves, and nobody else waits."""
    monkeypatch.setattr("moedraft.system.sources.loader.POLL_SECONDS", 0.0)
    older, newer = publish(store, bank, "code"), publish(store, bank, "code")
    other = publish(store, bank, "prose")
    load, loader = store.adapters.load, AdapterLoader(store, bank)

    def fails(version: AdapterVersion, base_hash: str | None = None) -> object:
        if (version.domain, version.version) == ("code", newer):
            raise fault("not now")
        return load(version, base_hash)

    with monkeypatch.context() as patch:
        patch.setattr(store.adapters, "load", fails)
        for _ in range(3):
            loader.refresh([])
        assert (bank.version("code"), bank.version("prose")) == (older, other)
    assert caplog.text.count(f"code version {newer} could not be read") == 1
    loader.refresh([])
    assert bank.version("code") == newer
    assert not loader.refused
    monkeypatch.setattr(loader, "_load", no_memory)
    loader.refresh([])
    assert caplog.text.count("Adapters were not refreshed") == 0, "there is nothing to do any more"


def test_now_is_now_even_where_loading_beside_failed(
    loader: AdapterLoader,
    store: Store,
    bank: ExpertBank,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, prepare = publish(store, bank, "code"), bank.prepare

    def fails_beside(*given: Any, **options: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError
        return prepare(*given, **options)

    monkeypatch.setattr(bank, "prepare", fails_beside)
    loader.refresh([])
    gate.open()
    loader.refresh([], now=True)
    assert bank.version("code") == made


def test_what_fails_again_and_again_is_tried_ever_less_often(
    store: Store, bank: ExpertBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, tries = SimpleNamespace(now=0.0), list[float]()

    def fails(*_: object, **__: object) -> None:
        tries.append(clock.now)
        raise MemoryError

    monkeypatch.setattr("moedraft.system.sources.loader.time", SimpleNamespace(monotonic=lambda: clock.now))
    loader = AdapterLoader(store, bank)
    loader.refresh([])
    made = publish(store, bank, "code")

    def until_later(seconds: float) -> None:
        for _ in range(int(seconds / 0.25)):
            clock.now += 0.25
            loader.refresh([])

    with monkeypatch.context() as patch:
        patch.setattr(bank, "prepare", fails)
        until_later(600)
        pauses = [b - a for a, b in pairwise(tries)]
        assert pauses[:4] == [0.5, 1.0, 2.0, 4.0]
        assert max(pauses) == pauses[-1] <= 60
        before = len(tries)
        loader.hurry()
        loader.refresh([])
        assert len(tries) == before + 1, "somebody knows of something new"
    until_later(60)
    assert bank.version("code") == made
    made = publish(store, bank, "code")
    until_later(0.75)
    assert bank.version("code") == made, "all is well again"


def test_adapters_that_are_published_together_are_taken_together(
    loader: AdapterLoader, store: Store, bank: ExpertBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shared adapter is looked at first; what is published after that look is seen all the same."""
    publish(store, bank, "code")
    lineage, taken = store.registry.lineage, bank.take
    swaps: list[set[str]] = []
    published: list[int] = []

    def look(name: str, base_hash: str | None = None) -> list[AdapterVersion]:
        found = lineage(name, base_hash)
        if name == SHARED and not published:
            published.append(0)  # before what `publish` reads comes here again
            published[:] = [publish(store, bank, SHARED), publish(store, bank, "code")]
        return found

    def take(prepared: Prepared) -> set[str]:
        swaps.append(set(prepared.changes))
        return taken(prepared)

    monkeypatch.setattr(store.registry, "lineage", look)
    monkeypatch.setattr(bank, "take", take)
    loader.refresh([], now=True)
    assert [bank.version(SHARED), bank.version("code")] == published
    assert swaps == [{SHARED, "code"}]


def test_whom_the_base_alone_serves_is_known_to_the_bank(
    loader: AdapterLoader, store: Store, bank: ExpertBank
) -> None:
    publish(store, bank, SHARED)
    made = publish(store, bank, "code")
    loader.refresh([], now=True)
    assert (bank.version("code"), bank.unadapted) == (made, frozenset())
    store.registry.set_unadapted(["code"])
    loader.refresh([], now=True)
    assert (bank.version("code"), bank.held("code"), bank.unadapted) == (0, made, {"code"})
    newer = publish(store, bank, "code")  # as the gate does with an update that is better than the base
    store.registry.set_unadapted([])
    loader.refresh([], now=True)
    assert (bank.version("code"), bank.unadapted) == (newer, frozenset())
