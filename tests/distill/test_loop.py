"""Who learns next: promise falls with every failure in a row and comes back with a success."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from distill_rig import record

from moedraft.core import SHARED, AdapterVersion, Domain, StorageError
from moedraft.distill.loop import DistillLoop
from moedraft.distill.publish import HomeOutlet
from moedraft.distill.trainer import Update
from moedraft.storage.store import Store

EVERY = 16


@dataclass
class FakeTrainer:
    """Learns at once, where `fault` is silent about the adapter."""

    outlet: HomeOutlet
    fault: Callable[[str], Exception | None] = lambda expert: None
    tried: list[str] = field(default_factory=list)

    def update(self, expert: str, **_: object) -> Update:
        self.tried.append(expert)
        if (error := self.fault(expert)) is not None:
            raise error
        version = AdapterVersion(expert, 1, 0, "", "base", None, 0.0, "live")
        return Update(expert, version, EVERY, 1, 1.0, 0.50, 0.55)


@pytest.fixture
def store(store: Store) -> Store:
    """With two domains."""
    for name in ("code", "prose"):
        store.registry.add_domain(Domain(name, "", ("x",) * 8, 0.0))
    return store


def loop_of(store: Store) -> tuple[DistillLoop, Any]:
    trainer = FakeTrainer(HomeOutlet(store))
    return DistillLoop(trainer, store, EVERY), trainer  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), StorageError("not finite")])
@pytest.mark.parametrize("broken", [SHARED, "code"])
def test_one_whose_updates_fail_does_not_starve_the_others(
    store: Store, broken: str, error: Exception
) -> None:
    loop, trainer = loop_of(store)
    trainer.fault = lambda expert: error if expert == broken else None
    for start in range(0, 50 * EVERY, EVERY):
        store.replay.add([record(start + n, name) for n in range(EVERY) for name in ("code", "prose")])
        loop.run_once()
    for name in {SHARED, "code", "prose"} - {broken}:
        assert trainer.tried.count(name) >= 5
    assert trainer.tried.count(broken) >= 2  # it is not given up


def test_a_success_restores_what_failures_took(store: Store) -> None:
    loop, trainer = loop_of(store)
    store.replay.add([record(n) for n in range(2 * EVERY)])
    trainer.fault = lambda expert: RuntimeError("out of memory")
    assert loop.due() == SHARED
    for _ in range(3):
        loop.run_once(SHARED)
    assert loop.due() == "code"
    trainer.fault = lambda expert: None
    loop.run_once(SHARED)
    store.replay.add([record(100 + n) for n in range(2 * EVERY)])
    loop.run_once("code")
    store.replay.add([record(200 + n) for n in range(2 * EVERY)])
    assert loop.due() == SHARED


def test_what_was_broken_off_is_no_failure(store: Store) -> None:
    loop, trainer = loop_of(store)

    def stop(expert: str) -> Exception | None:
        raise SystemExit(0)

    store.replay.add([record(n) for n in range(EVERY)])
    trainer.fault = stop
    for _ in range(3):
        with pytest.raises(SystemExit):
            loop.run_once(SHARED)
    assert loop.due() == SHARED
