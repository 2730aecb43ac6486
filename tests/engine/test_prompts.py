"""Prompts that are read along with a round: the same answers, and no word to the budget."""

from __future__ import annotations

import random

import pytest

from moedraft.core import SamplingParams
from moedraft.drafting.drafter import NoExperts
from moedraft.drafting.model import ModelDrafter
from moedraft.engine.engine import Engine
from moedraft.routing.selector import FixedSelector

from tiny import NumberTokenizer, TinyLM, random_table

VOCAB = 12


def engine(*, mixes: bool, **options: object) -> Engine:
    """Its draft is the target itself, so a guess is wrong only where a cache or a position is."""
    target = TinyLM(random_table(VOCAB, 1), 512)
    target.mixes = mixes
    drafter = ModelDrafter(TinyLM(target.table, 512), NoExperts(), 4, VOCAB)
    return Engine(target, NumberTokenizer(), drafter, FixedSelector(), max_batch_size=4, **options)  # type: ignore[arg-type]


def forwards(one: Engine) -> list[tuple[int, int]]:
    return one.target.forwards  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("chunk", [512, 7])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_answers_in_whatever_company(chunk: int, temperature: float) -> None:
    rng = random.Random(2)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 9, 40]))] for _ in range(20)]
    params = [
        SamplingParams(max_tokens=rng.randrange(1, 40), temperature=temperature, seed=i) for i in range(20)
    ]
    answers = {}
    for mixes in (False, True):
        one = engine(mixes=mixes, prefill_chunk=chunk, draft_source="model")
        outputs = one.generate(prompts, params)
        answers[mixes] = [output.token_ids for output in outputs]
        if not temperature:
            assert all(o.speculation.num_accepted_tokens == o.speculation.num_draft_tokens for o in outputs)
    assert answers[True] == answers[False]


def test_what_decodes_does_not_wait_for_a_prompt_alone() -> None:
    """The steps in which a prompt is read bring tokens, too; the first prompt is read by itself."""
    one = engine(mixes=True, prefill_chunk=10, adaptive_budget=False, num_speculative_tokens=1)
    read = []
    one.runner.read = lambda reading, whole=one.runner.read: (read.append(reading), whole(reading))[1]  # type: ignore[method-assign]
    one.add([1, 2, 3], SamplingParams(max_tokens=60, ignore_eos=True), request_id="first")
    one.step()
    one.add([4] * 31, SamplingParams(max_tokens=4, ignore_eos=True), request_id="second")
    told, came = [], []
    one.chooser.budget.observe = lambda *figures: told.append(figures)  # type: ignore[method-assign]
    while "second" in one.request_ids:
        before = len(told)
        came.append(([output.request_id for output in one.step()], len(told) > before))
    assert len(read) == 1
    assert (
        came[:3] == [(["first"], False)] * 3
    )  # three pieces of ten; such a round's time is not the budget's
    assert came[3] == (["first", "second"], True)


def test_a_prompt_of_one_token_needs_no_reading() -> None:
    one = engine(mixes=True)
    one.add([1, 2], SamplingParams(max_tokens=20), request_id="first")
    one.step()
    one.add([3], SamplingParams(max_tokens=5), request_id="second")
    assert {output.request_id for output in one.step()} == {"first", "second"}


def test_a_step_that_raises_ends_whom_it_served_and_no_one_else() -> None:
    one = engine(mixes=True)
    one.add([1, 2, 3], SamplingParams(max_tokens=60), request_id="first")
    one.step()
    one.add([4, 5, 6], SamplingParams(max_tokens=6), request_id="second")
    whole, one.target.forward = one.target.forward, None  # type: ignore[method-assign, assignment]
    with pytest.raises(TypeError):
        one.step()
    one.target.forward = whole  # type: ignore[method-assign]
    one.recover()
    assert not one.has_work
    plain = engine(mixes=False).generate([[4, 5, 6]], SamplingParams(max_tokens=6))
    assert one.generate([[4, 5, 6]], SamplingParams(max_tokens=6))[0].token_ids == plain[0].token_ids
