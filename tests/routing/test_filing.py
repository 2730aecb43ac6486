"""Records of the shared adapter go to the domain that is registered for their prompts."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from routing_fakes import TOPICS, WordEmbedder, prompts

from moedraft.core import SHARED, Domain, KeptStates, ReplayRecord
from moedraft.distill.judging.held_out import HeldOut
from moedraft.distill.judging.watch import Watch
from moedraft.routing.router import Route, Router
from moedraft.serve.worker.refits import Refits
from moedraft.storage.db import StorageFull
from moedraft.storage.records.replay import ReplayBuffer
from moedraft.storage.store import TARGET_ID, Store
from moedraft.system.build import ROUTER_FOLDER
from moedraft.system.domains import filing
from moedraft.system.domains.filing import AT_ONCE, LOOKED_AT, WAIT, Filing, is_due
from moedraft.system.domains.registering import register_domain, remove_domain

NEW, *OLD = TOPICS


class Words:
    """A tokenizer whose ids are the numbers of words."""

    chat_template = None
    known = tuple(word for words in TOPICS.values() for word in words)

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(self.known[i] for i in ids)


def answered(text: str, **changes: Any) -> ReplayRecord:
    ids = [Words.known.index(word) for word in text.split()]
    fields: dict[str, Any] = {"domain": SHARED, "expert": SHARED, "adapter_version": 0, "target_id": "t"}
    fields |= {"token_ids": [*ids, 1, 2], "num_prompt_tokens": len(ids), "topk_ids": [[1], [2]]}
    fields |= {"topk_logprobs": [[-0.5], [-0.5]], "rejected": [], "drafted": 4, "accepted": 1}
    return ReplayRecord(**{**fields, **changes})


@pytest.fixture
def router(store: Store) -> Router:
    """It knows every topic but one."""
    for name in OLD:
        store.registry.add_domain(Domain(name, "", tuple(prompts(name, 12)), 1.0))
    made = Router(WordEmbedder(), store.home.path / ROUTER_FOLDER)
    made.fit({name: prompts(name, 12) for name in OLD})
    file_anew(store, made)
    return made


def file_anew(store: Store, router: Router, *more: Any) -> dict[str, int]:
    return Filing(store, router, Words(), threading.Lock()).file(*more)


LATER = time.time() + WAIT + 60  # when answers that had begun before a registration in a test have ended


def register(store: Store, router: Router) -> None:
    register_domain(store, router, NEW, prompts(NEW, 12))


def asked_later(count: int) -> list[str]:
    """Prompts of the new domain that are none of its examples."""
    return [text for text in prompts(NEW, 80) if text not in prompts(NEW, 12)][:count]


def test_what_was_asked_before_goes_to_the_new_domain(store: Store, router: Router) -> None:
    theirs = asked_later(6)
    store.replay.add([answered(text) for text in theirs])
    store.replay.add([answered(text) for text in prompts(OLD[0], 3)])  # of a domain that is not new
    store.replay.add([answered(theirs[0], source="key", pinned=True)])  # the client asked for "shared"
    assert not is_due(store, LATER)
    register(store, router)
    assert not is_due(store), "answers that had begun before may still come"
    assert is_due(store, LATER)
    assert is_due(store, 0.0), "the clock was set back"
    found = file_anew(store, router)
    moved = store.replay.records(NEW)
    assert found == {NEW: len(moved)}
    assert len(moved) >= 5, "nearly all of them"
    assert {one.expert for one in moved} == {SHARED}, "who drafted is not rewritten"
    assert store.replay.sizes() == {NEW: len(moved), SHARED: 10 - len(moved)}
    assert not is_due(store, LATER)
    assert file_anew(store, router) == {}


def test_a_record_stays_what_it_was(store: Store, router: Router) -> None:
    stood = {"weights": {OLD[0]: 0.4}, "heard": {"sql": 0.4}}
    sent = answered(asked_later(1)[0], source="key", rejected=[1], **stood)
    kept = KeptStates("base", torch.ones(len(sent.token_ids) - 1, 4, dtype=torch.bfloat16))
    replay = ReplayBuffer(store.home, 100, states_bytes=2**20)
    replay.add([sent], [kept])
    last = replay.last_id()
    register(store, router)
    router.route = lambda texts: [Route(NEW, 1.0, {}) for _ in texts]  # type: ignore[method-assign]
    assert file_anew(store, router) == {NEW: 1}
    (found,) = replay.records()
    assert found == replace(sent, domain=NEW, weights={}), "it teaches the new domain's expert alone"
    assert found.id == last + 1, "it counts as new, so that it is learned from"
    states = replay.states([found], "base")
    assert torch.equal(states[found.id], kept.states)
    assert replay.states_size() > 0
    replay.purge(NEW)
    assert replay.states_size() == 0
    replay.add([sent])
    assert replay.last_id() == last + 2, "ids are never reused"


def test_an_example_that_was_asked_is_the_domains_whatever_the_router_says(
    store: Store, router: Router
) -> None:
    store.replay.add([answered(prompts(NEW, 12)[0])])
    register(store, router)
    router.threshold = 2.0  # it recognises nothing
    assert file_anew(store, router) == {NEW: 1}


def test_answers_that_ended_after_the_registration_are_filed_too(store: Store, router: Router) -> None:
    """Their request was routed when the router did not know the domain yet."""
    register(store, router)
    store.replay.add([answered(text, created_at=time.time() + 1) for text in asked_later(4)])
    assert file_anew(store, router) == {NEW: 4}


def test_a_domain_that_is_registered_again_is_new_again(store: Store, router: Router) -> None:
    register(store, router)
    file_anew(store, router)
    remove_domain(store, router, NEW)
    store.replay.add([answered(text) for text in asked_later(4)])
    register(store, router)
    assert is_due(store, LATER)
    assert file_anew(store, router) == {NEW: 4}


def test_a_router_that_does_not_know_the_domain_yet_moves_nothing(store: Store, router: Router) -> None:
    store.replay.add([answered(text) for text in asked_later(4)])
    store.registry.add_domain(Domain(NEW, "", tuple(prompts(NEW, 12)), time.time()))
    assert file_anew(store, router) == {}
    assert is_due(store, LATER), "it is done when the router is fitted"


def test_a_domain_that_is_removed_meanwhile_gets_nothing(
    store: Store, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.replay.add([answered(text) for text in asked_later(4)])
    register(store, router)
    route = router.route

    def removed(texts: list[str]) -> Any:
        found = route(texts)
        remove_domain(store, router, NEW)
        return found

    monkeypatch.setattr(router, "route", removed)
    assert file_anew(store, router) == {}
    assert store.replay.sizes() == {SHARED: 4}


def test_a_domain_that_is_registered_meanwhile_is_still_due(
    store: Store, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.replay.add([answered(text) for text in asked_later(4)])
    register(store, router)
    route = router.route

    def another(texts: list[str]) -> Any:
        store.registry.add_domain(Domain("another", "", ("a", "b"), time.time()))
        monkeypatch.setattr(router, "route", route)
        return route(texts)

    monkeypatch.setattr(router, "route", another)
    assert file_anew(store, router) == {NEW: 4}
    assert is_due(store, LATER)


def test_one_client_does_not_hide_what_others_asked(store: Store, router: Router) -> None:
    store.replay.add([answered(text, source="quiet") for text in asked_later(8)])
    store.replay.add([answered(prompts(OLD[0], 1)[0], source="loud") for _ in range(LOOKED_AT)])
    register(store, router)
    assert file_anew(store, router)[NEW] >= 7


def test_what_was_ended_early_is_taken_up_where_it_was(
    store: Store, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.replay.add([answered(text) for text in asked_later(AT_ONCE + 4)])
    store.replay.add([answered(text) for text in prompts(OLD[0], AT_ONCE + 4)])  # looked at first, and left
    register(store, router)
    routed: list[str] = []
    route = router.route
    monkeypatch.setattr(router, "route", lambda texts: routed.extend(texts) or route(texts))
    filing, asked = Filing(store, router, Words(), threading.Lock()), iter([True, False])
    assert filing.file(lambda: next(asked)) == {}
    assert is_due(store, LATER)
    found = filing.file()
    assert found[NEW] >= AT_ONCE
    assert len(routed) <= 2 * AT_ONCE + 8 + 1, "none was routed twice"
    assert not is_due(store, LATER)


def test_no_purge_goes_on_while_records_are_moved(store: Store, router: Router) -> None:
    store.replay.add([answered(text) for text in asked_later(4)])
    register(store, router)
    lock = threading.Lock()
    filing = Filing(store, router, Words(), lock)
    with lock:  # as a purge holds it
        thread = threading.Thread(target=filing.file)
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
        assert store.replay.purge() == 4
    thread.join(10)
    assert store.replay.sizes() == {}, "what was purged does not come back"


def test_moved_records_are_no_new_requests(store: Store, router: Router) -> None:
    """An earlier update may have been trained on them, so they say nothing of what it published."""
    live = SimpleNamespace(domain=SHARED, last_record=store.replay.last_id())
    store.replay.add([answered(text) for text in asked_later(20)])
    store.registry.set_meta(TARGET_ID, "t")
    watch = Watch(lambda *_: pytest.fail("nothing is measured"), store)
    live.last_record = store.replay.last_id()
    register(store, router)
    assert file_anew(store, router)[NEW] >= 16
    assert watch._since(live) == {}  # type: ignore[arg-type]
    store.replay.add([answered(asked_later(30)[-1], domain=NEW)])
    assert [len(some) for some in watch._since(live).values()] == [1]  # type: ignore[arg-type]


def test_a_gate_that_has_looked_before_judges_by_what_was_moved(store: Store, router: Router) -> None:
    texts = asked_later(40)
    store.replay.add([answered(text) for text in texts[:30]])
    held = HeldOut(store.replay)
    before = held.records(SHARED, 1, "t")
    register(store, router)
    store.replay.add([answered(text, domain=NEW) for text in texts[30:]])
    early = held.records(NEW, 1, "t")
    file_anew(store, router)
    found = held.records(NEW, 1, "t")
    assert len(found) > len(early)
    allowed = {tuple(one.token_ids) for one in [*before, *early]}
    assert {tuple(one.token_ids) for one in found} <= allowed, "none that was trained on"
    assert held.records(SHARED, 1, "t") == HeldOut(store.replay).records(SHARED, 1, "t")


def test_a_trainer_takes_them_for_new_records(store: Store, router: Router) -> None:
    texts = asked_later(20)
    store.replay.add([answered(text) for text in texts])
    trained = store.replay.last_id()
    register(store, router)
    found = file_anew(store, router)
    assert store.replay.counts_since(None, trained) == found[NEW] >= 16


@pytest.fixture
def system(store: Store, router: Router, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """As much of one as is touched. Its clock is past the wait."""
    monkeypatch.setattr(filing, "WAIT", 0.0)
    return SimpleNamespace(
        store=store,
        router=router,
        changing=threading.Lock(),
        engine=SimpleNamespace(tokenizer=Words()),
        settings=SimpleNamespace(home=store.home.path, selector="evidence"),
    )


@pytest.mark.parametrize("selector", ["evidence", "fixed"])
def test_a_server_files_by_itself(
    system: SimpleNamespace, router: Router, selector: str, caplog: pytest.LogCaptureFixture
) -> None:
    store, system.settings.selector = system.store, selector
    store.replay.add([answered(text) for text in asked_later(6)])
    register(store, router)
    allowed = [False]
    refits = Refits(system, lambda: allowed[0])  # type: ignore[arg-type]
    refits.look()
    assert store.replay.sizes() == {SHARED: 6}, "the engine is busy"
    allowed[0] = True
    with caplog.at_level(logging.INFO, "moedraft"):
        refits.look()
    told = f"earlier records are of the domain {NEW!r} now" in caplog.text
    assert (NEW in store.replay.sizes()) is told is (selector == "evidence")
    assert is_due(store) is (selector == "fixed")


def test_where_filing_fails_the_router_is_refitted_all_the_same(
    system: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> Any:
        raise StorageFull("the disk is full.")

    register(system.store, system.router)
    monkeypatch.setattr(filing, "file_under", full)
    looked: list[Store] = []
    monkeypatch.setattr("moedraft.serve.worker.refits.is_due", looked.append)
    system.store.replay.add([answered(text) for text in asked_later(4)])
    refits = Refits(system, lambda: True)  # type: ignore[arg-type]
    refits.look()
    assert looked == [system.store]
    assert "the disk is full" in caplog.text
    assert is_due(system.store)
    monkeypatch.undo()
    refits.look()
    assert is_due(system.store, LATER), "it is not tried again at once"
