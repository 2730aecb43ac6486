"""The target answers prompts in batches, sampled, and says how likely its tokens are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from moedraft.cache import SlotCache
from moedraft.loading.checks import until_end
from moedraft.models import LanguageModel

ROWS = 16  # of one batch, at most
READ = 2048  # prompt tokens of one forward, padding included
COLDEST = 1e-3  # temperature; dividing by less could overflow, and it is greedy anyway


@dataclass(frozen=True)
class Asked:
    """A prompt, and how it is to be answered."""

    prompt: tuple[int, ...]
    most: int  # tokens of the answer
    temperature: float
    topk: int  # how many of the likeliest tokens are told at each place


@dataclass(frozen=True)
class Resampled:
    """What the target said, n tokens, and its likeliest tokens at each place."""

    tokens: torch.Tensor  # int32 [n]
    topk_ids: torch.Tensor  # int32 [n, k]
    topk_logprobs: torch.Tensor  # float32 [n, k], natural log, at temperature 1

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.tokens, self.topk_ids, self.topk_logprobs))


def answers(
    target: LanguageModel,
    asked: Sequence[Asked],
    chance: torch.Generator,
    on_token: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, Resampled]]:
    """Answer those that leave room for a token, in batches of like length: their numbers, and the answers.

    An answer ends where the target's logits are no numbers; it can be empty then. chance: of the target's
    device. on_token: is called after each forward of the target, as a heartbeat.
    """
    fit = [i for i, one in enumerate(asked) if one.prompt and len(one.prompt) < target.max_len]
    fit.sort(key=lambda i: (len(asked[i].prompt), asked[i].most))
    for numbers in _batches(fit, asked):
        batch = [asked[i] for i in numbers]
        yield from zip(numbers, _answered(target, batch, chance, on_token), strict=True)


def _batches(numbers: Sequence[int], asked: Sequence[Asked]) -> list[list[int]]:
    """In their order, at most ROWS, and READ tokens of prompts with padding, unless one alone has more."""
    found: list[list[int]] = []
    for i in numbers:
        size = len(asked[i].prompt)  # the longest so far
        if found and len(found[-1]) < ROWS and size * (len(found[-1]) + 1) <= READ:
            found[-1].append(i)
        else:
            found.append([i])
    return found


@torch.inference_mode()
def _answered(
    target: LanguageModel, batch: Sequence[Asked], chance: torch.Generator, on_token: Callable[[], None]
) -> list[Resampled]:
    cache, last = _read(target, [one.prompt for one in batch], on_token)
    device, starts = target.device, [len(one.prompt) - 1 for one in batch]  # of each row's newest token
    rooms = [min(one.most, target.max_len - len(one.prompt)) for one in batch]
    warmth = torch.tensor([[max(one.temperature, COLDEST)] for one in batch], device=device)
    ends, room = torch.tensor(sorted(target.eos_token_ids), device=device), torch.tensor(rooms, device=device)
    lengths = room.clone()  # of each answer, as far as is known
    width = max(one.topk for one in batch)
    steps: list[tuple[torch.Tensor, ...]] = []
    while bool((lengths > len(steps)).any()):
        at = [start + len(steps) for start in starts]
        logits = target.forward(cache, 0, last, at)[:, -1].float()
        on_token()
        chances = (logits / warmth).softmax(-1)
        broken = ~chances.isfinite().all(-1)
        last = torch.multinomial(chances.masked_fill(broken[:, None], 1.0), 1, generator=chance)
        lengths = torch.where(broken, lengths.clamp(max=len(steps)), lengths)
        logprobs, likeliest = logits.log_softmax(-1).topk(min(width, logits.shape[-1]))
        steps.append((last[:, 0], likeliest, logprobs))
        lengths = torch.where(torch.isin(last[:, 0], ends), lengths.clamp(max=len(steps)), lengths)
    told = [torch.stack(part, 1).cpu() for part in zip(*steps, strict=True)]
    counts: list[int] = lengths.tolist()
    return [
        _cut(one, [part[b, : counts[b]] for part in told], target.eos_token_ids)
        for b, one in enumerate(batch)
    ]


def _read(
    target: LanguageModel, prompts: Sequence[Sequence[int]], on_token: Callable[[], None]
) -> tuple[SlotCache, torch.Tensor]:
    """A cache that holds all but the last token of each prompt, and these last tokens, [B, 1]."""
    cache = target.new_cache(len(prompts))
    # Of a prompt of one token that one is read here, too; it is written again.
    lengths = [max(len(prompt) - 1, 1) for prompt in prompts]
    ids = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
    for row, prompt, length in zip(ids, prompts, lengths, strict=True):
        row[:length] = torch.tensor(prompt[:length])
    width = ids.shape[1] if len(prompts) > 1 else READ  # one that is longer is read in parts
    for first in range(0, ids.shape[1], width):
        part = ids[:, first : first + width].to(target.device)
        each = [min(length - first, part.shape[1]) for length in lengths]
        target.forward(cache, 0, part, [first] * len(prompts), keep=1, lengths=each)
        on_token()
    return cache, torch.tensor([[prompt[-1]] for prompt in prompts], device=target.device)


def _cut(one: Asked, told: Sequence[torch.Tensor], ends: frozenset[int]) -> Resampled:
    """The answer up to its end, with as many likely tokens as was asked for."""
    tokens, ids, logprobs = told
    count = len(until_end(tokens.tolist(), ends))
    ids, logprobs = ids[:count, : one.topk], logprobs[:count, : one.topk]
    # Clones: a view would keep the whole batch alive, and tensors of inference cannot be trained on.
    with torch.inference_mode(False):
        return Resampled(tokens[:count].int().clone(), ids.int().clone(), logprobs.clone())
