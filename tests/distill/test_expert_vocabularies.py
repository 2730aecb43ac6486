"""Which tokens experts and the shared adapter draft."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from moedraft.core import SHARED, ReplayRecord
from moedraft.distill.features import expert_vocabularies
from moedraft.distill.features.expert_vocabularies import Vocabularies, remembered
from moedraft.feature.vocabulary import ANSWER_WEIGHT, UNIT, counted

GENERAL = torch.arange(10)


def record(domain: str, answer: list[int]) -> ReplayRecord:
    count = len(answer)
    top = [[token] for token in answer], [[0.0]] * count
    return ReplayRecord(domain, domain, 0, "tiny", [1, *answer], 1, *top, [], count, 0)


def test_the_shared_adapter_has_what_its_own_traffic_holds() -> None:
    """Else an adapter that stands alone, as with `selector = "fixed"`, could never draft another language."""
    lists = Vocabularies(GENERAL, 100)
    lists.choose({SHARED: [record(SHARED, [50, 51, 3])]})
    assert lists.of(SHARED).tolist() == [*range(10), 50, 51]
    lists.choose({SHARED: [record(SHARED, [60])]})
    assert lists.of(SHARED).tolist() == [*range(10), 50, 51, 60]


def test_the_shared_adapter_has_what_experts_have_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_vocabularies, "MOST_SHARED", 12)
    lists = Vocabularies(GENERAL, 100)
    lists.choose({"code": [record("code", [40, 40, 41]), record("code", [42, 41, 41])], SHARED: []})
    assert lists.of("code").tolist()[-3:] == [40, 41, 42]
    assert lists.of(SHARED).tolist() == [*range(10), 40, 41]  # the commonest two


@pytest.mark.parametrize("name", ["code", SHARED])
def test_the_shared_adapter_keeps_what_came_often_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no room for all, an update's few records do not decide alone."""
    monkeypatch.setattr(expert_vocabularies, "MOST_SHARED", 12)
    lists = Vocabularies(GENERAL, 100)
    lists.choose({name: [record(name, [40, 40, 40, 41, 41, 41, 41])]})
    lists.choose({"law": [record("law", [50])], SHARED: []})
    assert lists.of(SHARED).tolist() == [*range(10), 40, 41]
    lists.forget()
    lists.choose({"law": [record("law", [50])]})
    assert 50 in lists.of(SHARED).tolist()


def test_what_a_domain_held_once_gives_way_to_nothing_that_it_never_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(expert_vocabularies, "OWN_TOKENS", 5)
    lists = Vocabularies(GENERAL, 100)
    lists.choose({"code": [record("code", [9, 8])]})  # 1, the prompt's, and two that fill the list up
    assert lists.of("code").tolist() == [0, 1, 2, 8, 9]
    lists.choose({"code": [record("code", [40])]})
    assert lists.of("code").tolist() == [0, 1, 8, 9, 40]
    for _ in range(9):  # however long ago
        lists.choose({"code": [record("code", [40, 41])]})
    assert lists.of("code").tolist() == [1, 8, 9, 40, 41]
    lists.restore("code", torch.tensor([1, 8, 9, 40, 41]))
    lists.choose({"code": [record("code", [42])]})  # tokens that the base lacks are kept first
    assert lists.of("code").tolist() == [1, 8, 40, 41, 42]
    lists.choose({"code": [record("code", [9])]})
    lists.forget()  # as after a purge of the records
    lists.choose({"code": [record("code", [43])]})
    assert lists.of("code").tolist() == [1, 40, 41, 42, 43]


def test_a_list_holds_what_the_target_held_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    """A domain's next answers will hold some of it, while most general tokens never come there."""
    monkeypatch.setattr(expert_vocabularies, "OWN_TOKENS", 5)
    lists = Vocabularies(GENERAL, 100)
    possible = [[40, 50, 60], [41, 51, 61]], [[-0.1, -3.0, -8.0], [-0.1, -2.0, float("-inf")]]
    answered = replace(record("code", [40, 41]), topk_ids=possible[0], topk_logprobs=possible[1])
    lists.choose({"code": [answered]})
    assert lists.of("code").tolist() == [1, 40, 41, 50, 51]  # by their probability
    monkeypatch.setattr(expert_vocabularies, "OWN_TOKENS", 8)
    lists = Vocabularies(GENERAL, 100)
    lists.choose({"code": [answered]})
    assert lists.of("code").tolist() == [0, 1, 2, 40, 41, 50, 51, 60]  # hardly possible, but more than others
    assert lists.of(SHARED).tolist() == [*range(10), 40, 41, 50, 51, 60]


def test_tokens_count_by_their_place_and_their_probability() -> None:
    answered = replace(
        record("code", [40, 41]), topk_ids=[[40, 50], [41, 50]], topk_logprobs=[[-math.log(2)] * 2] * 2
    )
    answer = ANSWER_WEIGHT * UNIT
    assert counted([answered]) == {1: UNIT, 40: 1.5 * answer, 41: 1.5 * answer, 50: answer}
    assert counted([answered, answered]) == {1: 2 * UNIT, 40: 3 * answer, 41: 3 * answer, 50: 2 * answer}
    assert counted([]) == {}


def test_counts_of_earlier_records_fade() -> None:
    found = remembered(Counter({1: 8 * UNIT, 2: UNIT, 4: 5}), Counter({2: 5 * UNIT, 3: 2}))
    assert found == {1: 4 * UNIT, 2: 5 * UNIT, 3: 2, 4: 5}
    for _ in range(9):
        found = remembered(found, Counter())
    assert found == {1: UNIT, 2: UNIT, 3: 2, 4: 5}  # what came stays before what was hardly possible


def test_what_is_no_token_is_in_no_list() -> None:
    lists = Vocabularies(GENERAL, 100)
    wrong = replace(record("code", [40]), topk_ids=[[2**31 - 1, -1, 50]], topk_logprobs=[[9.0, 800.0, 0.5]])
    lists.choose({"code": [wrong], SHARED: [wrong]})
    for name in ("code", SHARED):
        found = lists.of(name)
        assert found is not None
        assert {40, 50} <= set(found.tolist()) <= set(range(100))
    counts = lists.counts("code")
    assert counts is not None
    assert counts[1].min() > 0
