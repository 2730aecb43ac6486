"""Replay records as padded batches, with the target's distribution at the right positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moedraft.core import ReplayRecord

MAX_CONTEXT = 256  # tokens of the prompt that an update reads, from its end


@dataclass(frozen=True)
class Batch:
    """Padded records. The draft's logits at `position` are supervised by the target's top-k there."""

    token_ids: torch.Tensor  # int64 [B, L], right-padded with 0
    keep: int  # logits are needed for the last `keep` positions only
    mask: torch.Tensor  # bool [B, keep], where an answer token was predicted
    topk_ids: torch.Tensor  # int64 [N, k], N = mask.sum(), row-major
    topk_logprobs: torch.Tensor  # float32 [N, k]


def collate(
    records: list[ReplayRecord], device: torch.device, max_tokens: int | None = None, vocab: int | None = None
) -> Batch:
    """Records → one batch. Answer token i is predicted by the logits one position before it.

    `max_tokens` cuts long answers from their end, so that a row never exceeds it. Tokens the draft does not
    have (`vocab` and above) are read as 0; in a top-k they become padding, and their mass goes to the tail.
    """
    context = MAX_CONTEXT if max_tokens is None else min(MAX_CONTEXT, max_tokens // 2)
    rows, starts, counts = [], [], []
    for record in records:
        first = max(0, record.num_prompt_tokens - context)
        last = None if max_tokens is None else first + max_tokens
        rows.append(record.token_ids[first:last])
        starts.append(record.num_prompt_tokens - first - 1)
        counts.append(len(rows[-1]) - starts[-1] - 1)
    length, width = max(map(len, rows)), max(len(r.topk_ids[0]) for r in records)
    keep = length - min(starts)
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    mask = torch.zeros(len(rows), length, dtype=torch.bool)
    for b, (row, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
        ids[b, : len(row)] = torch.tensor(row)
        if vocab is not None:
            ids[b].masked_fill_(ids[b] >= vocab, 0)
        mask[b, start : start + count] = True
    chosen = [
        (pad_to(top, width, -1), pad_to(logprobs, width, -torch.inf))
        for record, count in zip(records, counts, strict=True)
        for top, logprobs in zip(record.topk_ids[:count], record.topk_logprobs[:count], strict=True)
    ]
    topk_ids = torch.tensor([top for top, _ in chosen])
    topk_logprobs = torch.tensor([logprobs for _, logprobs in chosen])
    if vocab is not None:
        topk_logprobs.masked_fill_(topk_ids >= vocab, -torch.inf)
        topk_ids.masked_fill_(topk_ids >= vocab, -1)
    return Batch(
        token_ids=ids.to(device),
        keep=keep,
        mask=mask[:, -keep:].to(device),
        topk_ids=topk_ids.to(device),
        topk_logprobs=topk_logprobs.to(device),
    )


def pad_to(values: list[Any], width: int, fill: float) -> list[Any]:
    return [*values, *[fill] * (width - len(values))]
