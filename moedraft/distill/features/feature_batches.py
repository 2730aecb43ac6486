"""Replay records as a feature drafter learns from them.

An entry i of the drafter is made of the target's features at position i and the token at i + 1. At step j of
an unrolled batch, entry i has also read the tokens up to i + j and guesses the token at i + j + 1, so what
teaches it is the target's distribution of that token.

With P tokens before the answer, entries 0 … P−2 are context: they are only read, and no adapter changes their
keys and values. Row r is entry P − 1 + r: at step j it guesses answer token r + j, counted from 0. So an
answer's first token is never guessed; the target gives it when it has read the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from moedraft.core import ReplayRecord
from moedraft.distill.features.record_states import States

MAX_CONTEXT = 256  # tokens of the prompt that the drafter reads in an update, from its end
OUTSIDE = -1  # a token that cannot be drafted


@dataclass(frozen=True)
class FeatureBatch:
    """A padded batch of records, sorted so that those of one expert are side by side.

    Tokens that cannot be drafted are padding in a top-k, see `within`.
    """

    owners: list[str]  # by row, ascending: the expert
    context_ids: torch.Tensor  # int64 [B, C], the tokens at 1 … P − 1, left-padded
    context_states: torch.Tensor  # [B, C, H], the target's features after `fc` at 0 … P − 2
    prompts: torch.Tensor  # int64 [B], P
    answer_ids: torch.Tensor  # int64 [B, A], right-padded with 0
    states: torch.Tensor  # [B, A, H], features after `fc` from P − 1 on: before each answer's token
    lengths: torch.Tensor  # int64 [B], of the answers
    topk_ids: torch.Tensor  # int64 [B, A, k], in the draft vocabulary: the target's distribution of each
    topk_logprobs: torch.Tensor  # float32 [B, A, k]; of the answer's tokens
    temperatures: torch.Tensor  # float32 [B], at which the answers were sampled; 0: greedy
    known: torch.Tensor  # float32 [B, A, k]: `topk_logprobs` as the target gave them, of all its tokens
    known_ids: torch.Tensor  # int64 [B, A, k]: `topk_ids` as the target's ids, OUTSIDE for padding


@dataclass(frozen=True)
class Taught:
    """What the rows of one unrolled step are to guess."""

    rows: torch.Tensor  # bool [B, A]: the rows that are taught, N of them
    counts: list[int]  # of these, how many belong to each row of the batch
    topk_ids: torch.Tensor  # int64 [N, k]
    topk_logprobs: torch.Tensor  # float32 [N, k]
    tokens: torch.Tensor  # int64 [N]: the token that stands where the guess belongs, as the target's id
    temperatures: torch.Tensor  # float [N]: at which the answer was sampled; 0: greedy


class DraftVocabulary:
    """Turns the target's token ids into numbers in the draft vocabulary."""

    def __init__(self, vocabulary: torch.Tensor, vocab_size: int) -> None:
        """vocabulary: int64, ascending."""
        self.numbers = torch.full((vocab_size + 1,), OUTSIDE)  # the last stands for padding, id −1
        self.numbers[vocabulary.cpu()] = torch.arange(len(vocabulary))

    def __len__(self) -> int:
        return int(self.numbers.max()) + 1

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.numbers.to(token_ids.device)[token_ids]


@dataclass(frozen=True)
class _CutRecord:
    """One record, cut to what an update reads of it."""

    record: ReplayRecord
    first: int  # position from which on all is read
    answer: int  # tokens of the answer

    @property
    def prompt(self) -> int:
        return self.record.num_prompt_tokens - self.first

    @property
    def entries(self) -> list[int]:
        """The entries of the context: the newest ones, and the very first, to which attention goes that
        nothing else claims. Where the prompt was cut, that one stands nearer than when a request is answered.
        """
        newest = [*range(self.first, self.record.num_prompt_tokens - 1)]
        return [0, *newest[1:]] if newest else []


