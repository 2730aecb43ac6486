"""What was published is looked at again on later requests, and taken back where it does worse."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from candidates import candidate
from distill_rig import record
from test_gate import a_pair

from moedraft.core import SHARED, Domain, InvalidRequest, ReplayRecord
from moedraft.distill.judging.watch import ENOUGH, MOST, SURE, Watch, looked_at
from moedraft.distill.loop import DistillLoop
from moedraft.distill.measuring.figures import Measured
from moedraft.distill.measuring.measures import Serving
from moedraft.distill.outlet import HomeOutlet
from moedraft.storage import changes
from moedraft.storage.store import Store

TRIES = 100
LATER, PATHS = 512, 40  # requests that come after a publication, and how often that is simulated


@pytest.fixture
def store(store: Store) -> Store:
    for name in ("code", "prose"):
        store.registry.add_domain(Domain(name, "", ("x",) * 8, 0.0))
    return store


def value_of(serving: Serving, name: str) -> float:
    weights = serving.get(name)
    return 0.0 if weights is None else float(next(iter(weights.tensors.values())).mean())


@dataclass
class Values:
    """Half of all guesses are right, and as many more as the values of what serves say."""

    asked: list[tuple[str, int]] = field(default_factory=list)  # domain, records

    def __call__(
        self, serving: Serving, domain: str, records: Sequence[ReplayRecord], on_batch: Callable[[], None]
    ) -> Measured:
        self.asked.append((domain, len(records)))
        share = 0.5 + sum(value_of(serving, name) for name in {SHARED, domain})
        right = [round(TRIES * share) + index % 5 for index in range(len(records))]
        return Measured(np.array([[[one, TRIES]] for one in right], np.int64).reshape(-1, 1, 2))


def published(store: Store, **values: float) -> None:
    """One update: a version of each of these adapters, each on the one before it."""
    parents = {name: store.registry.lineage(name, "base") for name in values}
    made = [
        candidate(name, value, parent=parents[name][0].version if parents[name] else 0)
        for name, value in values.items()
    ]
    store.adapters.publish_together(made)


def came(store: Store, count: int = ENOUGH, domain: str = "code", first: int = 0) -> None:
    """As many requests, after everything that was published before."""
    store.replay.add([record(number, domain) for number in range(first, first + count)])


def test_a_version_that_does_worse_on_later_requests_is_taken_back(store: Store) -> None:
    published(store, shared=0.1, code=0.1)
    published(store, shared=0.1, code=-0.2)
    watch = Watch(Values(), store)
    assert watch("base") is None  # nobody has asked for anything since
    came(store)
    found = watch("base")
    assert found is not None
    # Experts follow the shared adapter back, so the update is judged as a whole first.
    assert (found.version.domain, found.version.version) == (SHARED, 2)
    assert found.verdict.gain == pytest.approx(-0.3)
    assert found.verdict.records == ENOUGH


def test_an_expert_alone_is_taken_back_where_only_its_domain_loses(store: Store) -> None:
    published(store, shared=0.0, code=0.0, prose=0.0)
    published(store, shared=0.0, code=-0.2, prose=0.3)
    came(store, domain="code")
    came(store, 2 * ENOUGH, domain="prose", first=100)
    found = Watch(Values(), store)("base")
    assert found is not None
    assert (found.version.domain, found.version.version) == ("code", 2)


def test_what_does_better_is_left_and_not_looked_at_again(store: Store) -> None:
    published(store, shared=0.1)
    came(store)
    values = Values()
    watch = Watch(values, store)
    assert watch("base") is None
    assert values.asked == [("code", ENOUGH)] * 2
    assert watch("base") is None
    assert len(values.asked) == 2


def test_few_requests_and_old_ones_decide_nothing(store: Store) -> None:
    store.replay.add([record(number) for number in range(50)])
    published(store, shared=-0.3)
    came(store, ENOUGH - 1, first=100)
    came(store, 1, first=100)  # one prompt again
    values = Values()
    assert Watch(values, store)("base") is None
    assert not values.asked


@pytest.mark.parametrize("year", [-1, 1])
def test_a_clock_that_was_set_decides_nothing(store: Store, year: int) -> None:
    """What came before a version is not taken for later requests, nor the other way round."""
    now = time.time()
    published(store, shared=0.3)
    store.replay.add([replace(record(one), created_at=now + year * 365 * 86400) for one in range(50)])
    published(store, shared=-0.3)
    values = Values()
    assert Watch(values, store)("base") is None
    assert not values.asked
    numbers = range(100, 100 + ENOUGH)
    store.replay.add([replace(record(one), created_at=now + year * 365 * 86400) for one in numbers])
    assert Watch(values, store)("base") is not None
    assert {count for _, count in values.asked} == {ENOUGH}


def test_a_version_that_a_person_chose_stays(store: Store) -> None:
    published(store, shared=0.3)
    published(store, shared=-0.3)
    came(store)
    watch = Watch(Values(), store)
    changes.pin(store, SHARED)
    assert watch("base") is None
    changes.pin(store, SHARED, False)
    changes.promote(store, SHARED, 1)  # an earlier one
    assert watch("base") is None
    changes.promote(store, SHARED, 2)
    assert watch("base") is None
    assert watch("another base") is None
    published(store, shared=-0.45)  # what comes after it is watched again
    came(store, first=200)
    assert watch("base") is not None


def test_after_a_version_was_taken_back_the_one_before_is_watched(store: Store) -> None:
    for value in (0.3, 0.0, -0.3):
        published(store, shared=value)
    came(store)
    watch = Watch(Values(), store)
    for number in (3, 2):
        found = watch("base")
        assert found is not None
        assert (found.version.domain, found.version.version) == (SHARED, number)
        store.registry.change(SHARED, None)
    assert watch("base") is None, "version 1 gains on nothing at all"


def a_loop(store: Store) -> DistillLoop:
    forgotten: list[str] = []
    trainer: Any = SimpleNamespace(student=SimpleNamespace(base_hash="base"), forget=forgotten.append, seed=0)
    trainer.forgotten, trainer.update = forgotten, lambda *_, **__: None
    return DistillLoop(trainer, store, HomeOutlet(store), every=1, watch=Watch(Values(), store))


def test_the_loop_takes_it_back_and_says_so_once(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    published(store, shared=0.1, code=0.1)
    published(store, shared=0.1, code=-0.2)
    came(store)
    loop = a_loop(store)
    loop.run_once("code")
    assert [one.version for one in store.registry.lineage(SHARED, "base")] == [1]
    live = store.registry.live("code")
    assert live is not None
    assert live.version == 1
    assert loop.trainer.forgotten == [SHARED]  # type: ignore[attr-defined]
    update, follower = [one for one in store.updates.recent() if one.decision == "withdraw"]
    assert (update.expert, update.version, update.parent, update.gate_records) == (SHARED, 1, 2, ENOUGH)
    assert (follower.expert, follower.version, follower.parent, follower.gain) == ("code", 1, 2, None)
    assert "Version 2 of the shared adapter" in (follower.reason or "")
    assert "Version 2 of shared was taken back" in caplog.text
    changes.promote(store, SHARED, 2)  # a person wants it all the same
    loop.run_once("code")
    assert len([one for one in store.updates.recent() if one.decision == "withdraw"]) == 2


def test_what_has_changed_meanwhile_is_not_taken_back(store: Store) -> None:
    published(store, shared=0.1)
    with pytest.raises(InvalidRequest, match="changed meanwhile"):
        HomeOutlet(store).withdraw(SHARED, 2)
    changes.pin(store, SHARED)
    with pytest.raises(InvalidRequest, match="pinned"):
        HomeOutlet(store).withdraw(SHARED, 1)


def test_one_client_does_not_decide_alone_what_is_taken_back(store: Store) -> None:
    live = store.adapters.publish(candidate("code"))
    store.replay.add([replace(record(number), source="others") for number in range(20)])
    store.replay.add([replace(record(number), source="flood") for number in range(1000, 1300)])
    found = Watch(Values(), store)._since(live)["code"]
    assert Counter(one.source for one in found) == {"others": 20, "flood": 20}
    store.replay.purge()
    store.replay.add([replace(record(number), source="flood") for number in range(300)])
    assert len(Watch(Values(), store)._since(live)["code"]) == MOST  # where there is no other


@dataclass
class Noting(Values):
    """Notes for which domain which adapters are measured, by their values."""

    served: list[tuple[str, set[float]]] = field(default_factory=list)

    def __call__(self, serving: Serving, domain: str, *args: Any) -> Measured:
        self.served.append((domain, {round(value_of(serving, name), 3) for name in serving}))
        return super().__call__(serving, domain, *args)


def test_domains_that_the_base_serves_take_nothing_back(store: Store) -> None:
    published(store, shared=0.1, code=0.1)
    published(store, shared=0.1, code=-0.2)
    came(store)
    store.registry.set_unadapted(["code"])
    values = Values()
    assert Watch(values, store)("base") is None
    assert not values.asked
    store.registry.set_unadapted([])
    assert Watch(values, store)("base") is not None


def test_a_pinned_expert_is_not_taken_back_in_the_comparison_either(store: Store) -> None:
    published(store, shared=0.1, code=0.05)
    published(store, shared=0.12, code=0.2)
    came(store)
    values = Noting()
    Watch(values, store)("base")
    assert values.served[:2] == [("code", {0.1, 0.05}), ("code", {0.12, 0.2})]
    changes.pin(store, "code")
    values.served.clear()
    Watch(values, store)("base")
    assert values.served == [("code", {0.1, 0.2}), ("code", {0.12, 0.2})]


@pytest.mark.parametrize(("gain", "least", "most"), [(0.0, 0.0, 0.15), (0.01, 0.0, 0.05), (-0.03, 0.95, 1.0)])
def test_looking_again_and_again_takes_few_versions_back_by_chance(
    gain: float, least: float, most: float
) -> None:
    """By the share of first guesses that a version gains; one that does no worse is seldom taken back."""
    rng = np.random.default_rng(1)
    taken = sum(_is_taken_back(*a_pair(rng, LATER, gain)) for _ in range(PATHS))
    assert least <= taken / PATHS <= most


def _is_taken_back(before: Measured, after: Measured) -> bool:
    """Whether a version is, while it is looked at with every further ENOUGH of these records."""
    for count in range(ENOUGH, LATER + 1, ENOUGH):
        newest = slice(max(0, count - MOST), count)
        found = looked_at(Measured(before.counts[newest]), Measured(after.counts[newest]))
        if found.decision == "withdraw" or found.better >= SURE:
            return found.decision == "withdraw"
    return False
