"""The engine against transformers at batch 1: same prompts, one run, systems taking turns."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch

from moedraft.core import SHARED, RequestOutput, SamplingParams
from moedraft.engine.build import System
from moedraft.engine.decoder import DraftSource
from moedraft.models import load_model
from moedraft.showcase.measure import (
    compare,
    drafting_by,
    step_costs,
    theoretical_speedup,
    tokens_per_step,
    transformers_runner,
    warm_up,
)
from moedraft.showcase.shipped import Query

BASELINE, ASSISTED = "transformers generate", "transformers assisted"


def run(system: System, queries: list[Query], rounds: int, advance: Callable[[int], None]) -> dict[str, Any]:
    """Everything `moedraft bench` prints, as plain data."""
    warm_up(system)
    outputs: dict[str, list[RequestOutput]] = {}

    def ours(name: str, source: DraftSource = "auto", **options: Any) -> Callable[[str, int], list[int]]:
        def answer(prompt: str, max_tokens: int) -> list[int]:
            params = SamplingParams(max_tokens=max_tokens)
            with drafting_by(system, source):
                [output] = system.engine.generate(prompt, params, chat=True, **options)
            outputs.setdefault(name, []).append(output)
            return output.token_ids

        return answer

    # A copy without our layers around its own, so that transformers runs it as it would at home.
    settings = system.settings
    assistant = load_model(settings.draft, "draft", settings.device, settings.dtype, settings.cache_dir)
    # With vocabularies of different sizes (one padded further) it would take the tokenizers for different.
    fits = (
        assistant.hf.config.get_text_config().vocab_size
        == system.target.hf.config.get_text_config().vocab_size
    )
    assisted = {ASSISTED: transformers_runner(system.target, assistant_model=assistant.hf)} if fits else {}
    runners = {
        BASELINE: transformers_runner(system.target),
        **assisted,
        "transformers prompt lookup": transformers_runner(system.target, prompt_lookup_num_tokens=8),
        "moedraft plain": ours("moedraft plain", draft=False),
        "moedraft generic draft": base_only(system, ours("moedraft generic draft", "model", expert=SHARED)),
        "moedraft experts": ours("moedraft experts", "model"),
        "moedraft lookup": ours("moedraft lookup", "lookup"),
        "moedraft experts + lookup": ours("moedraft experts + lookup"),
    }
    for runner in runners.values():
        runner(queries[0].prompt, 16)
    outputs.clear()
    system.engine.decoder.verify_seconds = system.engine.step_seconds = 0.0
    done = 0

    def on_progress() -> None:
        nonlocal done
        done += 1
        advance(done)

    timed = compare(runners, queries, rounds, on_progress)
    share = system.engine.decoder.verify_seconds / system.engine.step_seconds
    costs = step_costs(system)
    cost_ratio = costs["draft_ms"] / costs["target_ms"]
    base = timed[BASELINE]
    systems = {
        name: {
            "tokens_per_second": round(one.tokens_per_second, 2),
            "rounds": [round(value, 2) for value in one.rounds],
            "ratio": round(one.tokens_per_second / base.tokens_per_second, 3),
            "same_answers": one.answers == base.answers,
            **speculation(outputs.get(name, []), cost_ratio),
        }
        for name, one in timed.items()
    }
    return {
        "systems": systems,
        "step_ms": {name: round(value, 3) for name, value in costs.items()},
        "cost_ratio": round(cost_ratio, 4),
        "verify_share": round(share, 4),
        "adapted": bool(system.bank.experts or system.bank.shared),
        "prompts": len(queries),
        "device": str(system.target.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "machine": platform.machine(),
    }


def speculation(outputs: list[RequestOutput], cost_ratio: float) -> dict[str, float | None]:
    """Tokens per target step; acceptance and the speed-up in theory where a model alone drafted."""
    length = round(tokens_per_step(outputs), 3) if outputs else None
    drafts = sum(output.num_drafts for output in outputs)
    if not drafts or any(output.num_lookup_tokens for output in outputs):
        return {"tokens_per_step": length, "draft_acceptance_rate": None, "theoretical_speedup": None}
    drafted = sum(output.num_draft_tokens for output in outputs)
    accepted = sum(output.num_accepted_tokens for output in outputs)
    # Per-token acceptance α: accepted over verified, the first refused token of a draft being the last one.
    refused = sum(output.num_rejections for output in outputs)
    alpha = accepted / (accepted + refused)
    return {
        "tokens_per_step": length,
        "draft_acceptance_rate": round(accepted / drafted, 4),
        "theoretical_speedup": round(theoretical_speedup(alpha, drafted / drafts, cost_ratio), 3),
    }


def base_only(system: System, runner: Callable[[str, int], list[int]]) -> Callable[[str, int], list[int]]:
    """Run with the draft base as it came: the static generic draft."""

    def run_with_base(prompt: str, max_tokens: int) -> list[int]:
        system.bank.bare(True)
        system.bank.select([SHARED])
        try:
            return runner(prompt, max_tokens)
        finally:
            system.bank.bare(False)

    return run_with_base
