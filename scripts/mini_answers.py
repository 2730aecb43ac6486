"""Let the embedded target answer prompts, and train the draft on its answers.

A draft has to guess what its target says, not what the training texts say. So after its texts the draft
base learns from answers of the target, greedy and sampled, to the prompts of its own training texts. The
loss is that of the experts: forward KL divergence over the target's 16 most probable tokens and the rest as
one bucket.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.progress import Progress
from safetensors.torch import load_file, save_file

from moedraft.core import ReplayRecord, SamplingParams
from moedraft.distill.text.batches import collate
from moedraft.drafting.drafter import NoDrafter
from moedraft.engine.engine import Engine
from moedraft.kernels import divergence
from moedraft.models import load_model
from moedraft.routing.selector import FixedSelector
from moedraft.system.recorder import replay_record

LENGTH = 96  # tokens of an answer
LONGEST_PROMPT = 160  # tokens
AT_ONCE = 64  # sequences decoded together
CHUNK = 512  # answers in a file
PER_STEP = 24  # answers in a training step
TEMPERATURES = (
    0.0,
    0.0,
    0.7,
    1.0,
)  # of the answers, in turn: drafts are used for greedy and for sampled decoding
TOPK = 16


def ask(target_folder: Path, prompts: dict[str, list[str]], seconds: float, work: Path, seed: int) -> int:
    """Let the target answer prompts of all domains in turn for `seconds`; files in `work`. Resumable.

    Returns how many tokens the answers have.
    """
    work.mkdir(parents=True, exist_ok=True)
    target = load_model(str(target_folder), "target")
    engine = Engine(target, target.tokenizer, NoDrafter(), FixedSelector(), max_batch_size=AT_ONCE, topk=TOPK)
    captured: list[ReplayRecord] = []
    engine.subscribe(lambda row: captured.append(replay_record(row, "")))
    order = in_turn(prompts, seed)
    done = len(list(work.glob("*.safetensors")))
    for _ in range(done * CHUNK):
        next(order)
    tokens = done * CHUNK * LENGTH
    began = time.monotonic()
    with Progress() as progress:
        task = progress.add_task("answers", total=seconds)
        while (used := time.monotonic() - began) < seconds:
            chosen = [target.tokenizer(next(order))["input_ids"][:LONGEST_PROMPT] for _ in range(CHUNK)]
            params = [
                SamplingParams(max_tokens=LENGTH, temperature=TEMPERATURES[i % 4], ignore_eos=True, seed=i)
                for i in range(CHUNK)
            ]
            captured.clear()
            engine.generate(chosen, params, learn=True)
            save(captured, work / f"{done:05d}.safetensors")
            done, tokens = done + 1, tokens + CHUNK * LENGTH
            progress.update(task, completed=used, description=f"answers: {tokens / 1e6:.2f} M tokens")
    engine.close()
    return tokens


def in_turn(prompts: dict[str, list[str]], seed: int) -> Iterator[str]:
    """Prompts of all domains in turn, each domain's in random order, without end."""
    rng = random.Random(seed)
    decks: dict[str, list[str]] = {name: [] for name in sorted(prompts)}
    while True:
        for name, deck in decks.items():
            if not deck:
                deck.extend(rng.sample(prompts[name], len(prompts[name])))
            yield deck.pop()


def save(records: list[ReplayRecord], path: Path) -> None:
    """Write one chunk of answers to a file, padded to one length."""
    longest = max(len(record.token_ids) for record in records)
    ids = torch.zeros(len(records), longest, dtype=torch.int32)
    for row, record in zip(ids, records, strict=True):
        row[: len(record.token_ids)] = torch.tensor(record.token_ids)
    tensors = {
        "token_ids": ids,
        "prompt": torch.tensor([record.num_prompt_tokens for record in records]),
        "length": torch.tensor([len(record.token_ids) for record in records]),
        "topk_ids": torch.tensor([record.topk_ids for record in records], dtype=torch.int32),
        "topk_logprobs": torch.tensor([record.topk_logprobs for record in records], dtype=torch.float16),
    }
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary)
    temporary.rename(path)


class Answers:
    """What a training step learns from: random answers. All answers are used again and again."""

    def __init__(self, work: Path, seed: int) -> None:
        self.chunks = [load_file(path) for path in sorted(work.glob("*.safetensors"))]
        self.seed = seed
        self.count = sum(len(chunk["length"]) for chunk in self.chunks)
        self.tokens_per_step = PER_STEP * LENGTH

    def record(self, index: int) -> ReplayRecord:
        chunk = self.chunks[index // CHUNK]
        row = index % CHUNK
        return ReplayRecord(
            domain="",
            expert="",
            adapter_version=0,
            target_id="",
            token_ids=chunk["token_ids"][row, : int(chunk["length"][row])].tolist(),
            num_prompt_tokens=int(chunk["prompt"][row]),
            topk_ids=chunk["topk_ids"][row].tolist(),
            topk_logprobs=chunk["topk_logprobs"][row].float().tolist(),
            rejected=[],
            drafted=0,
            accepted=0,
        )

    def loss(self, model: torch.nn.Module, step: int, device: str) -> torch.Tensor:
        """The loss, in nats per token of the answers."""
        passes, at = divmod(step * PER_STEP, self.count)
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.seed + passes))
        batch = collate([self.record(i) for i in order[at : at + PER_STEP].tolist()], torch.device(device))
        logits = model(input_ids=batch.token_ids, use_cache=False, logits_to_keep=batch.keep).logits
        return divergence(logits[batch.mask].float(), teacher_topk=(batch.topk_ids, batch.topk_logprobs))
