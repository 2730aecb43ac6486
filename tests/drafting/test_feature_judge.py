"""The judge's verdicts are those of a pass over the whole text with each expert alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from looking import Looking
from random_experts import bank_of, base_of

from moedraft.core import SHARED, SamplingParams
from moedraft.drafting.arms.feature_judge import FeatureJudge
from moedraft.drafting.base import FeatureBase, features_of, first_guesses
from moedraft.drafting.feature import FeatureDrafter
from moedraft.drafting.kept import KEPT, ReadStates
from moedraft.engine.engine import Engine
from moedraft.models import LanguageModel
from moedraft.routing.selector import FixedSelector

from random_models import prompts_of, random_model
from rounds import row
from tiny import NumberTokenizer


@pytest.fixture(scope="module")
def target() -> LanguageModel:
    return random_model("llama", 0)


@pytest.fixture(params=[True, False], ids=["output normed", "output bare"])
def base(target: LanguageModel, tmp_path: Path, request: pytest.FixtureRequest) -> FeatureBase:
    found = base_of(target, tmp_path / "draft", norm_output=request.param)
    found.cpu_fast_paths = request.param
    return found


@pytest.mark.parametrize("source", ["model", "auto"])
def test_verdicts_are_those_of_each_expert_alone(
    target: LanguageModel, base: FeatureBase, source: str
) -> None:
    """Rows of several lengths in changing slots, with other experts drafting than those compared."""
    bank = bank_of(base)
    drafter = FeatureDrafter(base.hf, bank, 3, target.vocab_size, states=ReadStates())
    looking = Looking()
    looking.judge = FeatureJudge(drafter, bank)
    engine = Engine(
        target, NumberTokenizer(), drafter, looking, max_batch_size=3, draft_source=source, prefill_chunk=7
    )
    done = {}
    for i, prompt in enumerate(prompts_of(6, seed=2)):
        engine.add(prompt, SamplingParams(max_tokens=30), expert=[SHARED, "a", "b"][i % 3], request_id=str(i))
    while engine.has_work:
        done |= {o.request_id: o for o in engine.step() if o.finish_reason}
    assert looking.passes > 10
    compared = right = 0
    for one in looking.rows:
        text = one.token_ids
        for arm in looking.judge.arms:
            bank.select([arm])
            guesses = first_guesses(base, text, features_of(base, target, text))
            for entry, verdict in looking.verdicts.get(one.request_id, {}).items():
                assert verdict[arm] == (guesses[entry + 2] == text[entry + 2])
                compared, right = compared + 1, right + int(verdict[arm])
    assert compared > 200
    assert right > 5


def test_what_the_batch_drafts_with_stays_set(target: LanguageModel, base: FeatureBase) -> None:
    bank = bank_of(base)
    drafter = FeatureDrafter(base.hf, bank, 2, target.vocab_size, states=ReadStates())
    judge = FeatureJudge(drafter, bank)
    engine = Engine(target, NumberTokenizer(), drafter, FixedSelector(), max_batch_size=2)
    for name in ("a", "c"):
        engine.add(prompts_of(1, seed=1)[0], SamplingParams(max_tokens=30), expert=name)
    for _ in range(3):
        engine.step()
    before = {name: layer.product for name, layer in bank.layers.items()}
    vocabulary, selected = base.hf.vocabulary, bank.selected
    judge.hits([judge.known(one, 0, KEPT) for one in engine.sequences], judge.arms)
    assert {name: layer.product for name, layer in bank.layers.items()} == before
    assert base.hf.vocabulary is vocabulary
    assert bank.selected == selected


def test_the_states_kept_are_the_last_ones() -> None:
    states, one, other = ReadStates(4), row(0, 1, 2, 3), row(1, 1, 2, 3)
    fused = torch.arange(40.0).view(1, 40, 1)
    for start in range(0, 40, 5):
        states.keep([(one, start, 5)], fused[:, start : start + 5])
    first, end = states.span(one)
    assert end == 40
    assert 4 <= end - first <= 8 + 5
    assert states.of(one, 37, 39).flatten().tolist() == [37, 38]
    states.keep([(one, 10, 2)], fused[:, 10:])  # from here on it is read again
    assert states.span(one) == (10, 12)
    assert states.span(other) == (0, 0)
    states.forget(one)
    assert states.span(one) == (0, 0)


@pytest.mark.parametrize("compared", [False, True])
def test_states_are_kept_while_a_request_runs_where_experts_are_compared(
    target: LanguageModel, base: FeatureBase, compared: bool
) -> None:
    states = ReadStates() if compared else None
    bank = bank_of(base)
    drafter = FeatureDrafter(base.hf, bank, 1, target.vocab_size, states=states)
    engine = Engine(target, NumberTokenizer(), drafter, FixedSelector(), max_batch_size=1)
    engine.add(list(range(1, 90)), SamplingParams(max_tokens=KEPT))
    engine.step()
    [running] = engine.sequences
    if states is None:
        with pytest.raises(AssertionError, match="keep the states"):
            FeatureJudge(drafter, bank)
        return
    first, end = FeatureJudge(drafter, bank).states.span(running)
    assert end - first >= KEPT
    while engine.has_work:
        engine.step()
    assert states.span(running) == (0, 0)
    assert not states._kept
