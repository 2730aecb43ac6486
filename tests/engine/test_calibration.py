"""What rounds cost is known before the first request, and nothing else changes by measuring it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from moedraft.core import SamplingParams, Sequence
from moedraft.drafting.drafter import NoDrafter, NoExperts
from moedraft.drafting.lengths.budget import Budget
from moedraft.drafting.lengths.costs import RoundCosts
from moedraft.drafting.model import ModelDrafter
from moedraft.engine.calibration import TOKENS, calibrate, growth_of
from moedraft.engine.engine import Engine
from moedraft.routing.selector import FixedSelector

from tiny import NumberTokenizer, TinyLM, random_table

VOCAB = 12


def engine(sinks: list[object] | None = None, *, max_len: int = 128, drafts: bool = True) -> Engine:
    target = TinyLM(random_table(VOCAB, 1), max_len)
    drafter = ModelDrafter(TinyLM(target.table, max_len), NoExperts(), 4, VOCAB) if drafts else NoDrafter()
    return Engine(target, NumberTokenizer(), drafter, FixedSelector(), max_batch_size=4, sinks=(sinks or []))  # type: ignore[arg-type]


def test_the_costs_of_one_row_and_of_a_full_batch_are_known_and_nothing_else() -> None:
    seen: list[Sequence] = []
    one = engine([seen.append])
    budget, limits, source = one.chooser.budget, one.chooser.limits, one.chooser.source
    calibrate(one)
    for rows in (1, 4):
        assert (budget.costs.usual[rows] >= 0).all()
        assert budget.costs.slopes(rows) == pytest.approx(budget.costs.usual[rows])
    assert one.chooser.budget is budget
    assert (one.chooser.limits, one.chooser.source) == (limits, source)
    assert not budget.acceptance
    assert budget.speedup is None
    assert not one.has_work
    assert not one.sequences
    assert not any(row.counted for row in seen)


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_a_slow_moment_does_not_make_drafting_look_expensive(
    monkeypatch: pytest.MonkeyPatch, slow: int
) -> None:
    """A round takes two milliseconds and one for each draft step; for a third of the time ten times that."""
    one, rounds = engine(), 0

    def took(budget: Budget, rows: int, steps: int, verified: int, tokens: int, ms: float) -> None:
        nonlocal rounds
        rounds += 1
        observe(
            budget, rows, steps, verified, tokens, (2.0 + steps) * (10 if (rounds - 1) // 24 == slow else 1)
        )

    observe = Budget.observe
    monkeypatch.setattr(Budget, "observe", took)
    monkeypatch.setattr("moedraft.engine.calibration.growth_of", lambda *_: None)  # all tokens cost alike
    calibrate(one)
    assert rounds == 72
    for rows in (1, 4):
        begin, step, each = one.chooser.budget.costs.usual[rows]
        for steps in (1, 3):  # each costs half a plain round
            assert begin + steps * (step + each) == pytest.approx(steps / 2, rel=0.05)


class Timed:
    """A clock that only forwards turn: `seconds` of one by how many tokens it reads, all rows together."""

    def __init__(self, one: Engine, patch: pytest.MonkeyPatch, seconds: Callable[[int], float]) -> None:
        self.now, self.seconds, self.read = 0.0, seconds, list[int]()
        patch.setattr(one.runner, "rehearse", self.rehearse)
        for name in ("perf_counter", "monotonic"):
            patch.setattr(f"moedraft.engine.calibration.{name}", lambda: self.now)

    def rehearse(self, rows: int, width: int, start: int) -> None:
        self.read.append(rows * width)
        self.now += self.seconds(rows * width)


def test_a_forward_that_grows_in_steps_is_known_by_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tokens take as long as one; each further four take half as long again. Noise only ever adds."""
    one = engine()
    timed = Timed(one, monkeypatch, lambda n: 0.01 * (1 + (n - 1) // 4 * 0.5))
    plain, calls = timed.seconds, iter(range(1000))
    timed.seconds = lambda n: plain(n) + 0.02 * (next(calls) % 4 == 0)
    growth = growth_of(one, 4)
    assert growth is not None
    assert growth.at([1, 4, 5, 8]).tolist() == pytest.approx([10, 10, 15, 15])
    assert growth.at(36) == pytest.approx(50)  # four rows of nine tokens


def test_a_target_that_is_too_slow_is_not_timed_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine()
    timed = Timed(one, monkeypatch, lambda _: 1.0)
    assert growth_of(one, 4) is None
    assert timed.now <= 4


def test_a_slow_target_is_known_by_one_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is time for two passes over one row and hardly one over the full batch."""
    one = engine()
    Timed(one, monkeypatch, lambda n: 0.05 if n < 10 else 1.0)
    growth = growth_of(one, 8)
    assert growth is not None
    assert growth.tokens.max() == 9


def test_part_of_a_curve_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second pass over one row is cut off before its longest draft."""
    one = engine()
    Timed(one, monkeypatch, lambda _: 0.1)
    assert growth_of(one, 4) is None


def test_no_forward_is_larger_than_memory_should_bear(monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine()
    timed = Timed(one, monkeypatch, lambda _: 0.001)
    growth_of(one, 200)
    assert max(timed.read) == 200


@pytest.mark.parametrize("longest", [0, 32])
def test_forwards_are_timed_for_any_longest_draft(longest: int) -> None:
    one = engine()
    one.chooser.budget.longest = longest
    growth = growth_of(one, 4)
    assert (growth is None) == (longest == 0)
    if growth:
        assert set(range(1, 34)) <= set(growth.tokens)


def test_where_lengths_are_fixed_forwards_are_not_timed() -> None:
    one = engine()
    with one.chooser.using(fixed_length=3):
        assert growth_of(one, 4) is None


def test_forwards_are_timed_by_their_tokens() -> None:
    one = engine()
    calibrate(one)
    growth = one.chooser.budget.costs.growth
    assert growth is not None
    assert set(range(1, 10)) <= set(growth.tokens)
    assert growth.tokens[-1] == 4 * 9
    assert (np.diff(growth.ms) >= 0).all()
    plain = engine()
    calibrate(plain, forwards=False)
    assert plain.chooser.budget.costs.growth is None
    assert plain.chooser.budget.costs.usual


def test_forwards_that_fail_leave_the_rounds_to_be_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine()
    monkeypatch.setattr(one.runner, "rehearse", lambda *_: 1 / 0)
    calibrate(one)
    assert one.chooser.budget.costs.usual
    assert one.chooser.budget.costs.growth is None


def test_a_context_that_just_suffices_is_timed() -> None:
    assert growth_of(engine(max_len=TOKENS + 9), 1) is not None
    assert growth_of(engine(max_len=TOKENS + 8), 1) is None


def test_answers_are_the_same_after_it() -> None:
    params = SamplingParams(max_tokens=20)
    one, other = engine(), engine()
    calibrate(other)
    prompts = [[1, 2, 3], [4, 5]]
    answers = [[o.token_ids for o in each.generate(prompts, params)] for each in (one, other)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("one", [engine(drafts=False), engine(max_len=24)], ids=["no draft", "no room"])
def test_an_engine_that_cannot_be_measured_is_left_alone(one: Engine) -> None:
    calibrate(one)
    assert not one.chooser.budget.costs.usual


def test_an_engine_with_work_is_left_alone() -> None:
    one = engine()
    one.add([1, 2, 3])
    calibrate(one)
    assert not one.chooser.budget.costs.usual
    assert one.has_work


def test_a_poor_but_cheap_draft_is_used_where_costs_were_measured() -> None:
    """By the usual prior a token accepted in one case of three does not pay; where it is cheap it does."""
    drafted = {}
    for measured in (False, True):
        budget = Budget(8, ragged=True)
        if measured:
            budget.costs = RoundCosts({1: np.array([0.02, 0.04, 0.03])})
        drafted[measured] = budget.plan({0: 0.3}, {}, 1).model
    assert drafted == {False: False, True: True}


def test_a_target_that_gives_no_numbers_does_not_hold_up_a_start() -> None:
    one = engine()
    one.target.table[:] = torch.nan  # type: ignore[attr-defined]
    calibrate(one)
    assert not one.has_work


def test_a_fault_in_it_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine()
    limits, known = one.chooser.limits, one.chooser.budget
    with monkeypatch.context() as broken:
        broken.setattr(one.runner, "score", lambda *_: 1 / 0)
        calibrate(one)
    assert (one.chooser.limits, one.chooser.budget, one.chooser.budget) == (limits, known, known)
    assert not one.has_work
    [answer] = one.generate([[1, 2, 3]], SamplingParams(max_tokens=5))
    assert len(answer.token_ids) == 5
