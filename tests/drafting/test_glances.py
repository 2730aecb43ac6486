"""First guesses are counted on all tokens of an answer, drafted or not, and cost little time."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from random_experts import bank_of, base_of

from moedraft.core import SHARED, SamplingParams, Sequence
from moedraft.drafting.arms.feature_judge import FeatureJudge
from moedraft.drafting.base import FeatureBase, features_of, first_guesses
from moedraft.drafting.experts.lora import ExpertBank
from moedraft.drafting.feature import FeatureDrafter
from moedraft.drafting.glances import SAVED, TIME_SHARE, TOKENS, FeatureLook, Glances, look_of_model
from moedraft.drafting.kept import ReadStates
from moedraft.engine.engine import Engine
from moedraft.models import LanguageModel
from moedraft.routing.selector import FixedSelector
from moedraft.system.build import load

from random_models import prompts_of, random_model
from rounds import row
from tiny import NumberTokenizer

EXPERTS = [SHARED, "a", "b", "unknown yet"]


@pytest.fixture(scope="module")
def target() -> LanguageModel:
    return random_model("llama", 0)


@pytest.fixture
def base(target: LanguageModel, tmp_path: Path) -> FeatureBase:
    return base_of(target, tmp_path / "draft")


class EveryName(FixedSelector):
    def knows(self, expert: str) -> bool:
        return True


@pytest.fixture
def bank(base: FeatureBase) -> ExpertBank:
    return bank_of(base)


def answers(
    target: LanguageModel, base: FeatureBase, bank: ExpertBank, source: str, tokens: int
) -> list[Sequence]:
    """Answers of so many tokens, of prompts of several lengths in changing slots, that were glanced at."""
    drafter = FeatureDrafter(base.hf, bank, 3, target.vocab_size, states=ReadStates())
    glances = Glances(FeatureLook(drafter, FeatureJudge(drafter, bank)), clock=lambda: 0.0)
    for name in ("a", "b"):  # an expert whose output rows are not made yet is not looked at
        bank.select([name])
    ended: list[Sequence] = []
    engine = Engine(
        target,
        NumberTokenizer(),
        drafter,
        EveryName(),
        sinks=[ended.append],
        glance=glances,
        max_batch_size=3,
        draft_source=source,  # type: ignore[arg-type]
        prefill_chunk=7,
    )
    for i, prompt in enumerate(prompts_of(30, seed=2)):
        engine.add(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True), expert=EXPERTS[i % 4])
    while engine.has_work:
        engine.step()
    assert not glances.failures
    return ended


@pytest.mark.parametrize("source", ["model", "lookup"], ids=["drafted", "never drafted"])
def test_what_is_counted_are_the_guesses_for_the_whole_answer(
    target: LanguageModel, base: FeatureBase, bank: ExpertBank, source: str
) -> None:
    right = 0
    for one in answers(target, base, bank, source, TOKENS + 1):
        bank.select([one.expert])
        guesses = first_guesses(base, one.token_ids, features_of(base, target, one.token_ids))
        begin = one.num_prompt_tokens + 1  # the target has the first token before anything can be drafted
        hits = sum(g == t for g, t in zip(guesses[begin:], one.token_ids[begin:], strict=True))
        found = one.speculation
        assert (found.first_guesses, found.right_first_guesses) == (TOKENS, hits)
        assert found.shared_first_guesses == TOKENS * (one.expert == SHARED)
        assert found.shared_right_first_guesses == hits * (one.expert == SHARED)
        right += hits
    assert right > 0


def test_of_a_long_answer_a_part_is_looked_at(
    target: LanguageModel, base: FeatureBase, bank: ExpertBank
) -> None:
    assert {one.speculation.first_guesses for one in answers(target, base, bank, "model", 40)} == {TOKENS}


def test_an_answer_of_one_token_has_no_guess(
    target: LanguageModel, base: FeatureBase, bank: ExpertBank
) -> None:
    assert {one.speculation.first_guesses for one in answers(target, base, bank, "model", 1)} == {0}


def test_an_independent_draft_is_glanced_at_too(tmp_path: Path) -> None:
    with load("mini", home=tmp_path / "home") as engine:
        ended: list[Sequence] = []
        engine.subscribe(ended.append)
        engine.generate("How do I sort a list in Python?", SamplingParams(max_tokens=24))
        engine.generate("How do I sort a list in Python?", SamplingParams(max_tokens=24), draft=False)
    drafted, plain = (one.speculation for one in ended)
    assert drafted.first_guesses == len(ended[0].generated) - 1
    assert 0 < drafted.right_first_guesses <= drafted.first_guesses
    assert plain.first_guesses == 0


def test_a_long_text_is_not_read_again() -> None:
    one = row(0, *range(2000))
    one.num_prompt_tokens = 1900
    assert look_of_model(one, SimpleNamespace(max_len=4096), SimpleNamespace()) == []  # type: ignore[arg-type]


def test_glances_take_little_of_the_time() -> None:
    now, looked = 0.0, 0

    def look(one: Sequence) -> list[bool]:
        nonlocal now, looked
        now, looked = now + 0.01, looked + 1
        return [True, False]

    glances = Glances(look, clock=lambda: now)
    one = row(0, 1, 2, 3)
    for _ in range(10_000):
        glances(one)
        now += 0.02
    assert looked * 0.01 <= TIME_SHARE * now + SAVED + 0.01
    assert looked > 0.9 * TIME_SHARE * now / 0.01
    assert (one.speculation.first_guesses, one.speculation.right_first_guesses) == (2 * looked, looked)


def test_a_text_whose_look_would_stall_the_engine_is_not_looked_at() -> None:
    now, looked = 0.0, []

    def look(one: Sequence) -> list[bool]:
        nonlocal now
        now += 0.01 * len(one.token_ids)
        looked.append(len(one.token_ids))
        return [True]

    glances = Glances(look, clock=lambda: now)
    for size in (3, 100, 15, 100, 3):
        glances(row(0, *range(size)))
        now += 1000.0
    assert looked == [3, 15, 3]


def test_after_one_slow_look_answers_are_looked_at_again() -> None:
    now, looked = 0.0, 0

    def look(one: Sequence) -> list[bool]:
        nonlocal now, looked
        now, looked = now + (0.001 if looked else 3.0), looked + 1
        return [True]

    glances = Glances(look, clock=lambda: now)
    for _ in range(200):
        glances(row(0, *range(100)))
        now += 10.0
    assert looked > 50


def test_a_token_that_only_the_target_has_is_read_as_another() -> None:
    """Targets pad their vocabularies, and a prompt of token ids may name what stands there."""
    draft = random_model("llama", 1, vocab=90)
    one = row(0, *range(80, 97))
    one.num_prompt_tokens = 4
    bank = SimpleNamespace(select=lambda rows: None)
    seen = look_of_model(one, draft, bank)  # type: ignore[arg-type]
    assert len(seen) == len(one.token_ids) - 5
    assert not any(seen[-7:])  # these tokens it cannot guess


def test_a_glance_that_fails_leaves_the_answer_alone(caplog: pytest.LogCaptureFixture) -> None:
    def look(one: Sequence) -> list[bool]:
        raise RuntimeError("out of memory")

    glances, one = Glances(look, clock=lambda: 0.0), row(0, 1, 2, 3)
    for _ in range(3):
        glances(one)
    assert glances.failures == 3
    assert one.speculation.first_guesses == 0
    assert len(caplog.records) == 1  # it is told once, not at every answer


@pytest.mark.parametrize("left_out", ["draft", "counted"])
def test_plain_and_uncounted_requests_are_not_glanced_at(left_out: str) -> None:
    one = row(0, 1, 2, 3)
    setattr(one, left_out, False)
    Glances(lambda _: [True])(one)
    assert one.speculation.first_guesses == 0
