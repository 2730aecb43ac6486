"""Replay records as padded batches, each answer token paired with the target's distribution for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moedraft.core import ReplayRecord
from moedraft.kernels import Kind

MAX_CONTEXT = 256  # tokens of the prompt that an update reads, from its end
LEAST_TAIL = 1e-4  # probability that reverse KL leaves at least to the tokens outside the target's top-k


@dataclass(frozen=True)
class RecordBatch:
    """Padded records. Where `mask` is true, the draft's logits are compared with the target's top-k."""

    token_ids: torch.Tensor  # int64 [B, L], right-padded with 0
    keep: int  # logits are needed for the last `keep` positions only
    mask: torch.Tensor  # bool [B, keep], where an answer token was predicted
    topk_ids: torch.Tensor  # int64 [N, k], N = mask.sum(), row-major
    topk_logprobs: torch.Tensor  # float32 [N, k]
    temperatures: torch.Tensor  # float32 [N], at which the answers were sampled; 0: greedy
    known: torch.Tensor  # float32 [N, k]: `topk_logprobs` with those of tokens that the draft lacks


def taught_by(logprobs: torch.Tensor, kind: Kind) -> torch.Tensor:
    """The target's top-k log-probabilities [..., k] as the divergence `kind` can be trained on them.

    Where the target is sure, its stored tokens have all of its probability, and reverse KL is infinite as
    soon as the draft gives another token any. So `LEAST_TAIL` at least is left to the others.
    """
    if kind != "rkl":
        return logprobs
    total = logprobs.exp().sum(-1, keepdim=True)
    return logprobs - (total / (1 - LEAST_TAIL)).clamp(min=1).log()


def length_of(record: ReplayRecord, max_tokens: int) -> int:
    """How many tokens of `record` go into a batch whose rows have at most `max_tokens`."""
    context = min(record.num_prompt_tokens, MAX_CONTEXT)
    return min(context + len(record.topk_ids), max_tokens)


def grouped(records: Sequence[ReplayRecord], max_tokens: int) -> list[list[ReplayRecord]]:
    """The records in their order, in groups of at most `max_tokens` tokens, padding included."""
    groups: list[list[ReplayRecord]] = []
    longest = 0
    for record in records:
        longest = max(longest, length_of(record, max_tokens))
        if groups and longest * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(record)
        else:
            groups.append([record])
            longest = length_of(record, max_tokens)
    return groups


def shuffled_groups(
    records: Sequence[ReplayRecord], count: int, max_tokens: int, seed: int
) -> list[list[ReplayRecord]]:
    """Make `count` groups as `grouped` does, from all records in a new random order on each pass."""
    generator = torch.Generator().manual_seed(seed)
    groups: list[list[ReplayRecord]] = []
    while len(groups) < count:
        order = torch.randperm(len(records), generator=generator).tolist()
        groups += grouped([records[index] for index in order], max_tokens)
    return groups[:count]


def collate(
    records: list[ReplayRecord], device: torch.device, max_tokens: int | None = None, vocab: int | None = None
) -> RecordBatch:
    """One batch of all `records`. An answer token is predicted by the logits one position before it.

    Long prompts are cut after their first token, to MAX_CONTEXT tokens, and long answers at their end, so
    that no row has more than `max_tokens`. The first token, where attention goes that nothing else claims,
    stands before the newest ones, at whatever distance, as it does when a draft answers. A draft with a
    vocabulary of `vocab` tokens lacks the tokens above it: they are read as token 0, and as padding in a
    top-k, where their probability counts as the tail's.
    """
    context = MAX_CONTEXT if max_tokens is None else min(MAX_CONTEXT, max_tokens // 2)
    rows, starts, counts = [], [], []
    for record in records:
        first = max(0, record.num_prompt_tokens - context)
        last = None if max_tokens is None else first + max_tokens
        row = record.token_ids[first:last]
        if record.num_prompt_tokens - first > 1:
            row[0] = record.token_ids[0]
        rows.append(row)
        starts.append(record.num_prompt_tokens - first - 1)
        counts.append(len(rows[-1]) - starts[-1] - 1)
    keep = max(map(len, rows)) - min(starts)
    ids, mask = _padded(rows, starts, counts, vocab)
    topk_ids, known = _teacher(records, counts)
    topk_logprobs = known if vocab is None else known.masked_fill(topk_ids >= vocab, -torch.inf)
    topk_ids = topk_ids if vocab is None else topk_ids.masked_fill(topk_ids >= vocab, -1)
    return RecordBatch(
        token_ids=ids.to(device),
        keep=keep,
        mask=mask[:, -keep:].to(device),
        topk_ids=topk_ids.to(device),
        topk_logprobs=topk_logprobs.to(device),
        temperatures=torch.tensor(
            [record.temperature for record, count in zip(records, counts, strict=True) for _ in range(count)],
            device=device,
        ),
        known=known.to(device),
    )


def _padded(
    rows: list[list[int]], starts: list[int], counts: list[int], vocab: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The token ids [B, L], and a mask [B, L] of the positions whose logits predict an answer token."""
    length = max(map(len, rows))
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    mask = torch.zeros(len(rows), length, dtype=torch.bool)
    for b, (row, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
        ids[b, : len(row)] = torch.tensor(row)
        mask[b, start : start + count] = True
    if vocab is not None:
        ids.masked_fill_(ids >= vocab, 0)
    return ids, mask


def _teacher(records: list[ReplayRecord], counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's top-k ids and log-probabilities [N, k] at all answer tokens, record after record."""
    width = max(len(record.topk_ids[0]) for record in records)
    chosen = [
        (pad_to(top, width, -1), pad_to(logprobs, width, -torch.inf))
        for record, count in zip(records, counts, strict=True)
        for top, logprobs in zip(record.topk_ids[:count], record.topk_logprobs[:count], strict=True)
    ]
    return torch.tensor([top for top, _ in chosen]), torch.tensor([logprobs for _, logprobs in chosen])


def pad_to(values: list[Any], width: int, fill: float) -> list[Any]:
    return [*values, *[fill] * (width - len(values))]
