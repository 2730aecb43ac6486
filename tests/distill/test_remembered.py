"""What was measured once under the same adapters is not measured again, and no figure changes by that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from candidates import candidate
from distill_rig import record

from moedraft.core import SHARED, Domain, ReplayRecord
from moedraft.distill.measuring.figures import FEW, Measured
from moedraft.distill.measuring.measures import Serving
from moedraft.distill.measuring.remembered import SEVERAL, Remembered
from moedraft.storage.store import Store

BARE: Serving = {SHARED: None, "code": None}


@dataclass
class Figures:
    """Figures that tell adapters and records apart, and who was asked for."""

    chances: bool = True
    asked: list[list[int]] = field(default_factory=list)

    def __call__(
        self, serving: Serving, domain: str, records: Sequence[ReplayRecord], on_batch: Callable[[], None]
    ) -> Measured:
        self.asked.append([one.id for one in records])
        value = sum(one.tensors["lora_A"].sum().item() for one in serving.values() if one is not None)
        counts = np.array([[[one.id, int(100 * value)]] for one in records], np.int64)
        chances = np.array([[one.id, value] for one in records]) if self.chances else None
        return Measured(counts, 0.5 if len(records) < FEW else None, chances)


def records(count: int, first: int = 1) -> list[ReplayRecord]:
    return [replace(record(number, "code"), id=number) for number in range(first, first + count)]


def ask(measure: Any, serving: Serving, of: Sequence[ReplayRecord], domain: str = "code") -> Measured:
    found: Measured = measure(serving, domain, of, lambda: None)
    return found


@pytest.mark.parametrize("chances", [True, False])
def test_only_new_records_are_measured_and_all_are_told_in_their_order(chances: bool) -> None:
    figures, serving = Figures(chances), {SHARED: candidate(SHARED, 0.5), "code": candidate("code", 0.25)}
    measure = Remembered(figures)
    ask(measure, serving, records(FEW, 1))
    later = [*records(2, 100), *records(FEW - 1, 2)][::-1]
    found = ask(measure, serving, later)
    assert figures.asked == [list(range(1, FEW + 1)), [101, 100]]
    whole = ask(Figures(chances), serving, later)
    assert np.array_equal(found.counts, whole.counts)
    if chances:
        assert found.chances is not None
        assert np.array_equal(found.chances, whole.chances)
    assert (found.chances is None) == (not chances)
    assert ask(measure, serving, later).records == len(later)
    assert len(figures.asked) == 2, "nothing was left to measure"


def test_other_numbers_lists_settings_or_domains_are_measured_anew() -> None:
    figures, some = Figures(), records(FEW)
    measure, first = Remembered(figures), candidate(SHARED, 0.5)
    own = torch.arange(4, dtype=torch.int32)
    others = [
        {SHARED: candidate(SHARED, 0.25), "code": None},
        {SHARED: None, "code": None},
        {SHARED: first, "code": candidate("code", 0.5)},
        {SHARED: None, "code": first},
        {SHARED: replace(first, vocabulary=own), "code": None},
        {SHARED: replace(first, vocabulary=own + 1), "code": None},
        {SHARED: replace(first, config={**first.config, "lora_alpha": 7}), "code": None},
    ]
    ask(measure, {SHARED: first, "code": None}, some)
    for number, serving in enumerate(others, 2):
        ask(measure, serving, some)
        assert len(figures.asked) == number
    ask(measure, {SHARED: first, "prose": None}, some, "prose")
    assert len(figures.asked) == len(others) + 2
    ask(measure, {SHARED: candidate(SHARED, 0.5), "code": None}, some)
    assert len(figures.asked) == len(others) + 2, "equal numbers are the same adapter"


def test_a_record_that_took_anothers_id_is_measured() -> None:
    """After a purge the store can give an id again."""
    figures, some = Figures(), records(FEW)
    measure = Remembered(figures)
    ask(measure, BARE, some)
    other = replace(some[0], token_ids=[*some[0].token_ids[:-1], some[0].token_ids[-1] + 1])
    ask(measure, BARE, [other, *some[1:]])
    assert figures.asked[1:] == [[some[0].id]]


def test_of_few_records_the_loss_is_told_each_time() -> None:
    figures, few = Figures(), records(FEW - 1)
    measure = Remembered(figures)
    assert [ask(measure, BARE, few).loss for _ in range(2)] == [0.5, 0.5]
    assert len(figures.asked) == 2
    assert ask(measure, BARE, records(FEW)).loss is None


def test_what_is_remembered_is_bounded() -> None:
    figures, measure = Figures(), Remembered(Figures())
    measure.measure = figures
    for number in range(SEVERAL + 3):
        ask(measure, {SHARED: candidate(SHARED, float(number)), "code": None}, records(2 * FEW))
    ask(measure, {SHARED: candidate(SHARED, float(SEVERAL + 2)), "code": None}, records(FEW, 50))
    assert len(measure._known["code"]) == SEVERAL
    assert {len(rows) for rows in measure._known["code"].values()} == {FEW, 2 * FEW}


def test_a_candidate_that_was_published_is_known_as_what_serves(store: Store) -> None:
    store.registry.add_domain(Domain("code", "", ("x",) * 8, 0.0))
    figures, some, made = Figures(), records(FEW), candidate("code", 0.5)
    measure = Remembered(figures)
    ask(measure, {SHARED: None, "code": made}, some)
    store.adapters.publish(made)
    found = store.adapters.load_live("code", made.base_hash)
    assert found is not None
    ask(measure, {SHARED: None, "code": found[1]}, some)
    assert len(figures.asked) == 1
