"""One seed gives one answer, alone or in a batch whose experts are too many to be worth their cost."""

from __future__ import annotations

import pytest
import torch

from moedraft.core import SHARED, SamplingParams
from moedraft.drafting.adapter import PREFIX
from moedraft.drafting.lora import ExpertBank
from moedraft.drafting.model import ModelDrafter
from moedraft.engine.engine import Engine
from moedraft.routing.selector import FixedSelector

from random_models import VOCAB, prompts_of, random_model
from tiny import NumberTokenizer

EXPERTS = ("a", "b", "c", "d")


def engine(fast: bool = True) -> Engine:
    draft = random_model("llama", 1, cpu_fast_paths=fast)
    bank = ExpertBank(draft)
    torch.manual_seed(7)
    for name in EXPERTS:
        tensors = {}
        for module in sorted(bank.tail):
            out, inner = bank.layers[module].base_weight().shape
            tensors[f"{PREFIX}{module}.lora_A.weight"] = torch.randn(4, inner)
            tensors[f"{PREFIX}{module}.lora_B.weight"] = torch.randn(out, 4)
        bank.publish(name, bank.read(1, {}, tensors))
    drafter = ModelDrafter(draft, bank, 4, VOCAB)
    target = random_model("llama", 0, cpu_fast_paths=fast)
    return Engine(target, NumberTokenizer(), drafter, FixedSelector(), max_batch_size=4)


def answers(made: Engine, together: bool, seeded: bool = True) -> list[list[int]]:
    found: dict[str, list[int]] = {}
    for index, (expert, prompt) in enumerate(zip(EXPERTS, prompts_of(4, 3, 12), strict=True)):
        params = SamplingParams(temperature=1.0, max_tokens=24, seed=index if seeded else None)
        made.add(prompt, params, request_id=expert, expert=expert)
        while made.has_work and not together:
            found |= {o.request_id: o.token_ids for o in made.step() if o.finish_reason}
    while made.has_work:
        found |= {o.request_id: o.token_ids for o in made.step() if o.finish_reason}
    return [found[expert] for expert in EXPERTS]


@pytest.mark.parametrize("fast", [True, False])
def test_one_seed_one_answer_whatever_the_batch(fast: bool) -> None:
    assert answers(engine(fast), together=True) == answers(engine(fast), together=False)


@pytest.mark.parametrize("fast", [True, False])
def test_without_seeds_many_experts_leave_it_to_the_shared_draft(fast: bool) -> None:
    """The control: the same batch is one that the shortcut is made for, and only where it is switched on."""
    made = engine(fast)
    seen: list[list[str]] = []
    select = made.chooser.model.bank.select  # type: ignore[union-attr]
    made.chooser.model.bank.select = lambda rows, **how: (seen.append(rows), select(rows, **how))[1]  # type: ignore[union-attr]
    answers(made, together=True, seeded=False)
    assert ([SHARED] * 4 in seen) == fast
    assert (list(EXPERTS) in seen) == (not fast)