def collate(
    records: Sequence[ReplayRecord],
    owners: Sequence[str],
    states: States,
    vocabulary: DraftVocabulary,
    device: torch.device,
    max_tokens: int = 2048,
) -> FeatureBatch:
    """One batch of all `records`; `owners` are their experts.

    Long prompts are cut after their first entry for the drafter, when the target has read them whole, and
    long answers at their end, so that no row has more than `max_tokens`.
    """
    order = sorted(range(len(records)), key=lambda i: owners[i])
    rows = [_cut(records[i], max_tokens) for i in order]
    context, answer = max(1, *(row.prompt - 1 for row in rows)), max(row.answer for row in rows)
    shape = len(rows), answer
    context_ids = torch.zeros(len(rows), context, dtype=torch.int64)
    answer_ids = torch.zeros(shape, dtype=torch.int64)
    before, after = [], []
    for b, (row, found) in enumerate(zip(rows, states.of([row.record for row in rows]), strict=True)):
        record, begin = row.record, row.record.num_prompt_tokens
        context_ids[b, context - row.prompt + 1 :] = torch.tensor(
            [record.token_ids[i + 1] for i in row.entries]
        )
        answer_ids[b, : row.answer] = torch.tensor(record.token_ids[begin : begin + row.answer])
        before.append(pad(found[row.entries], (0, 0, context - row.prompt + 1, 0)))
        after.append(pad(found[begin - 1 : begin - 1 + row.answer], (0, 0, 0, answer - row.answer)))
    ids, known = _likeliest(rows, answer)
    topk_ids, topk_logprobs = within(vocabulary(ids), known)
    return FeatureBatch(
        owners=[owners[i] for i in order],
        context_ids=context_ids.to(device),
        context_states=torch.stack(before).to(device),
        prompts=torch.tensor([row.prompt for row in rows], device=device),
        answer_ids=answer_ids.to(device),
        states=torch.stack(after).to(device),
        lengths=torch.tensor([row.answer for row in rows], device=device),
        topk_ids=topk_ids.to(device),
        topk_logprobs=topk_logprobs.to(device),
        temperatures=torch.tensor([row.record.temperature for row in rows], device=device),
        known=known.to(device),
        known_ids=ids.to(device),
    )


def _likeliest(rows: Sequence[_CutRecord], answer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's top-k ids and log-probabilities, [B, `answer`, k], padded with OUTSIDE and −inf."""
    shape = len(rows), answer, max(len(row.record.topk_ids[0]) for row in rows)
    ids, logprobs = torch.full(shape, OUTSIDE), torch.full(shape, -torch.inf)
    for b, row in enumerate(rows):
        k = len(row.record.topk_ids[0])
        ids[b, : row.answer, :k] = torch.tensor(row.record.topk_ids[: row.answer])
        logprobs[b, : row.answer, :k] = torch.tensor(row.record.topk_logprobs[: row.answer])
    return ids, logprobs


def within(ids: torch.Tensor, logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's top-k probabilities, renormalised as if tokens that cannot be drafted never came.

    ids int64 [..., k], OUTSIDE for such tokens; logprobs [..., k]. If their probability counted as tail,
    the drafter would learn to spread it over all other tokens, which are no better guesses for it.
    """
    outside = ids == OUTSIDE
    lost = logprobs.exp().masked_fill(~outside, 0).sum(-1, keepdim=True)
    kept = logprobs.masked_fill(outside, -torch.inf)
    known = kept.exp().sum(-1, keepdim=True)
    # Where nothing but these is left, rounding may show a little more or less.
    left = torch.where(1 - lost > known + 4 * torch.finfo(lost.dtype).eps, 1 - lost, known)
    return ids, kept - left.clamp(min=torch.finfo(left.dtype).tiny).log()


def _cut(record: ReplayRecord, max_tokens: int) -> _CutRecord:
    first = max(0, record.num_prompt_tokens - min(MAX_CONTEXT, max_tokens // 2))
    room = max_tokens - (record.num_prompt_tokens - first)
    return _CutRecord(record, first, min(len(record.topk_ids), room))


def taught_at(batch: FeatureBatch, step: int) -> Taught:
    """What is to be guessed at unrolled step `step`, 1 or more: for row r, the answer's token r + step."""
    length = batch.answer_ids.shape[1]
    numbers = torch.arange(length, device=batch.lengths.device)[None]
    real = (numbers >= step) & (numbers < batch.lengths[:, None])
    return Taught(
        rows=pad(real[:, step:], (0, min(step, length))),
        counts=real.sum(1).tolist(),
        topk_ids=batch.topk_ids[real],
        topk_logprobs=batch.topk_logprobs[real],
        tokens=batch.answer_ids[real],
        temperatures=batch.temperatures[real.nonzero()[:, 0]],
    )
