"""What an output says beside the text: log-probabilities, acceptance by draft position, times."""

from __future__ import annotations

import pytest
import torch

from moedraft.core import InvalidRequest, SamplingParams
from moedraft.drafting.drafter import NoExperts
from moedraft.drafting.model import ModelDrafter
from moedraft.engine.engine import Engine
from moedraft.routing.selector import FixedSelector

from tiny import NumberTokenizer, TinyLM, random_table

VOCAB = 12


def engine(draft_seed: int = 1) -> tuple[Engine, TinyLM]:
    target = TinyLM(random_table(VOCAB, 1), 128)
    drafter = ModelDrafter(TinyLM(random_table(VOCAB, draft_seed), 128), NoExperts(), 4, VOCAB)
    made = Engine(
        target, NumberTokenizer(), drafter, FixedSelector(), max_batch_size=4, adaptive_budget=False
    )
    return made, target


@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize("draft", [True, False])
def test_logprobs_are_those_of_the_raw_target(temperature: float, draft: bool) -> None:
    one, target = engine()
    params = SamplingParams(temperature=temperature, top_k=5, max_tokens=12, seed=3, logprobs=3)
    [output] = one.generate([[1, 2]], params, draft=draft)
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids) == 12
    context = [1, 2]
    for token, found in zip(output.token_ids, output.logprobs, strict=True):
        exact = target.logits_after(context).float().log_softmax(-1)
        assert found.logprob == pytest.approx(exact[token].item(), abs=1e-5)
        values, ids = exact.topk(3)
        assert [token for token, _ in found.top] == ids.tolist()
        assert [value for _, value in found.top] == pytest.approx(values.tolist(), abs=1e-5)
        context.append(token)


def test_nobody_gets_logprobs_unasked_and_none_can_be_asked_for_alone() -> None:
    one, _ = engine()
    plain, alone = one.generate([[1], [2]], [SamplingParams(max_tokens=3), SamplingParams(logprobs=0)])
    assert plain.logprobs is None
    assert alone.logprobs is not None
    assert {item.top for item in alone.logprobs} == {()}


def test_logprobs_end_where_the_answer_ends() -> None:
    one, _ = engine()
    [whole] = one.generate([[1, 2]], SamplingParams(max_tokens=12, logprobs=1))
    stop = f"{whole.token_ids[4]} "
    [cut] = one.generate([[1, 2]], SamplingParams(max_tokens=12, logprobs=1, stop=(stop,)))
    assert cut.finish_reason == "stop"
    assert cut.logprobs is not None
    assert len(cut.logprobs) == len(cut.token_ids) < 12


@pytest.mark.parametrize("wrong", [-1, 21, 2**40, True, 1.0, "2"])
def test_a_wrong_number_of_logprobs_is_named(wrong: object) -> None:
    with pytest.raises(InvalidRequest, match="logprobs"):
        SamplingParams(logprobs=wrong)  # type: ignore[arg-type]


def test_acceptance_by_position_adds_up() -> None:
    one, _ = engine(draft_seed=2)
    [output] = one.generate([[3, 4]], SamplingParams(max_tokens=40))
    assert (
        sum(output.speculation.drafted_at)
        == output.speculation.num_draft_tokens
        > sum(output.speculation.accepted_at)
    )
    assert sum(output.speculation.accepted_at) == output.speculation.num_accepted_tokens
    assert output.speculation.drafted_at[0] == output.speculation.num_drafts
    assert output.speculation.accepted_at == sorted(output.speculation.accepted_at, reverse=True)
    good, _ = engine(draft_seed=1)
    [output] = good.generate([[3, 4]], SamplingParams(max_tokens=40))
    assert output.speculation.drafted_at == output.speculation.accepted_at


def test_times_and_lengths() -> None:
    one, _ = engine()
    [output] = one.generate([[3, 4, 5]], SamplingParams(max_tokens=5))
    assert output.num_prompt_tokens == 3
    assert output.time_to_first_token is not None
    assert 0 < output.time_to_first_token <= output.seconds
    assert output.confidence is None
    assert torch.tensor(output.token_ids).shape == (5,)
