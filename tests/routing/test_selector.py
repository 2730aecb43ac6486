"""The selector sets experts from the prior, for all new sequences at once."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from routing_fakes import WordEmbedder, prompts

from moedraft.config import Settings
from moedraft.core import SHARED, SamplingParams, Sequence
from moedraft.drafting.model import ModelDrafter
from moedraft.routing.router import Route, Router
from moedraft.routing.selector import BackgroundSelector, Selector
from moedraft.selecting.selector import EvidenceSelector
from moedraft.system.build import selector_of

from tiny import TinyLM, random_table


def sequence(prompt: str, **fields: object) -> Sequence:
    made = Sequence("r", [1, 2], 2, SamplingParams(), 0, prompt)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


class CountingRouter(Router):
    calls: list[int]

    def route(self, texts: object) -> list[Route]:
        assert isinstance(texts, list)
        self.calls.append(len(texts))
        return super().route(texts)


def test_all_rows_are_routed_at_once_but_pinned(
    tmp_path: Path, embedder: WordEmbedder, examples: dict[str, list[str]]
) -> None:
    router = CountingRouter(embedder, tmp_path)
    router.calls = []
    router.fit(examples)
    new = [
        sequence(prompts("sql", 1, seed=3)[0]),
        sequence(prompts("sql", 1, seed=3)[0], pinned=True, expert="garten"),
        sequence("quasar nebula telescope xylophone"),
        sequence(prompts("kochen", 1, seed=3)[0], draft=False),
        sequence(prompts("kochen", 1, seed=3)[0], draft=False, capture=True),
    ]
    Selector(router).assign(new)
    assert [s.expert for s in new] == ["sql", "garten", SHARED, SHARED, "kochen"]
    assert router.calls == [3]


def test_without_domains_the_shared_draft_serves(tmp_path: Path, embedder: WordEmbedder) -> None:
    new = [sequence("anything")]
    Selector(Router(embedder, tmp_path)).assign(new)
    assert new[0].expert == SHARED


class GatedRouter(Router):
    """Says when it was asked, and routes only once its gate is open."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.asked = threading.Event()
        self.gate = threading.Event()

    def route(self, texts: Iterable[str]) -> list[Route]:
        self.asked.set()
        assert self.gate.wait(10)
        return super().route(list(texts))


@pytest.fixture
def gated(tmp_path: Path, embedder: WordEmbedder, examples: dict[str, list[str]]) -> Iterator[GatedRouter]:
    router = GatedRouter(embedder, tmp_path)
    router.fit(examples)
    yield router
    router.gate.set()


def test_a_row_begins_with_the_shared_draft(gated: GatedRouter) -> None:
    selector = BackgroundSelector(gated)
    row, pinned = sequence(prompts("sql", 1, seed=3)[0]), sequence("x", pinned=True, expert="garten")
    selector.assign([row, pinned])
    assert selector.settle() == []
    assert (row.expert, row.confidence) == (SHARED, None)
    assert gated.asked.wait(10)
    gated.gate.set()
    selector.close()  # waits for the prompt that is being routed
    assert selector.settle() == [row]
    assert row.expert == "sql"
    assert row.confidence is not None
    assert pinned.expert == "garten"
    assert selector.settle() == []


def test_an_answer_that_ends_waits_for_its_expert(gated: GatedRouter) -> None:
    selector = BackgroundSelector(gated)
    row, other = sequence(prompts("sql", 1, seed=3)[0]), sequence(prompts("kochen", 1, seed=3)[0])
    selector.assign([row])
    selector.assign([other])
    threading.Timer(0.05, gated.gate.set).start()
    assert row in selector.settle(row)
    assert row.expert == "sql"
    selector.close()


def test_seeded_sampling_does_not_depend_on_timing(gated: GatedRouter) -> None:
    selector = BackgroundSelector(gated)
    row = sequence(prompts("sql", 1, seed=3)[0])
    row.params = SamplingParams(temperature=1.0, seed=7)
    gated.gate.set()
    selector.assign([row])
    assert row.expert == "sql"
    assert selector.settle(row) == []
    selector.close()


def test_an_unroutable_row_stays_shared(
    gated: GatedRouter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(texts: object) -> list[Route]:
        raise RuntimeError("no embedder")

    monkeypatch.setattr(gated, "route", broken)
    selector = BackgroundSelector(gated)
    row = sequence("anything")
    selector.assign([row])
    assert selector.settle(row) == []
    assert row.expert == SHARED
    assert "could not be routed" in caplog.text
    selector.close()


def test_an_unroutable_seeded_row_stays_shared(
    gated: GatedRouter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is routed within the step, which must not end for that."""

    def broken(texts: object) -> list[Route]:
        raise RuntimeError("no embedder")

    row = sequence(prompts("sql", 1, seed=3)[0])
    row.params = SamplingParams(temperature=1.0, seed=7)
    selector = BackgroundSelector(gated)
    with monkeypatch.context() as patch:
        patch.setattr(gated, "route", broken)
        selector.assign([row])
    assert (row.expert, row.confidence) == (SHARED, None)
    assert "could not be routed" in caplog.text
    gated.gate.set()
    selector.assign([row])
    assert row.expert == "sql"
    selector.close()


@pytest.mark.parametrize(
    ("given", "told"), [({"selector": "evidence"}, True), ({}, False), ({"selector": "classifier"}, False)]
)
def test_a_start_tells_that_experts_with_keys_of_their_own_are_not_compared(
    gated: GatedRouter, caplog: pytest.LogCaptureFixture, given: dict[str, Any], told: bool
) -> None:
    """Where somebody asked for it; it is the default for others."""
    bank = SimpleNamespace()
    drafter = ModelDrafter(TinyLM(random_table(4, 1)), bank, 1, 4)  # type: ignore[arg-type]
    for scope, kind in (("full", BackgroundSelector), ("tail", EvidenceSelector)):
        caplog.clear()
        settings = Settings(adapter_scope=scope, **given)
        made = selector_of(settings, gated, drafter, bank)  # type: ignore[arg-type]
        made.close()
        assert type(made) is (BackgroundSelector if settings.selector == "classifier" else kind)
        said = "selector = evidence does nothing here" in caplog.text
        assert said == (told and scope == "full")
