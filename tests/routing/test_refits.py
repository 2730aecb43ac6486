"""The router learns from the traffic: what becomes a label, when it is refitted, what a deletion undoes."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from routing_fakes import TOPICS, WordEmbedder, prompts

from moedraft.core import SHARED, Domain, ReplayRecord
from moedraft.insight import inventory
from moedraft.routing.labels import LEAST_LABELS, MOST_LABELS
from moedraft.routing.router import Router
from moedraft.serve.worker.refits import LONGEST_WAIT, Refits
from moedraft.storage.changes import knows_deleted, last_refit, purge
from moedraft.storage.db import StorageFull
from moedraft.storage.store import Store
from moedraft.system.build import ROUTER_FOLDER, open_router
from moedraft.system.domains.refit import EVERY, is_due, refit_by_traffic, traffic_labels
from moedraft.system.domains.registering import register_domain

EXAMPLES = {name: tuple(prompts(name, 12)) for name in TOPICS}
NEWER = ("inventory", "ledger", "invoice", "shipment", "warehouse", "customer", "tariff", "discount")


class Words:
    """A tokenizer whose ids are the numbers of words."""

    chat_template = None
    known = (*NEWER, *(word for words in TOPICS.values() for word in words))

    def ids(self, text: str) -> list[int]:
        return [self.known.index(word) for word in text.split()]

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(self.known[i] for i in ids)


def newer(count: int, seed: int) -> list[str]:
    """Prompts about sql in words that no example has, but for one."""
    rng = np.random.default_rng(seed)
    return [" ".join([*rng.permutation(NEWER)[:5], str(rng.choice(TOPICS["sql"]))]) for _ in range(count)]


def answered(text: str, heard: dict[str, float], **changes: Any) -> ReplayRecord:
    ids = Words().ids(text)
    fields: dict[str, Any] = {
        "domain": SHARED,
        "expert": "sql",
        "adapter_version": 0,
        "target_id": "t",
        "token_ids": [*ids, 1],
        "num_prompt_tokens": len(ids),
        "topk_ids": [[1, 2]],
        "topk_logprobs": [[-0.1, -3.0]],
        "rejected": [],
        "drafted": 4,
        "accepted": 1,
        "heard": heard,
    }
    return ReplayRecord(**{**fields, **changes})


@pytest.fixture
def router(store: Store) -> Router:
    for name, examples in EXAMPLES.items():
        store.registry.add_domain(Domain(name, "", examples, 1.0))
    made = Router(WordEmbedder(), store.home.path / ROUTER_FOLDER)
    made.fit(EXAMPLES)
    return made


@pytest.fixture
def traffic(store: Store) -> list[str]:
    texts = list(dict.fromkeys(newer(EVERY + 8, seed=2)))
    store.replay.add([answered(text, {"sql": 0.96, SHARED: 0.04}) for text in texts])
    return texts


def routed(router: Router) -> int:
    return sum(route.domain == "sql" for route in router.route(newer(40, seed=1)))


@pytest.mark.usefixtures("router")
def test_what_becomes_a_label(store: Store) -> None:
    sure, unsure = {"sql": 0.95, SHARED: 0.05}, {"sql": 0.6, "maths": 0.4}
    store.replay.add(
        [
            answered("ledger invoice select", sure),
            answered("ledger invoice select", sure),  # once is enough
            answered("warehouse tariff count", unsure),
            answered("customer table", {SHARED: 1.0}),  # that no expert helps says nothing about domains
            answered("discount rows", {"gone": 1.0}),
            answered("shipment join", {}),
        ]
    )
    found = traffic_labels(store, Words())
    assert [(one.text, one.domain, one.sure) for one in found] == [("ledger invoice select", "sql", 0.95)]


@pytest.mark.usefixtures("router")
def test_no_client_gives_most_of_a_domains_labels(store: Store) -> None:
    many = list(dict.fromkeys(newer(3 * MOST_LABELS, seed=3)))[: 2 * MOST_LABELS]
    others, loud = many[: MOST_LABELS // 2], many[MOST_LABELS // 2 :]
    store.replay.add([answered(text, {"sql": 1.0}, source=f"key {i}") for i, text in enumerate(others)])
    store.replay.add([answered(text, {"sql": 1.0}, source="loud") for text in loud])
    texts = {one.text for one in traffic_labels(store, Words())}
    assert len(texts) == MOST_LABELS
    assert texts >= set(others)


@pytest.mark.usefixtures("router")
@pytest.mark.parametrize(("quiet", "taken"), [(0, MOST_LABELS), (1, LEAST_LABELS), (9, 9)])
def test_a_client_gives_at_most_as_many_labels_as_all_others(store: Store, quiet: int, taken: int) -> None:
    """Unless it is the only one, or gives very few: their places are not filled with its own."""
    many = list(dict.fromkeys(newer(3 * MOST_LABELS, seed=3)))[: 2 * MOST_LABELS]
    others, loud = set(many[:quiet]), set(many[quiet:])
    store.replay.add([answered(text, {"sql": 1.0}, source="quiet") for text in many[:quiet]])
    store.replay.add([answered(text, {"sql": 1.0}, source="loud") for text in many[quiet:]])
    texts = {one.text for one in traffic_labels(store, Words())}
    assert texts & others == others
    assert len(texts & loud) == taken


def test_a_refit_is_due_after_enough_new_answers(store: Store, router: Router, traffic: list[str]) -> None:
    assert is_due(store)
    found = refit_by_traffic(store, router, Words())
    assert found is not None
    assert found.taken
    assert found.labels == {"sql": len(traffic)}
    assert not is_due(store)
    store.replay.add([answered(text, {"sql": 1.0}) for text in newer(EVERY - 1, seed=5)])
    assert not is_due(store)
    store.replay.add([answered(traffic[0], {"sql": 1.0})])
    assert is_due(store)


def test_the_domain_shows_how_many_examples_came_from_traffic(
    store: Store, router: Router, traffic: list[str]
) -> None:
    assert inventory.domain(store, "sql")["examples_from_traffic"] == 0
    before = routed(router)
    refit_by_traffic(store, router, Words())
    assert routed(router) > before + 20
    assert inventory.domain(store, "sql")["examples_from_traffic"] == len(traffic)
    assert inventory.domain(store, "maths")["examples_from_traffic"] == 0
    register_domain(store, router, "new", [f"word{i} of something else" for i in range(8)])
    assert inventory.domain(store, "sql")["examples_from_traffic"] == 0  # fitted on the examples alone


@pytest.mark.usefixtures("traffic")
def test_what_is_deleted_is_unlearned(store: Store, router: Router) -> None:
    before = routed(router)
    refit_by_traffic(store, router, Words())
    assert purge(store, None) > 0
    assert is_due(store)
    assert refit_by_traffic(store, router, Words()) is None
    assert routed(router) == before
    assert last_refit(store.registry)["labels"] == {}
    assert not is_due(store)


@pytest.mark.usefixtures("traffic")
def test_what_is_deleted_during_a_refit_is_not_learned(
    store: Store, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, fit = routed(router), router.try_labels

    def purged_meanwhile(*prompts: Any) -> Any:
        found = fit(*prompts)
        purge(store, None)
        return found

    monkeypatch.setattr(router, "try_labels", purged_meanwhile)
    assert refit_by_traffic(store, router, Words()) is None
    assert routed(router) == before
    assert not knows_deleted(store.registry)
    assert inventory.domain(store, "sql")["examples_from_traffic"] == 0


@pytest.mark.usefixtures("traffic")
def test_a_refit_that_is_not_noted_is_found_by_a_deletion(
    store: Store, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a kill between the router's file and the note of it."""
    take = router.take

    def killed(*prompts: Any) -> Any:
        take(*prompts)
        raise KeyboardInterrupt

    monkeypatch.setattr(router, "take", killed)
    with pytest.raises(KeyboardInterrupt):
        refit_by_traffic(store, router, Words())
    assert not knows_deleted(store.registry)
    purge(store, None)
    assert knows_deleted(store.registry)


