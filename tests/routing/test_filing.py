"""Records of the shared adapter go to the domain that is registered for their prompts."""

from __future__ import annotations

import logging
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from routing_fakes import TOPICS, WordEmbedder, prompts

from moedraft.core import SHARED, Domain, ReplayRecord
from moedraft.distill.judging.held_out import HeldOut
from moedraft.routing.router import Router
from moedraft.serve.worker.refits import Refits
from moedraft.storage.store import Store
from moedraft.system.build import ROUTER_FOLDER
from moedraft.system.domains import filing
from moedraft.system.domains.filing import file_anew, is_due
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
    fields |= {"topk_logprobs": [[-0.1], [-0.1]], "rejected": [], "drafted": 4, "accepted": 1}
    return ReplayRecord(**{**fields, **changes})


@pytest.fixture
def router(store: Store) -> Router:
    """It knows every topic but one."""
    for name in OLD:
        store.registry.add_domain(Domain(name, "", tuple(prompts(name, 12)), 1.0))
    made = Router(WordEmbedder(), store.home.path / ROUTER_FOLDER)
    made.fit({name: prompts(name, 12) for name in OLD})
    file_anew(store, made, Words())
    return made


def register(store: Store, router: Router) -> None:
    register_domain(store, router, NEW, prompts(NEW, 12))


def asked_later(count: int) -> list[str]:
    """Prompts of the new domain that are none of its examples."""
    return [text for text in prompts(NEW, 40) if text not in prompts(NEW, 12)][:count]


def test_what_was_asked_before_goes_to_the_new_domain(store: Store, router: Router) -> None:
    theirs = asked_later(6)
    store.replay.add([answered(text) for text in theirs])
    store.replay.add([answered(text) for text in prompts(OLD[0], 3)])  # the router knew these, and refused
    store.replay.add([answered(theirs[0], source="key", pinned=True)])  # the client asked for "shared"
    assert not is_due(store)
    register(store, router)
    assert is_due(store)
    found = file_anew(store, router, Words())
    moved = store.replay.records(NEW)
    assert found == {NEW: len(moved)}
    assert len(moved) >= 5, "nearly all of them"
    assert {one.expert for one in moved} == {SHARED}, "who drafted is not rewritten"
    assert store.replay.sizes() == {NEW: len(moved), SHARED: 10 - len(moved)}
    assert not is_due(store)
    assert file_anew(store, router, Words()) == {}


def test_an_example_that_was_asked_is_the_domains_whatever_the_router_says(
    store: Store, router: Router
) -> None:
    store.replay.add([answered(prompts(NEW, 12)[0])])
    register(store, router)
    router.threshold = 2.0  # it recognises nothing
    assert file_anew(store, router, Words()) == {NEW: 1}


def test_what_was_answered_after_the_registration_stays_where_the_selector_put_it(
    store: Store, router: Router
) -> None:
    register(store, router)
    store.replay.add([answered(text, created_at=time.time() + 1) for text in asked_later(4)])
    assert file_anew(store, router, Words()) == {}
    assert store.replay.sizes() == {SHARED: 4}


def test_a_router_that_does_not_know_the_domain_yet_moves_nothing(store: Store, router: Router) -> None:
    store.replay.add([answered(text) for text in asked_later(4)])
    store.registry.add_domain(Domain(NEW, "", tuple(prompts(NEW, 12)), time.time()))
    assert file_anew(store, router, Words()) == {}
    assert is_due(store), "it is done when the router is fitted"


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
    assert file_anew(store, router, Words()) == {}
    assert store.replay.sizes() == {SHARED: 4}


def test_the_gate_judges_by_what_was_moved(store: Store, router: Router) -> None:
    store.replay.add([answered(text) for text in asked_later(24)])
    before = {one.id for one in HeldOut(store.replay).records(SHARED, 1, "t")}
    register(store, router)
    file_anew(store, router, Words())
    after = {one.id for one in HeldOut(store.replay).records(NEW, 1, "t")}
    assert after
    assert after <= before, "none that the shared adapter was trained on"


@pytest.mark.parametrize("selector", ["evidence", "fixed"])
def test_a_server_files_by_itself(
    store: Store, router: Router, selector: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.replay.add([answered(text) for text in asked_later(6)])
    register(store, router)
    system = SimpleNamespace(
        store=store,
        router=router,
        changing=threading.Lock(),
        engine=SimpleNamespace(tokenizer=Words()),
        recorder=SimpleNamespace(flush=lambda: None),
        settings=SimpleNamespace(home=store.home.path, selector=selector),
    )
    allowed = [False]
    refits = Refits(system, lambda: allowed[0])  # type: ignore[arg-type]
    refits.look()
    assert store.replay.sizes() == {SHARED: 6}, "the engine is busy"
    allowed[0] = True
    with caplog.at_level(logging.INFO, "moedraft"):
        refits.look()
    told = f"earlier records are of the new domain {NEW!r}" in caplog.text
    assert (NEW in store.replay.sizes()) is told is (selector == "evidence")
    assert filing.is_due(store) is (selector == "fixed")
