"""One seed gives one answer, alone or in a batch whose experts are too many to be worth their cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moedraft.core import SHARED, SamplingParams, Sequence
from moedraft.drafting.experts.adapter import PREFIX
from moedraft.drafting.experts.lora import ExpertBank
from moedraft.drafting.lengths.budget import Plan
from moedraft.drafting.model import ModelDrafter
from moedraft.engine.engine import Engine
from moedraft.routing.selector import FixedSelector

from random_models import VOCAB, prompts_of, random_model
from tiny import NumberTokenizer

EXPERTS = ("a", "b", "c", "d")
SMALL, LARGE = 4, 40  # ranks of experts whose terms are few beside the weights that they adapt, or many


def engine(
    fast: bool = True, rule: str = "chain", selector: FixedSelector | None = None, rank: int = LARGE
) -> Engine:
    draft = random_model("llama", 1, cpu_fast_paths=fast)
    bank = ExpertBank(draft)
    torch.manual_seed(7)
    for name in EXPERTS:
        tensors = {}
        for module in sorted(bank.tail):
            out, inner = bank.layers[module].base_weight().shape
            tensors[f"{PREFIX}{module}.lora_A.weight"] = torch.randn(rank, inner) * (SMALL / rank) ** 0.5
            tensors[f"{PREFIX}{module}.lora_B.weight"] = torch.randn(out, rank)
        bank.publish(name, bank.read(1, {}, tensors))
    drafter = ModelDrafter(draft, bank, 4, VOCAB)
    target = random_model("llama", 0, cpu_fast_paths=fast)
    return Engine(
        target, NumberTokenizer(), drafter, selector or FixedSelector(), max_batch_size=4,
        verification=rule,  # type: ignore[arg-type]
    )  # fmt: skip


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
@pytest.mark.parametrize("rank", [SMALL, LARGE])
def test_one_seed_one_answer_whatever_the_batch(fast: bool, rank: int) -> None:
    alone, together = (answers(engine(fast, rank=rank), together=one) for one in (False, True))
    assert together == alone


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("rank", [SMALL, LARGE])
def test_without_seeds_many_large_experts_leave_it_to_the_shared_draft(fast: bool, rank: int) -> None:
    """The control: the same batch is one that the shortcut is made for, and only where it is switched on."""
    made = engine(fast, rank=rank)
    seen: list[list[str]] = []
    select = made.chooser.model.bank.select  # type: ignore[union-attr]
    made.chooser.model.bank.select = lambda rows, **how: (seen.append(rows), select(rows, **how))[1]  # type: ignore[union-attr]
    answers(made, together=True, seeded=False)
    shortcut = fast and rank == LARGE
    assert ([SHARED] * 4 in seen) == shortcut
    assert (list(EXPERTS) in seen) == (not shortcut)


class Restless(FixedSelector):
    """Gives every row of the batch another expert before each step."""

    def __init__(self) -> None:
        self.rows: list[Sequence] = []
        self.turn = 0

    def assign(self, sequences: list[Sequence]) -> None:
        self.rows += sequences

    def settle(self, ending: Sequence | None = None) -> list[Sequence]:
        self.turn += 1
        rows = [row for row in self.rows if row.finish_reason is None and not row.reproducible]
        for row in rows:
            row.expert = EXPERTS[(EXPERTS.index(row.expert) + self.turn) % 4]
        return rows


def planned_rows(made: Engine) -> list[int]:
    """How many rows the budget chose the length of, in each round; filled while the engine runs."""
    found: list[int] = []
    plan = made.chooser.budget.plan

    def noted(means: dict[int, float], *rest: Any) -> Plan:
        found.append(len(means))
        return plan(means, *rest)

    made.chooser.budget.plan = noted  # type: ignore[method-assign]
    return found


def test_under_coupled_verification_length_and_expert_are_free_and_the_answer_is_the_same() -> None:
    alone = answers(engine(rule="coupled"), together=False)
    selector = Restless()
    made = engine(rule="coupled", selector=selector)
    planned = planned_rows(made)
    assert answers(made, together=True) == alone
    assert max(planned) == 4
    assert {row.request_id for row in selector.rows} == set(EXPERTS)
    assert any(row.expert != row.request_id for row in selector.rows)


def test_by_the_rule_of_chains_they_are_not() -> None:
    """The control."""
    selector = Restless()
    made = engine(selector=selector)
    planned = planned_rows(made)
    answers(made, together=True)
    assert max(planned) == 0
    assert all(row.expert == row.request_id for row in selector.rows)