@pytest.mark.usefixtures("traffic")
def test_a_start_after_a_deletion_unlearns_it_as_well(
    store: Store, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = routed(router)
    refit_by_traffic(store, router, Words())
    store.replay.purge()  # as where the process ends right after it
    monkeypatch.setattr("moedraft.system.build.Embedder", lambda *_, **__: WordEmbedder())
    settings = SimpleNamespace(
        router="embedding",
        embedder="",
        cpu_fast_paths=True,
        home=store.home.path,
        unknown_threshold=router.threshold,
    )
    opened = open_router(settings, store)  # type: ignore[arg-type]
    assert routed(opened) == before
    assert last_refit(store.registry) == {}


class Serving:
    """As much of a system as a refit touches."""

    def __init__(self, store: Store, home: Path) -> None:
        self.store, self.changing = store, threading.Lock()
        self.router = Router(WordEmbedder(), home / ROUTER_FOLDER)
        self.engine = SimpleNamespace(tokenizer=Words())
        self.settings = SimpleNamespace(home=home, selector="evidence")
        self.recorder = SimpleNamespace(flush=lambda: None)


@pytest.fixture
def serving(store: Store, router: Router, traffic: list[str]) -> Serving:
    return Serving(store, store.home.path)


def test_the_engines_router_takes_over_what_was_fitted_beside_it(serving: Serving) -> None:
    before, allowed = routed(serving.router), [False]
    refits = Refits(serving, lambda: allowed[0])  # type: ignore[arg-type]
    assert not refits.look()  # the engine is busy
    assert routed(serving.router) == before
    allowed[0] = True
    assert refits.look()
    assert routed(serving.router) > before + 20
    assert not refits.look()  # nothing new


def test_texts_of_deleted_records_do_not_stay_in_memory(serving: Serving) -> None:
    refits = Refits(serving, lambda: True)  # type: ignore[arg-type]
    assert refits.look()
    held = refits._router
    assert held is not None
    assert held._vectors
    refits.look()
    assert refits._router is held
    purge(serving.store, "sql")  # which has none of them
    refits._may = lambda: False  # however busy the engine is
    refits.look()
    assert refits._router is None


def test_it_looks_by_itself_and_ends_when_it_is_told(serving: Serving) -> None:
    before = routed(serving.router)
    refits = Refits(serving, lambda: True, every=0.01)  # type: ignore[arg-type]
    refits.start()
    for _ in range(2000):
        if "last_id" in last_refit(serving.store.registry):
            break
        refits._thread.join(0.01)
    refits.stop(30)
    assert not refits._thread.is_alive()
    assert routed(serving.router) > before


def test_a_refit_that_fails_is_tried_more_and_more_seldom(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the disk is full each try costs a whole fit, for nothing."""
    refits, waited = Refits(serving, lambda: True, every=10.0), list[float]()  # type: ignore[arg-type]
    looks = iter([StorageFull("full")] * 8 + [None] + [StorageFull("full")] * 2)

    def look() -> bool:
        if (error := next(looks)) is not None:
            raise error
        return False

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        return len(waited) == 12

    monkeypatch.setattr(refits, "look", look)
    monkeypatch.setattr(refits._quit, "wait", wait)
    refits._run()
    assert waited == [10, 20, 40, 80, 160, 320, LONGEST_WAIT, LONGEST_WAIT, LONGEST_WAIT, 10, 20, 40]


@pytest.mark.usefixtures("router")
def test_a_flood_of_one_client_pushes_no_other_out_of_the_labels(store: Store) -> None:
    many = list(dict.fromkeys(newer(400, seed=3)))
    quiet, loud = many[:20], many[20:]
    store.replay.add([answered(text, {"sql": 1.0}, source="quiet") for text in quiet])
    flood = [answered(loud[i % 80], {"maths": 1.0}, source="loud", domain="maths") for i in range(2100)]
    store.replay.add(flood)
    assert {one.text for one in traffic_labels(store, Words()) if one.domain == "sql"} == set(quiet)


def test_nobody_waits_for_a_fit(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """A domain that is registered meanwhile stays as it is, and the fit without it is dropped."""
    fit, store, served = Router.try_labels, serving.store, serving.router

    def registered_meanwhile(router: Router, *prompts: Any) -> Any:
        found = fit(router, *prompts)
        assert serving.changing.acquire(timeout=0), "a fit holds up whoever changes domains"
        register_domain(store, served, "new", [f"word{i} of something else" for i in range(8)])
        serving.changing.release()
        return found

    refits = Refits(serving, lambda: True)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(Router, "try_labels", registered_meanwhile)
        assert not refits.look()
    assert served.domains == tuple(sorted([*EXAMPLES, "new"]))
    assert last_refit(store.registry) == {}
    assert refits.look()  # the next one knows it
    assert served.domains == tuple(sorted([*EXAMPLES, "new"]))
    assert last_refit(store.registry)["labels"]["sql"] > 0


def test_a_router_that_learns_from_examples_alone_is_left_alone(serving: Serving) -> None:
    serving.router.learns_from_traffic = False
    assert not Refits(serving, lambda: True).look()  # type: ignore[arg-type]
    assert last_refit(serving.store.registry) == {}
