#!/usr/bin/env python3
"""Train the embedded pair: one byte-level BPE tokenizer, `mini-target` and `mini-draft`.

    python scripts/train_mini.py DATA... --out data/models --size cpu --minutes 120

DATA are JSONL files (`.jsonl`, `.jsonl.xz`; rows with `prompt` and `reference`, or `text`) or
folders of such files and of `.txt`/`.md` files. A file's stem is its domain. The target sees all of
it. The draft sees a small mixed slice only, so that it is generic and has something left to learn; with
`--teach` it also learns from what the target answers to that slice's prompts, which makes a better draft and
leaves less for experts to learn.

The budget is wall time: the learning rate follows the share of it that has been used, so a slower
machine gives a worse model, never an unfinished schedule. A run that was stopped goes on where it
was when the same command is given again. `training.json` beside the weights says what was used.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import shutil
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from mini_answers import Answers, ask
from mini_data import Batches, Corpus, Document, read_domains, tokenise, train_tokenizer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SHARD = "16MB"  # largest weight file; save_pretrained counts in powers of ten, so below 16 MiB


@dataclass(frozen=True)
class Shape:
    """One model's architecture and how it is trained."""

    hidden: int
    layers: int
    heads: int
    ffn: int
    batch: int  # sequences per step
    lr: float
    share: float  # of the whole time that this model gets
    answers: float = 0.0  # with --teach: the part of that share in which the target answers prompts
    taught: float = 0.0  # with --teach: the part in which the draft learns from the answers


@dataclass(frozen=True)
class Size:
    vocab: int
    seq_len: int
    target: Shape
    draft: Shape
    draft_rows: int  # documents per domain that the draft may see


SIZES = {
    # The target is deep and narrow, the draft a single layer: a draft step must be much cheaper to pay.
    "cpu": Size(
        vocab=8192,
        seq_len=512,
        target=Shape(hidden=192, layers=12, heads=3, ffn=512, batch=8, lr=4e-3, share=0.8),
        draft=Shape(
            hidden=128, layers=1, heads=4, ffn=512, batch=8, lr=6e-3, share=0.2, answers=0.2, taught=0.3
        ),
        draft_rows=1500,
    ),
    "gpu": Size(
        vocab=8192,
        seq_len=1024,
        target=Shape(hidden=320, layers=12, heads=5, ffn=864, batch=96, lr=4e-3, share=0.7),
        draft=Shape(
            hidden=160, layers=1, heads=5, ffn=640, batch=96, lr=6e-3, share=0.3, answers=0.3, taught=0.3
        ),
        draft_rows=1500,
    ),
}


def shared_tokenizer(
    args: argparse.Namespace, texts: dict[str, list[Document]], vocab: int
) -> PreTrainedTokenizerFast:
    """The tokenizer of this run, or with `--only` that of the other model, or a new one."""
    kept = args.work / "tokenizer"
    places = [kept, *([args.out / "mini-target", args.out / "mini-draft"] if args.only else [])]
    for place in places:
        if (place / "tokenizer.json").exists():
            return PreTrainedTokenizerFast.from_pretrained(place)
    tokenizer = train_tokenizer(texts, vocab, args.seed)
    tokenizer.save_pretrained(kept)
    return tokenizer


