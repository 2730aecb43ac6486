#!/usr/bin/env python3
"""Measure what drafting gains on models of large shapes, for several acceptance rates and batch sizes.

    python scripts/bench_engine.py --out results                  # the pairs that suit this machine
    python scripts/bench_engine.py --pair 8b+1b --batch 1 8 32 --acceptance 0.6 0.8

The models have real shapes and random weights, so their steps take the time of a real model but say nothing
sensible. Their logits are therefore overwritten: the target's next token is computed from the last one and
its position, and the draft says the same token with probability `--acceptance`. Everything else is the
engine as it is: caches, verification, the adaptive budget, experts (LoRA on the tail, rank 16) in one batch.

Three systems take turns, greedy and without prompt lookup: `plain`; `draft`, where the shared draft drafts
all rows; `experts`, where each row has another expert. Reported are tokens per second of decoding (median
of the rounds), the same divided by that of `plain`, tokens per step of the target, and draft tokens per
round. The budget learns its costs beforehand, in a load of the same kind that is not counted. All three
systems must give the same answers.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from moedraft.core import SHARED, SamplingParams, Sequence
from moedraft.drafting.experts.adapter import Adapter
from moedraft.drafting.experts.lora import ExpertBank
from moedraft.drafting.model import ModelDrafter
from moedraft.engine.engine import Engine
from moedraft.models import LanguageModel
from moedraft.routing.selector import FixedSelector

SYSTEMS = ("plain", "draft", "experts")
RANK = 16
CERTAIN = 1e4  # a logit larger than any that random weights give


@dataclass(frozen=True)
class Shape:
    """Of a Llama."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int

    def build(self, device: str, dtype: torch.dtype, length: int) -> LanguageModel:
        config = transformers.LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.ffn,
            max_position_embeddings=length,
            bos_token_id=None,
            eos_token_id=None,
        )
        with torch.device(device):
            hf = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        return LanguageModel(hf.eval().requires_grad_(False), None, f"{self.hidden}x{self.layers}")


TINY_LLAMA = Shape(256, 4, 4, 2, 768, 8192)
ONE_B = Shape(2048, 16, 32, 8, 8192, 128_256)  # Llama 3.2
PAIRS = {
    "120m+7m": (Shape(768, 12, 12, 4, 3072, 8192), TINY_LLAMA),
    "1b+150m": (ONE_B, Shape(512, 4, 8, 2, 2048, 128_256)),
    "8b+1b": (Shape(4096, 32, 32, 8, 14_336, 128_256), ONE_B),
}


class Scripted:
    """A `CausalModel` that computes like `model`, and then says the tokens of `next_tokens` instead.

    `accuracy` is the share of positions where it says that token; elsewhere it says the next larger one.
    """

    def __init__(self, model: LanguageModel, accuracy: float = 1.0) -> None:
        self.model, self.accuracy = model, accuracy
        self.vocab_size, self.max_len = model.vocab_size, model.max_len
        self.ragged, self.mixes = model.ragged, model.mixes
        self.device, self.new_cache = model.device, model.new_cache

    def forward(
        self,
        cache: Any,
        first: int,
        token_ids: torch.Tensor,
        starts: list[int],
        keep: int = 0,
        *rest: Any,
        **named: Any,
    ) -> torch.Tensor:
        logits = self.model.forward(cache, first, token_ids, starts, keep, *rest, **named)
        width = logits.shape[1]
        positions = torch.tensor(starts, device=self.device)[:, None] + torch.arange(
            token_ids.shape[1], device=self.device
        )
        says = next_tokens(token_ids[:, -width:], positions[:, -width:], self.vocab_size, self.accuracy)
        return logits.scatter_(2, says[..., None], CERTAIN)


def next_tokens(tokens: torch.Tensor, positions: torch.Tensor, vocab: int, accuracy: float) -> torch.Tensor:
    """A made-up next token for each token at its position, int64 like `tokens`; 1 − accuracy are wrong."""
    mixed = tokens * 1_103_515_245 + positions * 12_345 + 12_821
    chance = (mixed * 48_271 % 2_147_483_647).double() / 2_147_483_647
    return (mixed % 2_147_483_629 + (chance >= accuracy)) % vocab


class Numbers:
    """A tokenizer: token 7 is the text "7 "."""

    eos_token_id = None

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(f"{i} " for i in ids)


def bank_of(draft: LanguageModel, experts: int) -> ExpertBank:
    """A bank of experts named "0", "1", … with small random weights."""
    bank = ExpertBank(draft)
    for name in map(str, range(experts)):
        deltas = {}
        for layer in bank.tail:
            weight = bank.layers[layer].base_weight()
            down = torch.randn(RANK, weight.shape[1], device=weight.device).to(weight.dtype)
            up = 1e-4 * torch.randn(weight.shape[0], RANK, device=weight.device).to(weight.dtype)
            deltas[layer] = (down, up)
        bank.publish(name, Adapter(1, deltas))
    return bank


@dataclass
class Run:
    """What one load of requests gave."""

    seconds: float
    finished: list[Sequence]

    @property
    def tokens(self) -> int:
        return sum(one.num_generated for one in self.finished)


