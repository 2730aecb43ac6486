"""With filters as cuts, as on a GPU, the engine says what it says with filtered logits."""

from __future__ import annotations

import pytest
import torch

from moedraft import sampling
from moedraft.core import RequestOutput, SamplingParams
from moedraft.drafting.drafter import NoExperts
from moedraft.drafting.model import ModelDrafter
from moedraft.engine.engine import Engine
from moedraft.kernels import Cuts
from moedraft.routing.selector import FixedSelector

from tiny import NumberTokenizer, TinyLM, random_table

VOCAB = 60
PROMPTS = [[3, 1], [5, 9, 5, 9, 5], [7]]  # the second one can be looked up


def answers(rule: str, **params: float) -> list[RequestOutput]:
    target, draft = TinyLM(random_table(VOCAB, 0)), TinyLM(random_table(VOCAB, 1))
    drafter = ModelDrafter(draft, NoExperts(), 3, VOCAB)
    engine = Engine(
        target,
        NumberTokenizer(),
        drafter,
        FixedSelector(),
        max_batch_size=3,
        verification=rule,  # type: ignore[arg-type]
    )
    asked = [
        SamplingParams(0.9, max_tokens=24, seed=11, **params),  # type: ignore[arg-type]
        SamplingParams(0.0, max_tokens=24),
        SamplingParams(1.2, max_tokens=24, seed=12),
    ]
    return engine.generate(PROMPTS, asked)


@pytest.mark.parametrize("params", [{"top_p": 0.5}, {"top_k": 4}, {"top_k": 9, "top_p": 0.7, "min_p": 0.1}])
@pytest.mark.parametrize("rule", ["chain", "block", "coupled"])
def test_answers_are_the_same_with_cuts(
    rule: str, params: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [one.token_ids for one in answers(rule, **params)]
    given: list[Cuts] = []
    real = sampling._cuts

    def counted(logits: torch.Tensor, batch: sampling.SamplingBatch) -> Cuts:
        given.append(real(logits, batch))
        return given[-1]

    monkeypatch.setattr(sampling, "_fused", lambda logits: True)
    monkeypatch.setattr(sampling, "_cuts", counted)
    assert [one.token_ids for one in answers(rule, **params)] == expected
    assert len(given) > 10
    monkeypatch.setattr(
        sampling,
        "_cuts",
        lambda logits, batch: Cuts(
            torch.full(logits.shape[:-1], -torch.inf), torch.zeros(logits.shape[:-1], dtype=torch.int32)
        ),
    )
    assert [one.token_ids for one in answers(rule, **params)] != expected  # the control: nothing is excluded
