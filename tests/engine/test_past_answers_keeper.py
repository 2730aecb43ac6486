"""The earlier answers that lookup searches are those that the home keeps, and no others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moedraft.core import SHARED, Domain, ReplayRecord, SamplingParams, Sequence, StorageError
from moedraft.drafting.lookup.past_answers import PastAnswers
from moedraft.storage.store import Store
from moedraft.system.recorder import Recorder
from moedraft.system.sources.past_answers import PastAnswersKeeper

PLAIN = ReplayRecord(
    domain="sql",
    expert="sql",
    adapter_version=0,
    target_id="t",
    token_ids=[1, 2, 3, 4, 5],
    num_prompt_tokens=2,
    topk_ids=[[3], [4], [5]],
    topk_logprobs=[[0.0]] * 3,
    rejected=[],
    drafted=0,
    accepted=0,
    created_at=1.0,
)


def record(*answer: int, **changes: str) -> ReplayRecord:
    count = len(answer)
    texts = {"token_ids": [1, 2, *answer], "topk_ids": [[token] for token in answer]}
    return replace(PLAIN, **texts, topk_logprobs=[[0.0]] * count, **changes)


def ended(*answer: int, reason: str = "stop", captured: bool = True, domain: str = "sql") -> Sequence:
    made = Sequence("r", [1, 2, *answer], 2, SamplingParams(), 0, prompt="hello")
    made.finish_reason, made.routed = reason, domain  # type: ignore[assignment]
    count = len(answer)
    top = torch.tensor(answer)[:, None], torch.zeros(count, 1)
    made.captured = [SimpleNamespace(top=lambda: top)] if captured else []
    return made


@pytest.fixture
def keeper(store: Store) -> PastAnswersKeeper:
    for name in ("sql", "code"):
        store.registry.add_domain(Domain(name, "", ("one", "two"), 0.0))
    return PastAnswersKeeper(store, PastAnswers(1000), "t")


def guesses(keeper: PastAnswersKeeper, text: list[int], domain: str = "sql") -> list[int]:
    found = keeper.past.find(domain, text, 3)
    return found.tokens if found else []


def test_a_new_process_knows_what_the_home_keeps(keeper: PastAnswersKeeper) -> None:
    keeper.store.replay.add([record(3, 4, 5), record(3, 4, 6), record(7, 8, domain="code")])
    assert guesses(keeper, [3]) == []
    keeper.refresh([], now=True)
    assert guesses(keeper, [3]) == [4, 6], "the newest of two"
    assert guesses(keeper, [7], "code") == [8]
    assert guesses(keeper, [1, 2]) == [], "prompts are not searched"


def test_answers_of_another_target_are_no_answers(keeper: PastAnswersKeeper) -> None:
    keeper.store.replay.add([record(3, 4, 5, target_id="another")])
    keeper.refresh([], now=True)
    assert guesses(keeper, [3]) == []


def test_an_answer_guesses_from_its_end_on(keeper: PastAnswersKeeper) -> None:
    keeper(ended(3, 4, 5))
    assert guesses(keeper, [3]) == [4, 5] == guesses(keeper, [3], SHARED)


def test_what_is_not_kept_for_learning_is_not_kept_here(keeper: PastAnswersKeeper) -> None:
    uncounted = ended(3, 4)
    uncounted.counted = False
    for one in (uncounted, ended(3, 4, captured=False), *(ended(3, 4, reason=r) for r in ("abort", "error"))):
        keeper(one)
    assert guesses(keeper, [3]) == []


@pytest.mark.parametrize("domain", ["sql", None])
def test_what_was_purged_guesses_nothing(keeper: PastAnswersKeeper, domain: str | None) -> None:
    for one in (ended(3, 4, 5), ended(7, 8, domain="code")):
        keeper(one)
        Recorder(keeper.store, "t")(one)
    keeper.refresh([], now=True)
    assert guesses(keeper, [3]) == [4, 5]
    keeper.store.replay.purge(domain)
    keeper.refresh([], now=True)
    assert guesses(keeper, [3]) == guesses(keeper, [3], SHARED) == []
    assert guesses(keeper, [7], "code") == ([8] if domain else [])


def test_a_removed_domain_guesses_nothing(keeper: PastAnswersKeeper) -> None:
    keeper.store.replay.add([record(3, 4, 5)])
    keeper.refresh([], now=True)
    keeper.store.registry.remove_domain("sql")
    keeper.refresh([], now=True)
    assert guesses(keeper, [3]) == guesses(keeper, [3], SHARED) == []


def test_a_home_that_cannot_be_read_is_read_later(
    keeper: PastAnswersKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper.store.replay.add([record(3, 4, 5)])
    keeper(ended(9, 8))

    def fails(*_: object, **__: object) -> list[object]:
        raise StorageError("The disk is gone.")

    with monkeypatch.context() as patched:
        patched.setattr(keeper.store.replay, "answers", fails)
        keeper.refresh([], now=True)
        assert guesses(keeper, [3]) == guesses(keeper, [9]) == [], "what may have been purged is gone at once"
    keeper.refresh([], now=True)
    assert guesses(keeper, [3]) == [4, 5]


def test_a_fault_of_any_kind_ends_no_step_and_is_said_once(
    keeper: PastAnswersKeeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keeper.store.replay.add([record(3, 4, 5)])
    tries = []

    def fails(*_: object, **__: object) -> list[object]:
        tries.append(1)
        raise MemoryError("too much")

    with monkeypatch.context() as patched:
        patched.setattr(keeper.store.replay, "answers", fails)
        for _ in range(20):
            keeper.refresh([])
        assert len(tries) == 1, "it is not tried again at each step"
        keeper.refresh([], now=True)
    assert caplog.text.count("Earlier answers cannot be read now: too much") == 1
    keeper.refresh([], now=True)
    assert guesses(keeper, [3]) == [4, 5]


def test_while_others_wait_it_reads_one_domain_at_a_step(keeper: PastAnswersKeeper) -> None:
    keeper.store.replay.add([record(3, 4), record(7, 8, domain="code")])
    keeper.refresh([])
    assert [guesses(keeper, [3]), guesses(keeper, [7], "code")].count([]) == 1
    keeper.refresh([])
    assert [guesses(keeper, [3]), guesses(keeper, [7], "code")] == [[4], [8]]


def test_at_the_start_each_domain_has_its_share_of_those_of_all(store: Store) -> None:
    for name in ("sql", "code"):
        store.registry.add_domain(Domain(name, "", ("one", "two"), 0.0))
    store.replay.add([record(100 + i, i, 300, domain=name) for name in ("sql", "code") for i in range(40)])
    keeper = PastAnswersKeeper(store, PastAnswers(120), "t")
    keeper.refresh([], now=True)
    common = [i for i in range(40) if keeper.past.find(SHARED, [100 + i], 1)]
    assert common == list(range(common[0], 40))
    assert 5 <= len(common) <= 21
    assert keeper.past.find("sql", [139], 1)


def test_it_looks_now_and_then(keeper: PastAnswersKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    monkeypatch.setattr(keeper.store.registry, "purges", lambda: looks.append(1) or 0)
    for _ in range(5):
        keeper.refresh([])
    assert len(looks) == 1
    keeper.refresh([], now=True)
    assert len(looks) == 2


def test_nothing_is_read_where_nothing_is_searched(tmp_path: Path, store: Store) -> None:
    store.replay.add([record(3, 4, 5, domain=SHARED)])
    keeper = PastAnswersKeeper(store, PastAnswers(0), "t")
    keeper.refresh([], now=True)
    keeper(ended(3, 4, 5))
    assert guesses(keeper, [3]) == []