def serve(engine: Engine, system: str, batch: int, args: argparse.Namespace, seed: int) -> Run:
    """Answer `batch` prompts at once."""
    rng = torch.Generator().manual_seed(seed)
    finished: list[Sequence] = []
    unsubscribe = engine.subscribe(finished.append)
    for row in range(batch):
        prompt = torch.randint(engine.target.vocab_size, (args.prompt,), generator=rng).tolist()
        expert = str(row) if system == "experts" else SHARED
        engine.add(prompt, SamplingParams(max_tokens=args.max_tokens), expert=expert, draft=system != "plain")
    tokens = 0
    while engine.figures.waiting or engine.scheduler.reading:
        tokens = sum(len(output.token_ids) for output in engine.step())  # prompts are read
    synchronise(args.device)
    before = tokens
    began = time.perf_counter()
    while engine.has_work:
        engine.step()
    synchronise(args.device)
    unsubscribe()
    run = Run(time.perf_counter() - began, finished)
    assert run.tokens == batch * args.max_tokens, "an answer ended early"
    run.seconds *= run.tokens / (run.tokens - before)
    return run


def synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def engine_of(target: Scripted, draft: Scripted, bank: ExpertBank, batch: int) -> Engine:
    """A new one, whose budget knows nothing yet."""
    drafter = ModelDrafter(draft, bank, batch, target.vocab_size)
    return Engine(target, Numbers(), drafter, FixedSelector(), max_batch_size=batch, draft_source="model")


def measure(
    target: Scripted, draft: Scripted, bank: ExpertBank, batch: int, args: argparse.Namespace
) -> dict[str, Any]:
    """The figures of every system. The systems take turns in each round."""
    engines = {system: engine_of(target, draft, bank, batch) for system in SYSTEMS}
    for system, engine in engines.items():
        serve(engine, system, batch, args, seed=0)
    runs: dict[str, list[Run]] = {system: [] for system in SYSTEMS}
    answers = {}
    for number in range(args.rounds):
        for system, engine in engines.items():
            runs[system].append(serve(engine, system, batch, args, seed=number + 1))
            answers[system] = sorted(one.generated for one in runs[system][-1].finished)
        assert answers["plain"] == answers["draft"] == answers["experts"], "the answers differ"
    figures = {}
    for system, several in runs.items():
        ended = [one for run in several for one in run.finished]
        ratios = [p.seconds / run.seconds for p, run in zip(runs["plain"], several, strict=True)]
        figures[system] = {
            "tokens_per_second": round(median(run.tokens / run.seconds for run in several), 1),
            "ratio": round(median(ratios), 3),
            "tokens_per_step": round(
                sum(o.num_generated for o in ended) / sum(o.speculation.num_steps for o in ended), 3
            ),
            "draft_tokens_per_round": round(
                sum(one.speculation.num_draft_tokens for one in ended)
                / sum(one.speculation.num_steps for one in ended),
                3,
            ),
            "accepted": round(
                sum(o.speculation.num_accepted_tokens for o in ended)
                / max(1, sum(o.speculation.num_draft_tokens for o in ended)),
                3,
            ),
        }
    return figures


def arguments() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pair", nargs="+", choices=PAIRS, default=["1b+150m", "8b+1b"] if cuda else ["120m+7m"]
    )
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--acceptance", nargs="+", type=float, default=[0.5, 0.7, 0.9])
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--threads", type=int, default=0, help="of a CPU; 0: PyTorch's choice")
    parser.add_argument("--quick", action="store_true", help="one acceptance, two batches, two rounds")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder")
    args = parser.parse_args()
    if args.quick:
        args.batch, args.acceptance, args.rounds, args.max_tokens = [1, 8], [0.7], 2, 64
    return args


def save(pairs: dict[str, Any], args: argparse.Namespace) -> Path:
    """Write what is known so far; a run that is broken off keeps it."""
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
    result = {
        "pairs": pairs,
        "device": device,
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
        "rounds": args.rounds,
        "max_tokens": args.max_tokens,
        "machine": platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path: Path = args.out / f"engine-{device.lower().replace(' ', '-')}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


@torch.inference_mode()
def main() -> None:
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    pairs: dict[str, Any] = {}
    for name in args.pair:
        torch.manual_seed(0)
        length = args.prompt + args.max_tokens + 64
        models = [shape.build(args.device, getattr(torch, args.dtype), length) for shape in PAIRS[name]]
        bank = bank_of(models[1], max(args.batch))
        pairs[name] = []
        for batch in args.batch:
            for acceptance in args.acceptance:
                target, draft = Scripted(models[0]), Scripted(models[1], acceptance)
                found = measure(target, draft, bank, batch, args)
                pairs[name].append({"batch": batch, "acceptance": acceptance, "systems": found})
                shown = ", ".join(f"{system} {one['ratio']:.2f}" for system, one in found.items())
                print(f"{name}, batch {batch}, acceptance {acceptance}: {shown}", flush=True)
                path = save(pairs, args)
    print("written:", path)


if __name__ == "__main__":
    main()
