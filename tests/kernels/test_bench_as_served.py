"""The kernel benchmark calls the kernels as the engine does on a GPU: with the same arguments, and with cuts.

Both are asked what they hand to a kernel where its arguments are checked, on a CPU that passes for a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scripts_loader import load_script

from moedraft import kernels, sampling
from moedraft.core import SamplingParams
from moedraft.drafting.drafter import NoExperts
from moedraft.drafting.model import ModelDrafter
from moedraft.engine.engine import Engine
from moedraft.routing.selector import FixedSelector

from tiny import NumberTokenizer, TinyLM, random_table

Given = frozenset[str]  # what one call of a kernel is given
CHAIN = ("target_logits", "draft_tokens", "draft_logits", "draft_lse", "num_draft", "temperature")
LIMITED = {"top_p": 0.95, "top_k": 9}
EVERY = ("temperature", "top_k", "top_p", "min_p")  # on a GPU one kernel is compiled for all filters


class Recorder:
    """Writes down what the kernels are given; of verifications without a guess nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[set[str]] = []
        monkeypatch.setattr(sampling, "_fused", lambda device: True)
        for name in ("check_chain", "check_draft", "check_cuts", "check_limits"):
            monkeypatch.setattr(kernels, name, getattr(self, name))

    def check_chain(self, *given: Any) -> None:
        names = {name for name, one in zip(CHAIN, given, strict=False) if one is not None}
        scaled = {"by row"} if isinstance(given[5], torch.Tensor) else set()
        self.calls.append({"verify", *names, *scaled} if given[1].shape[1] else set())

    def check_draft(self, logits: Any, temperature: Any, *_: Any) -> None:
        assert isinstance(temperature, torch.Tensor)
        self.calls.append({"draw"})

    def check_cuts(self, logits: Any, cuts: Any, name: str) -> None:
        if cuts is not None and self.calls[-1]:
            self.calls[-1].add(name)

    def check_limits(self, logits: Any, limits: dict[str, Any]) -> None:
        names = {name for name, one in limits.items() if one is not None}
        self.calls.append({"find", f"{logits.dim()} dimensions", *names})

    def found(self) -> set[Given]:
        calls, self.calls = self.calls, []
        return {frozenset(call) for call in calls if call}


def served(rule: str, given: Recorder, limits: dict[str, Any]) -> set[Given]:
    """What the engine hands to the kernels."""
    vocab = 60
    drafter = ModelDrafter(TinyLM(random_table(vocab, 1)), NoExperts(), 3, vocab)
    engine = Engine(
        TinyLM(random_table(vocab, 0)), NumberTokenizer(), drafter, FixedSelector(), max_batch_size=2,
        verification=rule, draft_source="model",  # type: ignore[arg-type]
    )  # fmt: skip
    engine.generate([[3, 1], [5, 9]], SamplingParams(0.9, max_tokens=12, seed=11, **limits))
    return given.found()


def measured(rule: str, given: Recorder, limited: bool) -> set[Given]:
    """What our own contenders hand to them while they are measured."""
    bench = load_script("kernel_timing").Bench(
        device="cpu", cuda=True, seconds=0.0, cold_bytes=400, dtype=torch.float32, vocab=96, vocabs=(),
        batches=(2,), rows=8,
    )  # fmt: skip
    check = getattr(kernels, f"verify_{rule}")
    choose = kernels.sample_coupled if rule == "coupled" else kernels.sample_draft
    filters, steps = load_script("kernel_filter_cases"), load_script("kernel_verify_cases")
    if limited:
        cases = [filters.filtered_case(bench, check, 2, 9), filters.drawn_case(bench, choose, 2, 9)]
    else:
        verify = steps.verify_case(bench, 2, 96) if rule == "chain" else steps.rule_case(bench, check, 2)
        draw = steps.sample_coupled_case if rule == "coupled" else steps.sample_case
        cases = [verify, draw(bench, 2)]
    found: set[Given] = set()
    for case in cases:
        calls = case.contenders()["moedraft"].make()
        given.found()  # what made the data is not measured
        calls[0]()
        found |= given.found()
    return found


@pytest.mark.parametrize("limits", [{}, LIMITED], ids=["all", "limited"])
@pytest.mark.parametrize("rule", ["chain", "block", "coupled"])
def test_what_serves_is_what_is_measured(
    rule: str, limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Recorder(monkeypatch)
    found = served(rule, given, limits)
    assert measured(rule, given, bool(limits)) == found
    cuts = {name for call in found for name in call if name.endswith("cuts")}
    finds = {call for call in found if "find" in call}
    if not limits:
        assert (cuts, finds) == (set(), set())
        return
    assert cuts == {"cuts", "target_cuts"} | ({"draft_cuts"} if rule != "coupled" else set())
    assert finds == {frozenset({"find", f"{count} dimensions", *EVERY}) for count in (2, 3)}


def test_control_without_limits_something_else_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Recorder(monkeypatch)
    assert measured("chain", given, False) != served("chain", given, LIMITED)
