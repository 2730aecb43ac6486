"""Which tokens experts and the shared adapter draft."""

from __future__ import annotations

import pytest
import torch

from moedraft.core import SHARED, ReplayRecord
from moedraft.distill.features import expert_vocabularies
from moedraft.distill.features.expert_vocabularies import Vocabularies

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
