"""Measure a running system: tokens per second, and how often a draft guesses what the target says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from moedraft.cache import SlotCache
from moedraft.chat import prompt_ids
from moedraft.core import SHARED, RequestOutput, SamplingParams
from moedraft.drafting.base import DraftBase, FeatureBase, features_of, first_guesses
from moedraft.drafting.lengths.budget import Budget
from moedraft.drafting.lengths.costs import RoundCosts
from moedraft.engine.calibration import calibrate
from moedraft.engine.warming import warm_up as compile_kernels
from moedraft.loading.checks import bare_generation
from moedraft.showcase.shipped import Query
from moedraft.system.build import System

Forward = Callable[[SlotCache, torch.Tensor, int], torch.Tensor]


def tokens_per_step(outputs: list[RequestOutput]) -> float:
    """Tokens of all answers together for each forward of the target."""
    return sum(len(output.token_ids) for output in outputs) / max(
        1, sum(o.speculation.num_steps for o in outputs)
    )


def new_budget(system: System) -> Budget:
    """One that knows what rounds cost by measurement before the first request, and nothing else yet."""
    served = system.engine.chooser.budget
    budget = Budget(served.longest, served.ragged)
    budget.costs = RoundCosts(served.costs.usual, served.costs.growth)
    return budget


@contextmanager
def only_base(system: System, on: bool) -> Iterator[None]:
    """While the block runs, all adapters are switched off: the draft base guesses as it came."""
    system.bank.bare(on)
    system.bank.select([SHARED])
    try:
        yield
    finally:
        system.bank.bare(False)
        system.bank.select([SHARED])


class AnswerRead:
    """The target's own answer to a prompt, on which any expert's first guesses can be counted.

    The draft reads that answer, so the share depends neither on draft lengths nor on timing. The target
    reads it once, for all experts.
    """

    def __init__(self, system: System, prompt: str, answer: list[int]) -> None:
        self.system, self.answer = system, answer
        self._text = [*prompt_ids(system.target.tokenizer, prompt, chat=True), *answer]
        self._features = features_of(system.draft, system.target, self._text)

    def right_guesses(self, expert: str) -> tuple[int, int]:
        """Tokens of the answer that the expert guesses right from those before it, and all of them."""
        self.system.bank.select([expert])
        guesses = first_guesses(self.system.draft, self._text, self._features)[-len(self.answer) :]
        return sum(g == token for g, token in zip(guesses, self.answer, strict=True)), len(self.answer)


def right_guesses(system: System, prompt: str, answer: list[int], expert: str) -> tuple[int, int]:
    """`AnswerRead.right_guesses` for a single expert."""
    return AnswerRead(system, prompt, answer).right_guesses(expert)


def by_domain(queries: list[Query], values: list[float]) -> dict[str, float]:
    """Mean value per true domain."""
    groups: dict[str, list[float]] = {}
    for query, value in zip(queries, values, strict=True):
        groups.setdefault(query.domain, []).append(value)
    return {name: sum(group) / len(group) for name, group in sorted(groups.items())}


@dataclass(frozen=True)
class Timed:
    """One system's tokens per second over all prompts: those of every round, and their median."""

    name: str
    tokens_per_second: float
    rounds: list[float]
    answers: list[list[int]]


def compare(
    runners: dict[str, Callable[[str, int], list[int]]],
    queries: list[Query],
    rounds: int = 3,
    on_progress: Callable[[], None] = lambda: None,
) -> dict[str, Timed]:
    """Run every system on the same prompts. They take turns at each prompt, so that noise hits all alike."""
    seconds = {name: [0.0] * rounds for name in runners}
    tokens = {name: [0] * rounds for name in runners}
    answers: dict[str, list[list[int]]] = {name: [] for name in runners}
    for number in range(rounds):
        for index, query in enumerate(queries):
            names = list(runners)
            for name in names[index % len(names) :] + names[: index % len(names)]:
                began = time.perf_counter()
                answer = runners[name](query.prompt, query.max_tokens)
                seconds[name][number] += time.perf_counter() - began
                tokens[name][number] += len(answer)
                if number == 0:
                    answers[name].append(answer)
            on_progress()
    rates = {n: [t / s for t, s in zip(tokens[n], seconds[n], strict=True)] for n in runners}
    return {name: Timed(name, median(rates[name]), rates[name], answers[name]) for name in runners}


