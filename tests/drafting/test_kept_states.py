"""What is kept of a running request is what the target computes for its text, whole, or nothing."""

from __future__ import annotations

import pytest
import torch

from moedraft.core import SamplingParams, Sequence
from moedraft.drafting.drafter import NoExperts
from moedraft.drafting.feature import FeatureDrafter
from moedraft.drafting.kept import MOST_BYTES, StateKeeper
from moedraft.engine.engine import Engine
from moedraft.models import LanguageModel
from moedraft.routing.selector import FixedSelector

from random_features import LAYERS, draft_for
from random_models import prompts_of, random_model
from tiny import NumberTokenizer

PARAMS = [SamplingParams(max_tokens=count) for count in (1, 2, 7, 30, 41, 12)]


def engine_of(
    target: LanguageModel, limit_bytes: int = MOST_BYTES, **options: object
) -> tuple[Engine, StateKeeper, list[Sequence]]:
    """An engine that keeps states, and the requests that have ended."""
    draft = draft_for(target)
    keeper = StateKeeper(draft.config.hidden_size, limit_bytes)
    drafter = FeatureDrafter(draft, NoExperts(), 3, target.vocab_size, keeper=keeper)
    made = Engine(target, NumberTokenizer(), drafter, FixedSelector(), max_batch_size=3, **options)  # type: ignore[arg-type]
    ended: list[Sequence] = []
    made.subscribe(ended.append)
    return made, keeper, ended


def computed(target: LanguageModel, row: Sequence) -> torch.Tensor:
    """By transformers, for the whole text at once."""
    ids = torch.tensor([row.token_ids])
    with torch.no_grad():
        states = target.hf(ids, output_hidden_states=True).hidden_states
        return draft_for(target).fuse(torch.cat([states[layer] for layer in LAYERS], dim=-1))[0, :-1]


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefill_chunk": 5},
        {"draft_source": "lookup"},
        {"adaptive_budget": False},
        {"max_speculative_tokens": 0},
    ],
)
def test_they_are_those_of_the_whole_text(kind: str, options: dict[str, object]) -> None:
    """Whatever was drafted, refused, looked up or decoded plainly; a prompt of one token among them."""
    target = random_model(kind, 0)
    engine, keeper, ended = engine_of(target, **options)
    engine.generate([[5], *prompts_of(5, seed=3)], PARAMS, learn=True)
    assert len(ended) == 6
    for row in ended:
        kept = torch.cat(row.states)
        assert kept.dtype == torch.bfloat16
        torch.testing.assert_close(kept.float(), computed(target, row), rtol=1e-2, atol=1e-3)
    assert keeper.bytes == 0


def test_an_answer_that_a_stop_string_ends_keeps_no_more_than_its_text() -> None:
    target = random_model("llama", 0)
    engine, _, ended = engine_of(target)
    text = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=30))[0].text
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=30, stop=(text[-4:],)), learn=True)
    [_, row] = ended
    assert row.finish_reason == "stop"
    torch.testing.assert_close(torch.cat(row.states).float(), computed(target, row), rtol=1e-2, atol=1e-3)


def test_nothing_is_kept_of_what_is_not_learned_from() -> None:
    target = random_model("llama", 0)
    engine, keeper, ended = engine_of(target)
    engine.generate(prompts_of(2, seed=1), SamplingParams(max_tokens=9))
    engine.generate(prompts_of(2, seed=1), SamplingParams(max_tokens=9), learn=True, draft=False)
    engine.add([1, 2, 3, 4], SamplingParams(max_tokens=50), capture=True, request_id="gone")
    for _ in range(4):
        engine.step()
    assert keeper.bytes > 0
    engine.abort("gone")
    assert not any(row.states for row in ended)
    assert keeper.bytes == 0


def test_all_running_requests_together_are_bounded() -> None:
    target = random_model("llama", 0)
    width = draft_for(target).config.hidden_size
    limit = 2 * width * 60
    engine, keeper, ended = engine_of(target, limit, adaptive_budget=False)
    most = 0
    for prompt in prompts_of(3, seed=2):
        engine.add(prompt, SamplingParams(max_tokens=40, ignore_eos=True), capture=True)
    while engine.has_work:
        engine.step()
        most = max(most, keeper.bytes)
    assert 0 < most <= limit
    assert any(not row.states for row in ended)
    assert all(sum(map(len, row.states)) in (0, len(row.token_ids) - 1) for row in ended)
    assert keeper.bytes == 0
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=5), learn=True)
    assert ended[-1].states, "the next request finds room again"


def test_states_with_a_gap_are_given_up() -> None:
    keeper = StateKeeper(4)
    row = Sequence("r", [1, 2, 3, 4], 2, SamplingParams(), 0, capture=True)
    keeper.keep([(row, 0, 1)], torch.zeros(1, 1, 4))
    keeper.keep([(row, 2, 1)], torch.zeros(1, 1, 4))
    keeper.finish(row, torch.zeros(3, 4))
    assert (row.states, keeper.bytes) == ([], 0)


def test_room_is_given_back_where_the_last_states_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    target = random_model("llama", 0)
    drafter = FeatureDrafter(draft_for(target), NoExperts(), 3, target.vocab_size)
    drafter.keeper = StateKeeper(drafter.draft.config.hidden_size)
    engine = Engine(target, NumberTokenizer(), drafter, FixedSelector(), max_batch_size=3)
    engine.add([1, 2, 3, 4], SamplingParams(max_tokens=50, ignore_eos=True), capture=True)
    for _ in range(4):
        engine.step()
    (row,) = engine.scheduler.running
    row.finish_reason = "stop"
    assert drafter.keeper.bytes > 0

    def fails(*_: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(drafter.draft, "fuse", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        drafter.forget(row)
    assert drafter.keeper.bytes == 0
