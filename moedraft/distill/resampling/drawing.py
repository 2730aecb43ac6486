"""The target answers prompts in batches, sampled, and says how likely its tokens are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from moedraft.cache import SlotCache
from moedraft.loading.checks import until_end
from moedraft.models import LanguageModel

ROWS, TOKENS = 16, 8192  # of one batch at most; its tokens with padding and answers


@dataclass(frozen=True)
class Asked:
    """A prompt, and how it is to be answered."""

    prompt: tuple[int, ...]
    most: int  # tokens of the answer
    temperature: float  # above 0
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
) -> Iterator[tuple[Asked, Resampled]]:
    """Resampled those that leave room for a token, in batches of like length; not in their order.

    chance: of the target's device. on_token: is called after each step of the target, as a heartbeat.
    """
    fit = [one for one in asked if one.prompt and len(one.prompt) < target.max_len]
    for batch in _batches(sorted(fit, key=lambda one: len(one.prompt) + one.most)):
        yield from zip(batch, _answered(target, batch, chance, on_token), strict=True)


def _batches(asked: Sequence[Asked]) -> list[list[Asked]]:
    """In their order: at most ROWS, and TOKENS with padding, unless one alone has more."""
    found: list[list[Asked]] = []
    for one in asked:
        size = len(one.prompt) + one.most  # the longest so far
        if found and len(found[-1]) < ROWS and size * (len(found[-1]) + 1) <= TOKENS:
            found[-1].append(one)
        else:
            found.append([one])
    return found


@torch.inference_mode()
def _answered(
    target: LanguageModel, batch: Sequence[Asked], chance: torch.Generator, on_token: Callable[[], None]
) -> list[Resampled]:
    cache, last = _read(target, [one.prompt for one in batch])
    on_token()
    starts = [len(one.prompt) - 1 for one in batch]  # where each row's newest token stands
    warmth = torch.tensor([[one.temperature] for one in batch], device=target.device)
    ends = torch.tensor(sorted(target.eos_token_ids), device=target.device)
    ended = torch.zeros(len(batch), dtype=torch.bool, device=target.device)
    width = max(one.topk for one in batch)
    steps: list[tuple[torch.Tensor, ...]] = []
    for step in range(min(target.max_len - max(starts) - 1, max(one.most for one in batch))):
        logits = target.forward(cache, 0, last, [start + step for start in starts])[:, -1].float()
        logprobs, likeliest = logits.log_softmax(-1).topk(min(width, logits.shape[-1]))
        last = torch.multinomial((logits / warmth).softmax(-1), 1, generator=chance)
        steps.append((last[:, 0], likeliest, logprobs))
        on_token()
        ended |= torch.isin(last[:, 0], ends)
        if bool(ended.all()):
            break
    told = [torch.stack(part, 1).cpu() for part in zip(*steps, strict=True)]
    return [_cut(one, [part[b] for part in told], target.eos_token_ids) for b, one in enumerate(batch)]


def _read(target: LanguageModel, prompts: Sequence[Sequence[int]]) -> tuple[SlotCache, torch.Tensor]:
    """A cache that holds all but the last token of each prompt, and these last tokens, [B, 1]."""
    cache = target.new_cache(len(prompts))
    ids = torch.zeros(len(prompts), max(map(len, prompts)), dtype=torch.int64)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    # Of a prompt of one token that one is read here, too; it is written again.
    lengths = [max(len(prompt) - 1, 1) for prompt in prompts]
    target.forward(cache, 0, ids.to(target.device), [0] * len(prompts), keep=1, lengths=lengths)
    return cache, torch.tensor([[prompt[-1]] for prompt in prompts], device=target.device)


def _cut(one: Asked, told: Sequence[torch.Tensor], ends: frozenset[int]) -> Resampled:
    """The answer up to its end, as long and with as many likely tokens as was asked for."""
    tokens, ids, logprobs = (part[: one.most] for part in told)
    count = len(until_end(tokens.tolist(), ends))
    ids, logprobs = ids[:count, : one.topk], logprobs[:count, : one.topk]
    # Clones: a view would keep the whole batch alive, and tensors of inference cannot be trained on.
    with torch.inference_mode(False):
        return Resampled(
            tokens[:count].to(torch.int32).clone(), ids.to(torch.int32).clone(), logprobs.clone()
        )
