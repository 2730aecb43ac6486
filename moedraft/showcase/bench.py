"""Compare the engine with transformers, one prompt at a time, all systems in turns on the same prompts."""

from __future__ import annotations

import copy
import platform
from collections.abc import Callable
from functools import partial
from importlib import metadata
from operator import eq
from pathlib import Path
from typing import Any

import torch

from moedraft.core import SHARED, RequestOutput, SamplingParams
from moedraft.drafting.base import draft_name
from moedraft.drafting.chooser import DraftSource
from moedraft.drafting.lookup.drafter import LookupDrafter
from moedraft.models import LanguageModel, load_by
from moedraft.showcase.measure import (
    Timed,
    compare,
    only_base,
    step_costs,
    theoretical_speedup,
    tokens_per_step,
    transformers_runner,
    warm_up,
)
from moedraft.showcase.shipped import Query
from moedraft.system.build import System

BASELINE, ASSISTED = "transformers generate", "transformers assisted"
PLAIN = "moedraft plain"
OTHER = ("moedraft other draft", "moedraft other draft + lookup")


Runner = Callable[[str, int], list[int]]  # prompt and number of tokens → the answer's token ids
Outputs = dict[str, list[RequestOutput]]  # by system, in the order of the answers


def run(
    system: System,
    queries: list[Query],
    rounds: int,
    advance: Callable[[int], None],
    other: System | None = None,
    temperature: float = 0.0,
) -> dict[str, Any]:
    """Measure all systems and return what `moedraft bench` prints, as plain data.

    `advance` is called with the number of answered prompts, each counted once for all systems. other: an
    engine over the same target with another draft base, which takes part without experts. temperature: of the
    answers; 0 is greedy. Sampled answers differ from round to round, so they are not compared.
    """
    outputs: Outputs = {}
    runners = warm_runners(system, other, queries[0].prompt, outputs, temperature)
    timer = system.engine.timer
    timer.verify_seconds = timer.step_seconds = done = 0

    def on_progress() -> None:
        nonlocal done
        done += 1
        advance(done)

    timed = compare(runners, queries, rounds, on_progress)
    costs = costs_of_steps(system, other)
    ratio = costs["draft_ms"] / costs["target_ms"]
    its_ratio = costs.get("other_draft_ms", 0.0) / costs["target_ms"]
    return {
        "systems": {
            name: figures(name, timed, outputs, its_ratio if name in OTHER else ratio, temperature)
            for name in timed
        },
        "step_ms": {name: round(value, 3) for name, value in costs.items()},
        "cost_ratio": round(ratio, 4),
        "verify_share": round(timer.verify_seconds / timer.step_seconds, 4),
        "adapted": bool(system.bank.experts or system.bank.shared),
        "draft": shown_name(system.draft.name),
        "other_draft": shown_name(other.draft.name) if other else None,
        "temperature": temperature,
        "answers_as_transformers": None if temperature else alike(timed),
        "prompts": len(queries),
        **surroundings(system),
    }


def alike(timed: dict[str, Timed]) -> int:
    """How many answers of plain decoding are those of transformers, token for token."""
    return sum(map(eq, timed[PLAIN].answers, timed[BASELINE].answers))


def warm_runners(
    system: System, other: System | None, prompt: str, outputs: Outputs, temperature: float = 0.0
) -> dict[str, Runner]:
    """All systems, each of which has answered the prompt once."""
    warm_up(system)
    runners = their_runners(system, temperature) | our_runners(system, outputs, temperature)
    if other is not None:
        warm_up(other)
        runners |= others_runners(other, outputs, temperature)
    for runner in runners.values():
        runner(prompt, 16)
    outputs.clear()
    return runners


def costs_of_steps(system: System, other: System | None) -> dict[str, float]:
    """What one step of the target and of each draft base costs, in milliseconds."""
    costs = step_costs(system)
    if other is not None:
        costs["other_draft_ms"] = step_costs(other)["draft_ms"]
    return costs


def their_runners(system: System, temperature: float) -> dict[str, Runner]:
    """The systems of transformers; assisted generation only where it takes this pair of models."""
    target = system.target
    runners = {BASELINE: transformers_runner(target, temperature)}
    if isinstance(system.draft, LanguageModel):
        # A second copy of the draft without our LoRA layers, so that transformers runs it as it is.
        assistant = load_by(system.settings, "draft", name=draft_name(system.settings))
        # transformers takes models with vocabularies of different sizes (one padded further) for models with
        # different tokenizers and refuses them.
        sizes = {model.hf.config.get_text_config().vocab_size for model in (assistant, target)}
        if len(sizes) == 1:
            runners[ASSISTED] = transformers_runner(target, temperature, assistant_model=assistant.hf)
    lookup = transformers_runner(target, temperature, prompt_lookup_num_tokens=8)
    runners["transformers prompt lookup"] = lookup
    return runners


