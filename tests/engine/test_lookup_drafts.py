"""Drafts that are looked up in the text: same answers, fewer steps, and counted apart from the model's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from moedraft.core import SamplingParams
from moedraft.drafting.chooser import DraftSource
from moedraft.drafting.drafter import NoExperts
from moedraft.drafting.lookup.past_answers import PastAnswers
from moedraft.drafting.model import ModelDrafter
from moedraft.engine.engine import Engine
from moedraft.routing.selector import FixedSelector

from tiny import NumberTokenizer, TinyLM, random_table

VOCAB = 24
SOURCES: tuple[DraftSource, ...] = ("auto", "model", "lookup")


def looping() -> TinyLM:
    """After token i comes i + 1, then from the start again: greedy text repeats itself."""
    table = torch.zeros(VOCAB, VOCAB).double()
    table[torch.arange(VOCAB), (torch.arange(VOCAB) + 1) % 7] = 20.0
    return TinyLM(table + 0.01 * random_table(VOCAB, 3))


def engine(
    source: DraftSource = "auto", *, target: TinyLM | None = None, longest: int = 8, **options: Any
) -> Engine:
    return Engine(
        target or looping(),
        NumberTokenizer(),
        ModelDrafter(TinyLM(random_table(VOCAB, 9)), NoExperts(), 4, VOCAB),
        FixedSelector(),
        max_batch_size=4,
        max_speculative_tokens=longest,
        draft_source=source,
        **options,
    )


@pytest.mark.parametrize("source", SOURCES)
def test_same_answers_from_wherever_drafts_come(source: DraftSource) -> None:
    prompts = [[1, 2, 3], [5], [9, 4, 9, 4, 9], [2, 3, 2, 3], [6, 0, 1]]
    params = [SamplingParams(max_tokens=20 + 9 * i) for i in range(5)]
    for target in (looping(), TinyLM(random_table(VOCAB, 1))):
        plain = engine(target=target).generate(prompts, params, draft=False)
        fast = engine(source, target=target).generate(prompts, params)
        assert [o.token_ids for o in fast] == [o.token_ids for o in plain]


def test_a_text_that_repeats_itself_takes_few_steps() -> None:
    [output] = engine("lookup").generate([[1, 2]], SamplingParams(max_tokens=60))
    assert output.speculation.num_accepted_lookup_tokens > 20
    assert output.speculation.num_steps < 40
    assert output.speculation.num_draft_tokens == output.speculation.num_drafts == 0
    assert output.speculation.draft_acceptance_rate is None


@pytest.mark.parametrize("source", SOURCES)
def test_every_token_is_accounted_for(source: DraftSource) -> None:
    """Each step gives one token and what it accepted of the draft; the last one may be cut short."""
    one = engine(source)
    for output in one.generate([[1, 2], [3, 4, 3, 4], [8]], SamplingParams(max_tokens=40)):
        guessed = output.speculation.num_accepted_tokens + output.speculation.num_accepted_lookup_tokens
        assert output.speculation.num_steps + guessed in (40, 41)
        assert output.speculation.num_accepted_tokens <= output.speculation.num_draft_tokens
        assert output.speculation.num_accepted_lookup_tokens <= output.speculation.num_lookup_tokens
        assert source != "model" or output.speculation.num_lookup_tokens == 0
        assert source != "lookup" or output.speculation.num_draft_tokens == 0
    assert not one.chooser.lookup._indices  # nothing is kept of what has ended


def test_plain_decoding_looks_nothing_up() -> None:
    [output] = engine(longest=0).generate([[1, 2]], SamplingParams(max_tokens=30))
    assert (
        output.speculation.num_steps,
        output.speculation.num_lookup_tokens,
        output.speculation.num_draft_tokens,
    ) == (30, 0, 0)
    [output] = engine().generate([[1, 2]], SamplingParams(max_tokens=30), draft=False)
    assert (
        output.speculation.num_steps,
        output.speculation.num_lookup_tokens,
        output.speculation.num_draft_tokens,
    ) == (30, 0, 0)


def test_a_seeded_answer_comes_from_the_model_alone() -> None:
    """What a lookup is worth depends on what was served before, and a seed must fix the answer."""
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=40)
    alone = engine().generate([[1, 2, 1, 2]], params)[0]
    assert alone.speculation.num_lookup_tokens == 0 < alone.speculation.num_draft_tokens
    busy = engine()
    busy.generate([[1, 2]] * 6, SamplingParams(max_tokens=60))
    beside = busy.generate([[1, 2, 1, 2], [1, 2], [3]], [params, *[SamplingParams(max_tokens=60)] * 2])
    assert beside[0].token_ids == alone.token_ids
    assert beside[0].speculation.num_lookup_tokens == 0
    assert engine("lookup").generate([[1, 2, 1, 2]], params)[0].speculation.num_draft_tokens == 0


def filled(*answers: list[int]) -> PastAnswers:
    past = PastAnswers(2000)
    for answer in answers:
        past.add("shared", answer)
    return past


@pytest.mark.parametrize("source", SOURCES)
def test_same_answers_whatever_earlier_ones_say(source: DraftSource) -> None:
    """Right ones, wrong ones, and tokens at random."""
    prompts = [[1, 2, 3], [5], [9, 4], [20, 21]]
    params = [SamplingParams(max_tokens=20 + 9 * i) for i in range(4)]
    for target in (looping(), TinyLM(random_table(VOCAB, 1))):
        plain = engine(target=target).generate(prompts, params, draft=False)
        answers = [output.token_ids for output in plain]
        wrong = [[(token + 1) % VOCAB for token in answer] for answer in answers]
        noise = torch.randint(VOCAB, (20, 30), generator=torch.Generator().manual_seed(0)).tolist()
        for past in (filled(*answers), filled(*wrong), filled(*noise, *answers, *wrong)):
            fast = engine(source, target=target, past=past).generate(prompts, params)
            assert [o.token_ids for o in fast] == answers


def test_an_answer_that_was_given_before_takes_few_steps() -> None:
    table = torch.zeros(VOCAB, VOCAB).double()
    table[torch.arange(VOCAB), (torch.arange(VOCAB) + 1) % VOCAB] = 20.0  # a text that never repeats itself
    target, params = TinyLM(table), SamplingParams(max_tokens=20)
    new, known = (engine("lookup", target=target, past=past) for past in (None, PastAnswers(1000)))
    [first] = new.generate([[1, 2]], params)
    known.chooser.lookup.past.add("sql", first.token_ids)
    known.chooser.budget.costs.slopes = lambda rows: np.array(
        [0.0, 0.1, 0.01]
    )  # whatever this machine is like
    [second] = known.generate([[1, 2]], params)
    assert second.token_ids == first.token_ids
    assert second.speculation.num_steps < 0.6 * first.speculation.num_steps
    # All that was guessed stood in the earlier answer, and counts as that.
    found = second.speculation
    assert first.speculation.num_earlier_tokens == 0 < found.num_accepted_earlier_tokens
    assert found.num_earlier_tokens == found.num_lookup_tokens
    assert found.num_accepted_earlier_tokens == found.num_accepted_lookup_tokens


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("verification", ["chain", "block"])
def test_a_seeded_answer_does_not_depend_on_earlier_ones(source: DraftSource, verification: Any) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=40)
    target = TinyLM(random_table(VOCAB, 1))
    alone = engine(source, target=target, verification=verification).generate([[1, 2]], params)[0]
    past = filled(alone.token_ids, alone.token_ids[::-1], list(range(VOCAB)))
    beside = engine(source, target=target, verification=verification, past=past).generate([[1, 2]], params)[0]
    assert beside.token_ids == alone.token_ids
    assert beside.speculation == alone.speculation


def test_an_answer_never_grows_beyond_its_length() -> None:
    one = engine("lookup", max_model_len=32)
    [output] = one.generate([[1, 2, 1, 2, 1, 2]], SamplingParams(max_tokens=100))
    assert (output.finish_reason, len(output.token_ids)) == ("length", 26)
    [output] = one.generate([[1, 2, 1, 2, 1, 2]], SamplingParams(max_tokens=3))
    assert len(output.token_ids) == 3


def test_seeded_rows_may_draft_further_than_the_budget_lets_others() -> None:
    one = engine(longest=4, num_speculative_tokens=9)
    seeded = SamplingParams(temperature=1.0, seed=1, max_tokens=30)
    outputs = one.generate([[1, 2, 1, 2], [3, 4, 3, 4], [5]], [seeded, *[SamplingParams(max_tokens=40)] * 2])
    assert [len(output.token_ids) for output in outputs] == [30, 40, 40]
    alone = engine(longest=4, num_speculative_tokens=9)
    assert alone.generate([[1, 2, 1, 2]], seeded)[0].token_ids == outputs[0].token_ids
