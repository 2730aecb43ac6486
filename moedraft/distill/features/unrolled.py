"""The unrolled steps of a feature drafter over the answers of replay records.

`moedraft.feature.unroll` does the same over whole texts and is the reference; here only answers are taught.
Of a prompt only the keys and values are needed, which no adapter changes: they are computed without a
gradient, and the rest of the layer runs over the answers alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import pad

from moedraft.distill.features.feature_batches import FeatureBatch
from moedraft.feature.model import FeatureDraft
from moedraft.feature.unroll import attend


def unroll(draft: FeatureDraft, batch: FeatureBatch, steps: int) -> Iterator[torch.Tensor]:
    """The drafter's outputs [B, A, H] of steps 1 … `steps`; `draft.logits` turns them into guesses."""
    rows = batch.answer_ids.shape[1]
    tokens = pad(batch.answer_ids, (0, steps))
    states = batch.states.to(draft.fc.weight.dtype)
    positions = batch.prompts[:, None] - 1 + torch.arange(rows, device=states.device)
    entries: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys and values of each step
    keys, values = context(draft, batch)
    for step in range(1, steps + 1):
        embeds = draft.embed(tokens[:, step - 1 : step - 1 + rows], states)
        queries, own_keys, own_values = draft.layer.project(embeds, states, positions + step - 1)
        if step == 1:
            own_keys, own_values = torch.cat([keys, own_keys], dim=2), torch.cat([values, own_values], dim=2)
        groups = queries.shape[1] // own_keys.shape[1]
        entries.append((own_keys.repeat_interleave(groups, 1), own_values.repeat_interleave(groups, 1)))
        states = draft.fed_back(draft.layer.finish(states, attend(queries, entries, seen(batch))))
        yield states


@torch.no_grad()
def context(draft: FeatureDraft, batch: FeatureBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [B, heads, C, head_dim] of the prompts' entries."""
    length = batch.context_ids.shape[1]
    states = batch.context_states.to(draft.fc.weight.dtype)
    numbers = torch.arange(length, device=states.device)
    positions = (batch.prompts[:, None] - 1 - length + numbers).clamp(min=0)
    _, keys, values = draft.layer.project(draft.embed(batch.context_ids, states), states, positions)
    return keys, values


def seen(batch: FeatureBatch) -> torch.Tensor:
    """Which entries of step 1 each row sees, bool [B, 1, A, C + A]: its prompt, and the rows up to itself."""
    length, rows = batch.context_ids.shape[1], batch.answer_ids.shape[1]
    numbers = torch.arange(length, device=batch.prompts.device)
    real = numbers >= length - (batch.prompts[:, None] - 1)  # [B, C]
    before = real[:, None].expand(-1, rows, -1)
    own = torch.ones(rows, rows, dtype=torch.bool, device=real.device).tril()
    return torch.cat([before, own.expand(len(real), -1, -1)], dim=2)[:, None]