def our_runners(system: System, outputs: Outputs, temperature: float) -> dict[str, Runner]:
    """Our systems. Every answer is added to `outputs` under the name of its system."""
    ours = partial(runner_of, system, outputs, temperature=temperature)
    return {
        PLAIN: ours(PLAIN, draft=False),
        "moedraft generic draft": base_only(system, ours("moedraft generic draft", "model", expert=SHARED)),
        "moedraft experts": ours("moedraft experts", "model"),
        "moedraft lookup": ours("moedraft lookup", "lookup", expert=SHARED),
        "moedraft experts + lookup": ours("moedraft experts + lookup"),
    }


def others_runners(other: System, outputs: Outputs, temperature: float) -> dict[str, Runner]:
    """The other draft base, alone and with lookup; answers are added to `outputs` as well."""
    alone, both = OTHER
    its = partial(runner_of, other, outputs, temperature=temperature, expert=SHARED)
    return {
        alone: its(alone, "model"),
        both: its(both),
    }


def runner_of(
    system: System,
    outputs: Outputs,
    name: str,
    source: DraftSource = "auto",
    *,
    temperature: float,
    **options: Any,
) -> Runner:
    """One of our systems, with a draft budget and a lookup in the own text of its own.

    Earlier answers are not searched: other programs have none. `options` go to `Engine.generate`.
    """
    budget, lookup = copy.deepcopy(system.engine.chooser.budget), LookupDrafter()

    def answer(prompt: str, max_tokens: int) -> list[int]:
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
        with system.engine.chooser.using(budget, source, lookup=lookup):
            [output] = system.engine.generate(prompt, params, counted=False, chat=True, **options)
        outputs.setdefault(name, []).append(output)
        return output.token_ids

    return answer


def figures(
    name: str, timed: dict[str, Timed], outputs: Outputs, cost_ratio: float, temperature: float
) -> dict[str, Any]:
    """What is reported of one system."""
    one, base = timed[name], timed[BASELINE]
    plain = base if name.startswith("transformers") else timed[PLAIN]
    return {
        "tokens_per_second": round(one.tokens_per_second, 2),
        "rounds": [round(value, 2) for value in one.rounds],
        "ratio": round(one.tokens_per_second / base.tokens_per_second, 3),
        "same_answers": None if temperature else one.answers == plain.answers,
        **speculation(outputs.get(name, []), cost_ratio),
    }


def shown_name(name: str) -> str:
    """A model's name as a report may tell it: of a folder the last part, not where it lies."""
    return Path(name).name if Path(name).is_dir() else name


def surroundings(system: System) -> dict[str, Any]:
    """On what it was measured."""
    return {
        "device": str(system.target.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "machine": platform.machine(),
    }


def speculation(outputs: list[RequestOutput], cost_ratio: float) -> dict[str, float | None]:
    """Tokens per target step, and acceptance and theoretical speed-up if the draft model alone guessed."""
    length = round(tokens_per_step(outputs), 3) if outputs else None
    drafts = sum(output.speculation.num_drafts for output in outputs)
    if not drafts or any(output.speculation.num_lookup_tokens for output in outputs):
        return {"tokens_per_step": length, "draft_acceptance_rate": None, "theoretical_speedup": None}
    drafted = sum(output.speculation.num_draft_tokens for output in outputs)
    accepted = sum(output.speculation.num_accepted_tokens for output in outputs)
    # Acceptance α of one token: accepted tokens over verified ones. The tokens of a draft after the first
    # refused one are not verified.
    refused = sum(output.num_rejections for output in outputs)
    alpha = accepted / (accepted + refused)
    return {
        "tokens_per_step": length,
        "draft_acceptance_rate": round(accepted / drafted, 4),
        "theoretical_speedup": round(theoretical_speedup(alpha, drafted / drafts, cost_ratio), 3),
    }


def base_only(system: System, runner: Runner) -> Runner:
    """The same runner with all adapters switched off: the draft base as it came, the generic draft."""

    def run_with_base(prompt: str, max_tokens: int) -> list[int]:
        with only_base(system, True):
            return runner(prompt, max_tokens)

    return run_with_base
