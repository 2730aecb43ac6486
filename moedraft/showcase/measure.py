"""Measure a running system: tokens per second, and how often a draft guesses what the target says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from moedraft.chat import prompt_ids
from moedraft.core import SHARED, RequestOutput, SamplingParams
from moedraft.engine.build import System
from moedraft.engine.decoder import DraftSource
from moedraft.showcase.shipped import Query


@dataclass(frozen=True)
class Served:
    """Answers to a set of queries and how long they took together."""

    outputs: list[RequestOutput]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_step(self) -> float:
        """Tokens per target forward, 1 in plain decoding."""
        return tokens_per_step(self.outputs)


def tokens_per_step(outputs: list[RequestOutput]) -> float:
    return sum(len(output.token_ids) for output in outputs) / max(1, sum(o.num_steps for o in outputs))


@contextmanager
def drafting_by(system: System, source: DraftSource) -> Iterator[None]:
    """Where the engine's drafts come from, for a while."""
    decoder = system.engine.decoder
    before, decoder.draft_source = decoder.draft_source, source
    try:
        yield
    finally:
        decoder.draft_source = before


def serve(system: System, queries: list[Query], *, draft: bool = True, expert: str | None = None) -> Served:
    """Greedy answers to all queries at once; the router chooses unless `expert` pins one."""
    params = [SamplingParams(max_tokens=query.max_tokens) for query in queries]
    began = time.perf_counter()
    outputs = system.engine.generate(
        [q.prompt for q in queries], params, expert=expert, draft=draft, chat=True
    )
    return Served(outputs, time.perf_counter() - began)


@torch.inference_mode()
def greedy_acceptance(
    system: System, prompts: list[str], answers: list[list[int]], experts: list[str]
) -> list[float]:
    """Per answer, the share of its tokens that the expert's draft would have guessed.

    Teacher-forced on the target's greedy answer, so it depends neither on draft lengths nor on timing.
    """
    shares = []
    for prompt, answer, expert in zip(prompts, answers, experts, strict=True):
        context = prompt_ids(system.target.tokenizer, prompt, chat=True)
        ids = torch.tensor([[*context, *answer]], device=system.draft.device)
        system.bank.select([expert])
        logits = system.draft.forward(system.draft.new_cache(1), 0, ids, [0], keep=len(answer) + 1)
        hits = logits[0, :-1].argmax(-1) == ids[0, len(context) :]
        shares.append(hits.float().mean().item())
    return shares


def by_domain(queries: list[Query], values: list[float]) -> dict[str, float]:
    """Mean value per true domain."""
    groups: dict[str, list[float]] = {}
    for query, value in zip(queries, values, strict=True):
        groups.setdefault(query.domain, []).append(value)
    return {name: sum(group) / len(group) for name, group in sorted(groups.items())}


@dataclass(frozen=True)
class Timed:
    """One system over all prompts: the median over the rounds of tokens per second, one prompt at a time."""

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
    """Run every system on the same prompts, taking turns prompt by prompt so that noise hits all alike."""
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
    def run(prompt: str, max_tokens: int) -> list[int]:
        params = SamplingParams(max_tokens=max_tokens)
        return system.engine.generate(prompt, params, draft=draft, expert=expert, chat=True)[0].token_ids

    return run


def transformers_runner(target: Any, **options: Any) -> Callable[[str, int], list[int]]:
    """transformers' own `generate`, greedy; assisted with `assistant_model`, `prompt_lookup_num_tokens` …

    Without the checkpoint's penalties, which we do not apply either.
    """
    own, eos = target.hf.generation_config, sorted(target.eos_token_ids)
    bare = type(own)(eos_token_id=eos or None, pad_token_id=eos[0] if eos else 0, do_sample=False)

    def run(prompt: str, max_tokens: int) -> list[int]:
        ids = torch.tensor([prompt_ids(target.tokenizer, prompt, chat=True)], device=target.device)
        target.hf.generation_config = bare  # what is not set is taken from there, whatever is passed
        try:
            out = target.hf.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, **options
            )
        finally:
            target.hf.generation_config = own
        answer: list[int] = out[0, ids.shape[1] :].tolist()
        return answer

    return run


def theoretical_speedup(acceptance: float, length: float, cost: float) -> float:
    """E / (k·c + 1) with E = (1 − α^(k+1)) / (1 − α), where verifying k+1 tokens costs one step.

    acceptance α per token, `length` k drafted tokens a step, `cost` c of a draft step in target steps.
    Source: Leviathan et al., arXiv 2211.17192, theorem 3.8.
    """
    expected = length + 1 if acceptance >= 1 else (1 - acceptance ** (length + 1)) / (1 - acceptance)
    return expected / (length * cost + 1)


@torch.inference_mode()
def step_costs(system: System, context: int = 128, repeats: int = 30) -> dict[str, float]:
    """Median milliseconds of one target step, one draft step, and a verification of five tokens; batch 1."""

    def measure(model: Any, width: int) -> float:
        cache = model.new_cache(1)
        ids = torch.zeros(1, context, dtype=torch.int64, device=model.device)
        model.forward(cache, 0, ids, [0], keep=1)
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            model.forward(cache, 0, ids[:, :width], [context]).sum().item()
            times.append((time.perf_counter() - began) * 1e3)
        return median(times)

    system.bank.select([SHARED])
    return {
        "target_ms": measure(system.target, 1),
        "draft_ms": measure(system.draft, 1),
        "verify5_ms": measure(system.target, 5),
    }


def warm_up(system: System) -> None:
    """A few tokens, so that the first measured request pays for no initialisation."""
    params = SamplingParams(max_tokens=8)
    for draft in (False, True):
        system.engine.generate("warm up", params, draft=draft, expert=SHARED)
