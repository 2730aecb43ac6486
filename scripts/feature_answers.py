"""Answers of a target to prompts of several domains, with its most likely tokens, kept in a folder.

They are greedy unless a temperature is given. They are expensive and the same for every arrangement that is
compared, so each is computed once. A file holds one domain; one that is there already is read.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import random
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from moedraft.core import ReplayRecord
from moedraft.feature.training.corpus import asked
from moedraft.loading.checks import until_end
from moedraft.models import LanguageModel

LONGEST = 600  # characters of a prompt
SHIPPED = ("support",)  # domains whose prompts come with the package
TOPK = 16


def prompts_of(data: Path, domain: str, split: str, count: int, seed: int = 0) -> list[str]:
    """Prompts of `domain`: the first `count` of a shuffled list. split: "stream" or "dev"."""
    if domain in SHIPPED:
        text = (files("moedraft.data") / "domains" / f"{domain}.jsonl").read_text(encoding="utf-8")
        prompts = [json.loads(line)["prompt"] for line in text.splitlines()]
        random.Random(seed).shuffle(prompts)
        prompts = prompts[20:] if split == "stream" else prompts[:20]
        return prompts[:count]
    with lzma.open(data / split / f"{domain}.jsonl.xz", "rt", encoding="utf-8") as lines:
        prompts = [json.loads(line)["prompt"] for line in lines]
    short = sorted({prompt for prompt in prompts if len(prompt) < LONGEST})
    random.Random(seed).shuffle(short)
    return short[:count]


def first_prompts(data: Path, domain: str, count: int) -> list[str]:
    """Those that come first in the data for training, as they stand there; of a shipped domain any others."""
    if domain in SHIPPED:
        return prompts_of(data, domain, "stream", count)
    with lzma.open(data / "train" / f"{domain}.jsonl.xz", "rt", encoding="utf-8") as lines:
        return [json.loads(line)["prompt"] for line in islice(lines, count)]


def answers(
    model: LanguageModel, data: Path, domain: str, split: str, count: int, max_tokens: int, cache: Path
) -> list[ReplayRecord]:
    """Records of the first `count` prompts; those that are not in the cache are answered now."""
    cache.mkdir(parents=True, exist_ok=True)
    file = cache / f"{domain}-{split}-{max_tokens}.safetensors"
    known = load_records(file, domain) if file.exists() else []
    prompts = [asked(model.tokenizer, p) for p in prompts_of(data, domain, split, count)]
    if len(prompts) > len(known):
        known += answered(model, prompts[len(known) :], domain, max_tokens)
        save_records(file, known)
    return known[: len(prompts)]


def answered(
    model: LanguageModel,
    prompts: list[list[int]],
    domain: str,
    max_tokens: int,
    rows: int = 48,
    temperature: float = 0.0,
    topk: int = TOPK,
    number: int = 0,
) -> list[ReplayRecord]:
    """Answers in batches of prompts of like length, in the prompts' order; see `answer_batch`."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    found: dict[int, ReplayRecord] = {}
    for first in range(0, len(order), rows):
        chosen = order[first : first + rows]
        batch = answer_batch(
            model, [prompts[i] for i in chosen], domain, max_tokens, temperature, topk, number
        )
        found |= dict(zip(chosen, batch, strict=True))
    return [found[i] for i in range(len(prompts))]


@torch.inference_mode()
def answer_batch(
    model: LanguageModel,
    prompts: list[list[int]],
    domain: str,
    max_tokens: int,
    temperature: float = 0.0,
    topk: int = TOPK,
    number: int = 0,
) -> list[ReplayRecord]:
    """Greedy answers, or sampled ones, drawn by a seed that is the prompt's own: the same in any batch.

    topk: of the target's probabilities, how many are kept per token. number: of several sampled answers.
    """
    cache, width = model.new_cache(len(prompts)), max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    starts = [len(prompt) - 1 for prompt in prompts]
    model.forward(cache, 0, ids, [0] * len(prompts), keep=1, lengths=[max(start, 1) for start in starts])
    last = torch.tensor([[prompt[-1]] for prompt in prompts])
    tokens, top_ids, top_logprobs = [], [], []
    ended = torch.zeros(len(prompts), dtype=torch.bool)
    chances = [torch.Generator().manual_seed(int(digest_of(prompt)[:15], 16) + number) for prompt in prompts]
    for step in range(max_tokens):
        logits = model.forward(cache, 0, last, [start + step for start in starts])[:, -1].float()
        values, found = logits.log_softmax(-1).topk(topk, dim=-1)
        last = drawn(logits, temperature, chances)
        tokens.append(last)
        top_ids.append(found)
        top_logprobs.append(values)
        ended |= torch.isin(last[:, 0], torch.tensor(sorted(model.eos_token_ids)))
        if ended.all():
            break
    made = torch.cat(tokens, 1).tolist()
    ids_by_row, values_by_row = torch.stack(top_ids, 1).tolist(), torch.stack(top_logprobs, 1).tolist()
    records = []
    for b, prompt in enumerate(prompts):
        answer = until_end(made[b], model.eos_token_ids)
        count = len(answer)
        made_of = ids_by_row[b][:count], values_by_row[b][:count]
        records.append(replace(record(domain, prompt, answer, *made_of), temperature=temperature))
    return records


def digest_of(prompt: Sequence[int]) -> str:
    """Hexadecimal; the same for the same tokens, on every machine."""
    return hashlib.sha256(",".join(map(str, prompt)).encode()).hexdigest()


def drawn(logits: torch.Tensor, temperature: float, chances: list[torch.Generator]) -> torch.Tensor:
    """A token of each row of logits [B, V], int64 [B, 1]: the likeliest, or at a temperature by chance."""
    if not temperature:
        return logits.argmax(-1, keepdim=True)
    probabilities = (logits / temperature).softmax(-1)
    pairs = zip(probabilities, chances, strict=True)
    return torch.stack([torch.multinomial(row, 1, generator=chance) for row, chance in pairs])


def record(
    domain: str, prompt: list[int], answer: list[int], ids: list[list[int]], logprobs: list[list[float]]
) -> ReplayRecord:
    return ReplayRecord(
        domain=domain,
        expert=domain,
        adapter_version=0,
        target_id="target",
        token_ids=[*prompt, *answer],
        num_prompt_tokens=len(prompt),
        topk_ids=ids,
        topk_logprobs=logprobs,
        rejected=[],
        drafted=0,
        accepted=0,
        created_at=0.0,
    )


def save_records(file: Path, records: list[ReplayRecord]) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for i, one in enumerate(records):
        tensors |= {
            f"{i}.prompt": torch.tensor(one.token_ids[: one.num_prompt_tokens]),
            f"{i}.answer": torch.tensor(one.token_ids[one.num_prompt_tokens :]),
            f"{i}.ids": torch.tensor(one.topk_ids),
            f"{i}.logprobs": torch.tensor(one.topk_logprobs),
        }
    scratch = file.with_suffix(".tmp")
    save_file(tensors, scratch)
    scratch.rename(file)


def load_records(file: Path, domain: str) -> list[ReplayRecord]:
    tensors = load_file(file)
    count = len(tensors) // 4
    parts = ("prompt", "answer", "ids", "logprobs")
    return [record(domain, *(tensors[f"{i}.{part}"].tolist() for part in parts)) for i in range(count)]
