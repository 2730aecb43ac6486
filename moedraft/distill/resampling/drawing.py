"""The target answers prompts in batches, sampled, and says how likely its tokens are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from moedraft.evidence import HiddenStates
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


# The number of what was asked, its answer, and the inputs of the target's layers at each position of prompt
# and answer but the last, [P + n − 1, layers · H].
Told = tuple[int, Resampled, torch.Tensor]


def answers(
    target: LanguageModel,
    asked: Sequence[Asked],
    chance: torch.Generator,
    on_token: Callable[[], None] = lambda: None,
    layers: tuple[int, ...] = (),
) -> Iterator[Told]:
    """Answer those that leave room for a token, in batches of like length.

    An answer ends where the target's logits are no numbers; it can be empty then. chance: of the target's
    device. on_token: is called after each forward of the target, as a heartbeat. layers: whose inputs are
    told, all below the target's number of layers.
    """
    fit = [i for i, one in enumerate(asked) if one.prompt and len(one.prompt) < target.max_len]
    fit.sort(key=lambda i: (len(asked[i].prompt), asked[i].most))
    for numbers in _batches(fit, asked):
        batch = _Answering(target, [asked[i] for i in numbers], on_token, layers)
        for number, (answer, read) in zip(numbers, batch.answers(chance), strict=True):
            yield number, answer, read


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


class _Answering:
    """Prompts that are answered together."""

    def __init__(
        self,
        target: LanguageModel,
        asked: Sequence[Asked],
        on_token: Callable[[], None],
        layers: tuple[int, ...],
    ) -> None:
        self.target, self.asked, self.on_token, self.layers = target, asked, on_token, layers
        self.cache = target.new_cache(len(asked))
        self.read: list[torch.Tensor] = []  # inputs of the layers, [B, T, layers · H], forward by forward

    @torch.inference_mode()
    def answers(self, chance: torch.Generator) -> list[tuple[Resampled, torch.Tensor]]:
        """Answers in the order of the prompts, with the inputs of the layers."""
        asked, target, device = self.asked, self.target, self.target.device
        self._read_prompts()
        width, room = max(one.topk for one in asked), target.max_len
        warmth = torch.tensor([[max(one.temperature, COLDEST)] for one in asked], device=device)
        ends = torch.tensor(sorted(target.eos_token_ids), device=device)
        # Of each answer, as far as is known.
        lengths = torch.tensor([min(one.most, room - len(one.prompt)) for one in asked], device=device)
        last = torch.tensor([[one.prompt[-1]] for one in asked], device=device)
        steps: list[tuple[torch.Tensor, ...]] = []
        while bool((lengths > len(steps)).any()):
            at = [len(one.prompt) - 1 + len(steps) for one in asked]
            logits = self._forward(last, at, [1] * len(asked))[:, -1].float()
            chances = (logits / warmth).softmax(-1)
            broken = ~chances.isfinite().all(-1)
            last = torch.multinomial(chances.masked_fill(broken[:, None], 1.0), 1, generator=chance)
            lengths = torch.where(broken, lengths.clamp(max=len(steps)), lengths)
            logprobs, likeliest = logits.log_softmax(-1).topk(min(width, logits.shape[-1]))
            steps.append((last[:, 0], likeliest, logprobs))
            lengths = torch.where(torch.isin(last[:, 0], ends), lengths.clamp(max=len(steps)), lengths)
        told = [torch.stack(part, 1).cpu() for part in zip(*steps, strict=True)]
        counts: list[int] = lengths.tolist()
        return [self._told(b, [part[b, : counts[b]] for part in told]) for b in range(len(asked))]

    def _read_prompts(self) -> None:
        """Read all but the last token of each prompt."""
        # Of a prompt of one token that one is read here, too; it is written again.
        lengths = [max(len(one.prompt) - 1, 1) for one in self.asked]
        ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
        for row, one, length in zip(ids, self.asked, lengths, strict=True):
            row[:length] = torch.tensor(one.prompt[:length])
        width = ids.shape[1] if len(lengths) > 1 else READ  # one that is longer is read in parts
        for first in range(0, ids.shape[1], width):
            part = ids[:, first : first + width].to(self.target.device)
            each = [min(length - first, part.shape[1]) for length in lengths]
            self._forward(part, [first] * len(lengths), each)
        self.prompts = sum(read.shape[1] for read in self.read)  # positions of `read` before the answers'

    def _forward(self, ids: torch.Tensor, starts: list[int], lengths: list[int]) -> torch.Tensor:
        hidden = HiddenStates(self.layers) if self.layers else None
        logits = self.target.forward(self.cache, 0, ids, starts, keep=1, lengths=lengths, hidden=hidden)
        if hidden is not None:
            self.read.append(torch.cat([hidden.states[layer] for layer in self.layers], dim=-1))
        self.on_token()
        return logits

    def _told(self, row: int, told: Sequence[torch.Tensor]) -> tuple[Resampled, torch.Tensor]:
        """An answer with as many likely tokens as was asked for, and the inputs of the layers."""
        one, (tokens, ids, logprobs) = self.asked[row], told
        states = torch.empty(0)
        if self.layers:
            own = [read[row] for read in self.read]
            before = torch.cat(own)[: self.prompts][: len(one.prompt) - 1]
            states = torch.cat([before, torch.cat(own)[self.prompts :][: len(tokens)]])
        # Clones: a view would keep the whole batch alive, and tensors of inference cannot be trained on.
        with torch.inference_mode(False):
            ids, logprobs = ids[:, : one.topk].int(), logprobs[:, : one.topk]
            return Resampled(tokens.int().clone(), ids.clone(), logprobs.clone()), states.clone()
