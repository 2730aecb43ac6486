"""Training as the drafter will be used: its first guess from the target's features, later ones from its own.

The "training-time test" of EAGLE-3 (arXiv 2503.01840, section 3.2): at every position at once, step by step,
each query sees the true entries up to its own position and the entries that it made itself since.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from moedraft.feature.features import Teacher
from moedraft.feature.model import FeatureDraft
from moedraft.kernels import Kind, linear_divergence


@dataclass(frozen=True)
class Batch:
    """Texts that the target has read. Padded on the right; `lengths` counts the real tokens."""

    token_ids: torch.Tensor  # int64 [B, L]
    lengths: torch.Tensor  # int64 [B]
    features: torch.Tensor  # [B, L, n·H]
    states: torch.Tensor  # [B, L, H], the target's last, normed

    @classmethod
    def read(cls, teacher: Teacher, texts: list[list[int]]) -> Batch:
        """Have the target read the texts."""
        device = teacher.hf.device
        lengths = torch.tensor([len(text) for text in texts], device=device)
        ids = torch.zeros(len(texts), int(lengths.max()), dtype=torch.int64)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = torch.tensor(text)
        ids = ids.to(device)
        return cls(ids, lengths, *teacher.read(ids))


def unroll(
    draft: FeatureDraft, features: torch.Tensor, token_ids: torch.Tensor, steps: int
) -> Iterator[torch.Tensor]:
    """The drafter's outputs [B, L, H] of steps 1 … `steps`; `draft.logits` turns them into guesses.

    features [B, L, n·H], token_ids int64 [B, L]. At step j row i guesses the token at i + j + 1; it has read
    the features up to i and the tokens up to i + j. Rows whose tokens would lie past the end mean nothing.
    """
    length = token_ids.shape[1]
    tokens = pad(token_ids, (0, steps))
    states = draft.fuse(features)
    positions = torch.arange(length, device=token_ids.device)[None]
    entries: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys and values of each step
    for step in range(1, steps + 1):
        embeds = draft.embed(tokens[:, step : step + length], states)
        queries, keys, values = draft.layer.project(embeds, states, positions + step - 1)
        groups = queries.shape[1] // keys.shape[1]
        entries.append((keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)))
        states = draft.fed_back(draft.layer.finish(states, attend(queries, entries)))
        yield states


def attend(
    queries: torch.Tensor,
    entries: list[tuple[torch.Tensor, torch.Tensor]],
    seen: torch.Tensor | None = None,
) -> torch.Tensor:
    """queries [B, heads, L, d]; entries: keys and values of each step, shaped alike; → as the queries.

    A query sees the first step's entries up to its own row, and of each later step that of its row alone.
    seen: bool [B, 1, L, K], which of the first step's K entries a query sees, where these are others.
    """
    keys, values = entries[0]
    if len(entries) == 1:
        return scaled_dot_product_attention(queries, keys, values, seen, is_causal=seen is None)
    length, scale = keys.shape[2], queries.shape[3] ** -0.5
    if seen is None:
        seen = torch.ones(length, length, dtype=torch.bool, device=queries.device).tril()
    scores = (queries @ keys.transpose(2, 3)).masked_fill(~seen, -torch.inf)
    own = [(queries * own_keys).sum(-1, keepdim=True) for own_keys, _ in entries[1:]]
    weights = (torch.cat([scores, *own], dim=-1) * scale).softmax(-1)
    mixed: torch.Tensor = weights[..., :length] @ values
    for i, (_, own_values) in enumerate(entries[1:]):
        mixed = mixed + weights[..., length + i, None] * own_values
    return mixed


def loss_of(
    draft: FeatureDraft,
    teacher: Teacher,
    batch: Batch,
    steps: int,
    decay: float = 0.8,
    skip: int = 0,
    kind: Kind = "fkl",
) -> torch.Tensor:
    """The divergence of the guesses from the target's distribution, over the draft vocabulary, scalar.

    Every position counts, prompts included, but for the first `skip`; step j weighs `decay` ** (j − 1).
    The guesses' logits exist for a few rows at a time.
    """
    rows = draft.lm_head.weight
    length = batch.token_ids.shape[1]
    where = torch.arange(length, device=batch.lengths.device)[None]
    losses, weight = [], 1.0
    for step, hidden in enumerate(unroll(draft, batch.features, batch.token_ids, steps), start=1):
        # The states at i + j hold the target's distribution of the token at i + j + 1, which row i guesses.
        counts = (where + step < batch.lengths[:, None]) & (where + step >= skip)
        counts = counts[:, : length - step]
        normed = draft.normed(hidden[:, : length - step][counts])
        if not torch.is_autocast_enabled(normed.device.type):
            normed = normed.to(rows.dtype)
        truth = teacher.logits(batch.states[:, step:][counts])
        losses.append(weight * linear_divergence(normed, rows, teacher_logits=truth, kind=kind))
        weight *= decay
    return torch.stack(losses).sum()


@torch.no_grad()
def acceptance(draft: FeatureDraft, batch: Batch, prompts: list[int], depth: int) -> torch.Tensor:
    """How often the most likely guess is the next token, int64 [depth, 2]: hits and tries.

    Row j counts starts whose earlier guesses were all right. prompts: tokens of each text before the answer;
    the answers should be the target's own greedy ones. A start has one answer token that is not guessed.
    """
    counted = torch.zeros(depth, 2, dtype=torch.int64)
    length = batch.token_ids.shape[1]
    where = torch.arange(length, device=batch.lengths.device)[None]
    begins = torch.tensor(prompts, device=batch.lengths.device)[:, None] - 1
    alive = (where >= begins).clone()
    following = pad(batch.token_ids, (0, depth + 1), value=-1)
    for step, hidden in enumerate(unroll(draft, batch.features, batch.token_ids, depth), start=1):
        tried = alive & (where + step + 1 < batch.lengths[:, None])
        guesses = draft.vocabulary[draft.logits(hidden).argmax(-1)]
        alive = tried & (guesses == following[:, step + 1 : step + 1 + length])
        counted[step - 1] = torch.tensor([int(alive.sum()), int(tried.sum())])
    return counted
