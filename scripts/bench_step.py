#!/usr/bin/env python3
"""What one step of a target costs: transformers and moedraft, float32 and bfloat16, in turns in one process.

On a CPU without instructions for bfloat16, moedraft with weights in half precision too, its default there.

    python scripts/bench_step.py [--target smollm2] [--threads 2] [--out results/step.json]

A step is one forward of some rows with some new tokens each over a filled cache; its logits are computed for
all of them. Beside the times it counts how many greedy answers of plain decoding are not found again when
five tokens are verified at once, four of them guessed right or wrong at random, and how far each system's
logits are from those of transformers in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from moedraft.chat import prompt_ids
from moedraft.models import LanguageModel, load_model
from moedraft.showcase import shipped

SHAPES = ((1, 1), (1, 5), (8, 1), (8, 5))  # rows, tokens
DTYPES = ("float32", "bfloat16")
HALVED = "float32, weights in half precision"


class Peer:
    """transformers' own forward over its own cache."""

    def __init__(self, model: LanguageModel) -> None:
        self.hf = model.hf
        self.argument = model.cache_argument

    def fill(self, ids: torch.Tensor) -> None:
        self.cache = transformers.DynamicCache(config=self.hf.config)
        self.hf(input_ids=ids, use_cache=True, logits_to_keep=1, **{self.argument: self.cache})

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.hf(input_ids=ids, use_cache=True, **{self.argument: self.cache}).logits
        self.cache.crop(-ids.shape[1])
        return logits


class Own:
    """Our forward over a slot cache."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    def fill(self, ids: torch.Tensor) -> None:
        self.filled = ids.shape[1]
        self.cache = self.model.new_cache(len(ids))
        self.model.forward(self.cache, 0, ids, [0] * len(ids), keep=1)

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model.forward(self.cache, 0, ids, [self.filled] * len(ids))


def measure(systems: dict[str, Any], ids: torch.Tensor, context: int, rounds: int) -> dict[str, Any]:
    """{shape: {system: {"ms", "least"}}}: medians over rounds in which the systems take turns.

    The first step of each turn is not counted: it brings the system's weights back into the CPU's caches.
    """
    found: dict[str, Any] = {}
    for rows, tokens in SHAPES:
        times: dict[str, list[float]] = {name: [] for name in systems}
        new = ids[:rows, context : context + tokens].contiguous()
        for system in systems.values():
            system.fill(ids[:rows, :context])
            system.step(new)
        for _ in range(rounds):
            for name, system in systems.items():
                system.step(new)
                began = time.perf_counter()
                system.step(new)
                times[name].append((time.perf_counter() - began) * 1e3)
        found[f"{rows}x{tokens}"] = {
            name: {"ms": round(median(each), 2), "least": round(min(each), 2)} for name, each in times.items()
        }
        print(f"{rows}x{tokens}", {name: round(median(each), 1) for name, each in times.items()}, flush=True)
    return found


def errors(systems: dict[str, Any], ids: torch.Tensor, context: int) -> dict[str, float]:
    """Root mean square of the distance to the first system's logits, in their standard deviations."""
    logits = {}
    for name, system in systems.items():
        system.fill(ids[:1, :context])
        logits[name] = system.step(ids[:1, context:]).float()
    right = next(iter(logits.values()))
    return {
        name: round(float((one - right).square().mean().sqrt() / right.std()), 5)
        for name, one in logits.items()
    }


def answer(
    model: LanguageModel, prompt: list[int], count: int, guess: Callable[[int], list[int]]
) -> list[int]:
    """A greedy answer by verifying what `guess` proposes after so many tokens; [] is plain decoding."""
    cache, said = model.new_cache(1), list[int]()
    model.forward(cache, 0, torch.tensor([prompt[:-1]]), [0], keep=1)
    while len(said) < count:
        drafted = guess(len(said))
        last = said[-1] if said else prompt[-1]
        logits = model.forward(cache, 0, torch.tensor([[last, *drafted]]), [len(prompt) + len(said) - 1])
        best: list[int] = logits[0].argmax(-1).tolist()
        right = next((i for i, token in enumerate(drafted) if token != best[i]), len(drafted))
        said += best[: right + 1]
    return said[:count]


def differing(model: LanguageModel, prompts: list[list[int]], count: int) -> int:
    """How many answers differ between plain decoding and verification of five tokens."""
    wrong, chance = 0, random.Random(0)
    for prompt in prompts:
        plain = answer(model, prompt, count, lambda _: [])

        def guess(at: int, plain: list[int] = plain) -> list[int]:
            true = [*plain, 0, 0, 0, 0][at : at + 4]
            return [token if chance.random() < 0.8 else chance.randrange(1000) for token in true]

        wrong += answer(model, prompt, count, guess) != plain
    return wrong


@torch.inference_mode()
def run(args: argparse.Namespace) -> dict[str, Any]:
    if args.threads:
        torch.set_num_threads(args.threads)
    models = {dtype: load_model(args.target, "target", "cpu", dtype) for dtype in DTYPES}
    systems: dict[str, Any] = {f"transformers {dtype}": Peer(model) for dtype, model in models.items()}
    usual = load_model(args.target, "target", "cpu")
    if usual.precision not in DTYPES:  # a CPU without instructions for bfloat16
        models[HALVED] = usual
    systems |= {f"moedraft {precision}": Own(model) for precision, model in models.items()}
    tokenizer = models["float32"].tokenizer
    queries = shipped.heldout()
    text = tokenizer("\n".join(query.prompt for query in queries))["input_ids"]
    width = args.context + 16
    ids = torch.tensor([text[row * width :][:width] for row in range(8)])
    prompts = [prompt_ids(tokenizer, query.prompt, chat=True) for query in queries[: args.answers]]
    result: dict[str, Any] = {
        "target": args.target,
        "context": args.context,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "step_ms": measure(systems, ids, args.context, args.rounds),
        "distance": errors(systems, ids, args.context),
        "answers": len(prompts),
    }
    result["differing"] = {
        f"moedraft {name}": differing(model, prompts, args.tokens) for name, model in models.items()
    }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--threads", type=int, default=0, help="0: PyTorch's own choice")
    parser.add_argument("--context", type=int, default=128, help="tokens in the cache")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--answers", type=int, default=50, help="greedy answers that are compared")
    parser.add_argument("--tokens", type=int, default=64, help="of each of them")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    args = parser.parse_args()
    result = run(args)
    print(json.dumps({key: result[key] for key in ("distance", "differing")}, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