def engine_runner(
    system: System, *, draft: bool, expert: str | None = None
) -> Callable[[str, int], list[int]]:
    """A function that answers one prompt with the engine."""

    def run(prompt: str, max_tokens: int) -> list[int]:
        params = SamplingParams(max_tokens=max_tokens)
        options = {"draft": draft, "expert": expert, "counted": False, "chat": True}
        [output] = system.engine.generate(prompt, params, **options)  # type: ignore[arg-type]
        return output.token_ids

    return run


def transformers_runner(
    target: Any, temperature: float = 0.0, **options: Any
) -> Callable[[str, int], list[int]]:
    """A function that answers one prompt with the `generate` of transformers, greedily or at a temperature.

    `options` go to `generate`, such as `assistant_model` or `prompt_lookup_num_tokens`. The penalties of the
    checkpoint are left out, since our engine does not apply them either; so are its limits on what is drawn.
    """
    if temperature:
        options |= {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}

    def run(prompt: str, max_tokens: int) -> list[int]:
        ids = torch.tensor([prompt_ids(target.tokenizer, prompt, chat=True)], device=target.device)
        with bare_generation(target):
            out = target.hf.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, **options
            )
        answer: list[int] = out[0, ids.shape[1] :].tolist()
        return answer

    return run


def theoretical_speedup(acceptance: float, length: float, cost: float) -> float:
    """The speed-up if verifying k+1 tokens cost one target step: E / (k·c + 1), E = (1 − α^(k+1)) / (1 − α).

    `acceptance` is α, the chance of one token; `length` is k, the drafted tokens in a round; `cost` is c, the
    time of a draft step divided by that of a target step.
    Source: Leviathan et al., arXiv 2211.17192, theorem 3.8.
    """
    expected = length + 1 if acceptance >= 1 else (1 - acceptance ** (length + 1)) / (1 - acceptance)
    return expected / (length * cost + 1)


@torch.inference_mode()
def step_costs(system: System, expert: str = SHARED) -> dict[str, float]:
    """Median milliseconds at batch 1: a target step, a draft step, a target forward over five tokens."""

    def measure(forward: Forward, cache: SlotCache, width: int) -> float:
        ids = torch.zeros(1, 128, dtype=torch.int64, device=system.target.device)
        forward(cache, ids, 0)
        times = []
        for _ in range(30):
            began = time.perf_counter()
            forward(cache, ids[:, :width], ids.shape[1]).sum().item()
            times.append((time.perf_counter() - began) * 1e3)
        return median(times)

    system.bank.select([expert])
    target, draft = system.target, system.draft
    return {
        "target_ms": measure(_forward_of(target), target.new_cache(1), 1),
        "draft_ms": measure(_forward_of(draft), draft.new_cache(1), 1),
        "verify5_ms": measure(_forward_of(target), target.new_cache(1), 5),
    }


def _forward_of(model: DraftBase) -> Forward:
    """(cache, token ids, the first one's position) → logits. A feature drafter reads zeros as features."""
    if isinstance(model, FeatureBase):

        def forward(cache: SlotCache, ids: torch.Tensor, start: int) -> torch.Tensor:
            states = model.hf.fc.weight.new_zeros(*ids.shape, model.hf.config.hidden_size)
            return model.hf.step(cache, 0, states, ids, [start], keep=1)[1]

        return forward
    return lambda cache, ids, start: model.forward(cache, 0, ids, [start], keep=ids.shape[1])


def warm_up(system: System) -> None:
    """Generate a few tokens, so that the first measured request does not pay for initialisation.

    Then measure what rounds cost, as a server does before it takes requests.
    """
    params = SamplingParams(max_tokens=8)
    for draft in (False, True):
        system.engine.generate("warm up", params, draft=draft, expert=SHARED, counted=False)
    compile_kernels(system.engine)
    calibrate(system.engine)