def build(shape: Shape, size: Size, tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def optimisers(model: LlamaForCausalLM, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embedding and norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    known = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in known]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def learning_rate(progress: float, peak: float) -> float:
    """Warm up over 2 %, hold to 40 %, then fall linearly to zero at the end of the budget."""
    return peak * min(1.0, progress / 0.02, (1.0 - progress) / 0.6)


def next_token_loss(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


@torch.no_grad()
def held_out_losses(
    model: torch.nn.Module, corpora: dict[str, Corpus], seq_len: int, device: str
) -> dict[str, float]:
    """Mean next-token loss in nats per token, by domain, on at most 16 held-out windows each."""
    losses = {}
    for domain, corpus in sorted(corpora.items()):
        windows = [corpus.window(int(s), seq_len + 1) for s in corpus.starts[:16]]
        ids = torch.from_numpy(np.stack(windows).astype(np.int64)).to(device)
        losses[domain] = round(next_token_loss(model, ids).item(), 4)
    return losses


class Checkpoint:
    """The file from which a stopped run goes on: weights, optimiser state, step, seconds used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(
        self, model: torch.nn.Module, opts: list[torch.optim.Optimizer], step: int, seconds: float
    ) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"model.{k}": v for k, v in model.state_dict().items() if k != "lm_head.weight"}
        tensors["position"] = torch.tensor([step, seconds], dtype=torch.float64)
        for which, opt in enumerate(opts):
            for index, state in opt.state_dict()["state"].items():
                tensors |= {f"opt.{which}.{index}.{k}": torch.as_tensor(v) for k, v in state.items()}
        temporary = self.folder / "state.tmp"
        save_file({k: v.detach().contiguous().cpu() for k, v in tensors.items()}, temporary)
        temporary.replace(self.folder / "state.safetensors")

    def load(self, model: torch.nn.Module, opts: list[torch.optim.Optimizer]) -> tuple[int, float]:
        """Load the state and return `(step, seconds)`, or `(0, 0.0)` if there is no such file."""
        path = self.folder / "state.safetensors"
        if not path.exists():
            return 0, 0.0
        tensors = load_file(path)
        weights = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
        model.load_state_dict(weights, strict=False)
        for which, opt in enumerate(opts):
            state: dict[int, dict[str, torch.Tensor]] = {}
            for key, value in tensors.items():
                kind, *rest = key.split(".")
                if kind == "opt" and int(rest[0]) == which:
                    state.setdefault(int(rest[1]), {})[rest[2]] = value
            opt.load_state_dict(opt.state_dict() | {"state": state})
        step, seconds = tensors["position"].tolist()
        return int(step), seconds


class Texts:
    """Learning from texts: predict the next token in random windows."""

    def __init__(self, batches: Batches) -> None:
        self.batches, self.tokens_per_step = batches, batches.tokens_per_step

    def loss(self, model: torch.nn.Module, step: int, device: str) -> torch.Tensor:
        """The loss, in nats per token."""
        return next_token_loss(model, self.batches.batch(step).to(device, non_blocking=True))


class Lesson(Protocol):
    """What the steps of a training learn from."""

    tokens_per_step: int

    def loss(self, model: torch.nn.Module, step: int, device: str) -> torch.Tensor: ...


def train(
    name: str, model: LlamaForCausalLM, lesson: Lesson, lr: float, seconds: float, args: argparse.Namespace
) -> dict[str, Any]:
    """Train until `seconds` of wall time are used. Returns steps, tokens and the last loss."""
    device = args.device
    model.to(device).train()
    opts = optimisers(model, lr)
    checkpoint = Checkpoint(args.work / name)
    step, used = checkpoint.load(model, opts)
    even = isinstance(lesson, Texts)  # all steps have the same shape
    run: Any = torch.compile(model) if args.compile and even else model
    cast = nullcontext() if args.precision == "float32" else torch.autocast(device, torch.bfloat16)
    began, saved, smooth = time.monotonic() - used, time.monotonic(), math.nan
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task(name, total=seconds, completed=int(used))
        while (used := time.monotonic() - began) < seconds:
            for opt in opts:
                for group in opt.param_groups:
                    group["lr"] = learning_rate(used / seconds, lr)
            with cast:
                loss = lesson.loss(run, step, device)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for opt in opts:
                opt.step()
                opt.zero_grad(set_to_none=True)
            step += 1
            if step % 20 == 0:
                value = loss.item()
                smooth = value if math.isnan(smooth) else 0.9 * smooth + 0.1 * value
                progress.update(task, completed=used, description=f"{name} step {step} loss {smooth:.3f}")
                if step % 200 == 0:
                    progress.console.print(f"{name} {used / 60:.1f} min, step {step}, loss {smooth:.3f}")
            if time.monotonic() - saved > 120:
                checkpoint.save(model, opts, step, used)
                saved = time.monotonic()
    checkpoint.save(model, opts, step, max(used, seconds))
    return {"steps": step, "tokens": step * lesson.tokens_per_step, "train_loss": round(smooth, 4)}


def publish(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path, facts: dict[str, Any]
) -> None:
    """Write an ordinary `save_pretrained` folder in half precision, then swap it into place."""
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    model.half().save_pretrained(temporary, max_shard_size=SHARD)
    tokenizer.save_pretrained(temporary)
    (temporary / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder that gets mini-target and mini-draft")
    parser.add_argument("--size", choices=sorted(SIZES), default="cpu")
    parser.add_argument("--minutes", type=float, default=120, help="wall time for both models together")
    parser.add_argument("--only", choices=["mini-target", "mini-draft"], help="train one of the two")
    parser.add_argument("--teach", action="store_true", help="the draft learns from the target's answers too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="checkpoints and tokens (default: OUT/.work)")
    parser.add_argument("--precision", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.work = args.work or args.out / ".work"
    return args


def main() -> None:
    args = arguments()
    size = SIZES[args.size]
    args.work.mkdir(parents=True, exist_ok=True)
    train_texts, held_texts, hashes = read_domains(args.data)
    tokenizer = shared_tokenizer(args, train_texts, size.vocab)
    everything = {d: tokenise(tokenizer, t, args.seed) for d, t in train_texts.items()}
    held = {d: tokenise(tokenizer, t, args.seed) for d, t in held_texts.items()}
    total = sum(len(corpus.tokens) for corpus in everything.values())
    print(f"{total / 1e6:.1f} M tokens in {len(everything)} domains")

    mixed = random.Random(args.seed)
    small = {d: mixed.sample(t, min(size.draft_rows, len(t))) for d, t in train_texts.items()}
    slices = {
        "mini-target": (size.target, everything),
        "mini-draft": (size.draft, {d: tokenise(tokenizer, t, args.seed) for d, t in small.items()}),
    }
    for offset, (name, (shape, corpora)) in enumerate(slices.items()):
        if args.only not in (None, name):
            continue
        model = build(shape, size, tokenizer, args.seed + offset)
        parameters = sum(p.numel() for p in model.parameters())
        print(f"{name}: {parameters / 1e6:.2f} M parameters, {shape.share * args.minutes:.1f} minutes")
        batches = Batches(corpora, size.seq_len, shape.batch, args.seed + offset)
        seconds = shape.share * args.minutes * 60
        teach = args.teach and shape.taught > 0
        rest = 1 - shape.answers - shape.taught if teach else 1.0
        result = train(name, model, Texts(batches), shape.lr, rest * seconds, args)
        if teach:
            prompts = {domain: [document.prompt for document in t] for domain, t in small.items()}
            answers = args.work / "answers"
            asked = ask(args.out / "mini-target", prompts, shape.answers * seconds, answers, args.seed)
            lesson = Answers(answers, args.seed)
            taught = train(f"{name}-taught", model, lesson, shape.lr / 2, shape.taught * seconds, args)
            result |= {"answer_tokens": asked, "taught": taught}
        losses = held_out_losses(model.eval(), held, size.seq_len, args.device)
        facts = {
            "model": name,
            "parameters": parameters,
            "shape": asdict(shape),
            "size": args.size,
            "vocab": size.vocab,
            "seq_len": size.seq_len,
            "seed": args.seed,
            "minutes": round(shape.share * args.minutes, 2),
            "precision": args.precision,
            "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
            "torch": torch.__version__,
            **result,
            "held_out_loss": losses,
            "documents": {d: len(t) for d, t in (train_texts if offset == 0 else small).items()},
            "data_sha256": hashes,
        }
        publish(model.cpu(), tokenizer, args.out / name, facts)
        print(f"{name}: held-out loss {sum(losses.values()) / len(losses):.3f}", losses)
    shutil.rmtree(args.work)


if __name__ == "__main__":
    main()
