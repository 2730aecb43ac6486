"""Which tokens experts and the shared adapter draft."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from moedraft.core import SHARED, ReplayRecord
from moedraft.distill.features import expert_vocabularies
from moedraft.distill.features.expert_vocabularies import Vocabularies, remembered

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


def test_counts_of_earlier_records_fade() -> None:
    found = remembered(Counter({1: 8, 2: 1}), Counter({2: 5, 3: 2}))
    assert found == {1: 4, 2: 5, 3: 2}
    assert remembered(remembered(found, Counter()), Counter()) == {1: 1, 2: 1, 3: 1}
