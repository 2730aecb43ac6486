"""Attention on a CPU whose sums for a token depend on nothing that is computed together with it.

PyTorch's attention multiplies by whatever product suits the number of queries and positions. For a token's
own result, compared to the last bit, these numbers matter in three ways, which are avoided here:

- products of fewer than four queries are summed in another way than those of more;
- these numbers decide how each thread's buffers are aligned in memory, and the order of sums follows that;
- long sums are taken in parts, whose sizes depend on how many positions there are.

`cpu/steady/independence.py` measures whether anything is left of this on the CPU at hand.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

BLOCK = 32  # attention reads a multiple of so many positions
SUMMED = 192  # positions that a product sums at once; up to twice as many are summed in two halves
TAKEN = 512  # positions that PyTorch's attention takes at a time
QUERIES = 4  # attention is computed for a multiple of so many queries


def positions_read(length: int) -> int:
    """How many positions attention reads so that each token sees at least `length`.

    A sum over more than `SUMMED` positions, within each `TAKEN`, is taken in parts: in two halves below twice
    as many, in parts of `SUMMED` from there on. The halves would make a sum depend on how much is read, so
    these numbers of positions are left out.
    """
    blocks = length + -length % BLOCK
    rest = blocks % TAKEN
    return blocks - rest + 2 * SUMMED if SUMMED < rest < 2 * SUMMED else blocks


def bias_of(tokens: torch.Tensor, group: int, apart: bool) -> torch.Tensor:
    """What is added to the scores of each token, [B, T, read], for each query as `attend` takes it.

    group: queries of a token that share a key. Queries that only make up a multiple of `QUERIES`, of each row
    or, with `apart`, of each token, are not masked. The result is [B, 1, queries, read].
    """
    batch, width, read = tokens.shape
    bias = tokens.repeat_interleave(group, dim=1).view(batch, width if apart else 1, -1, read)
    return pad(bias, (0, 0, 0, -bias.shape[2] % QUERIES)).flatten(1, 2)[:, None]


def places_of(width: int, group: int, apart: bool) -> tuple[int, int]:
    """How far the queries of two neighbouring tokens lie apart in a row, and how many places a row has.

    width: tokens of a row. group: queries of a token that share a key.
    """
    if apart:
        each = group + -group % QUERIES
        return each, width * each
    return group, width * group + -(width * group) % QUERIES


def laid_out(queries: torch.Tensor, apart: bool) -> torch.Tensor:
    """Queries [B, kv_heads, T, group, d] as `attend` takes them, [B, kv_heads, places, d]."""
    batch, heads, width, _, size = queries.shape
    asked = queries.reshape(batch, heads, width if apart else 1, -1, size)
    return pad(asked, (0, 0, 0, -asked.shape[3] % QUERIES)).flatten(2, 3)


def taken_back(mixed: torch.Tensor, width: int, group: int, apart: bool) -> torch.Tensor:
    """The inverse of `laid_out`, for what `attend` gave."""
    batch, heads, _, size = mixed.shape
    rows = mixed.reshape(batch, heads, width if apart else 1, -1, size)
    own = rows[:, :, :, : group if apart else width * group]
    return own.reshape(batch, heads, width, group, size)


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor, singly: int = 1
) -> torch.Tensor:
    """Attention of queries [B, kv_heads, places, d], whose shape the result has.

    keys and values: [B, kv_heads, read, d]. bias: that of `bias_of`, [B, 1, places, read]. singly: 1, or the
    tokens of a row where each of them gets a product of its own.
    """
    if singly == 1:
        return scaled_dot_product_attention(queries, keys, values, bias)
    batch, heads, _, size = queries.shape
    masks = bias.view(batch, 1, singly, -1, bias.shape[-1])
    asked = queries.view(batch, heads, singly, -1, size)
    if batch >= singly:
        each = [
            scaled_dot_product_attention(asked[:, :, t], keys, values, masks[:, :, t]) for t in range(singly)
        ]
        return torch.stack(each, dim=2).flatten(2, 3)
    rows = []
    for b in range(batch):
        read = keys[b].expand(singly, -1, -1, -1), values[b].expand(singly, -1, -1, -1)
        one = scaled_dot_product_attention(asked[b].transpose(0, 1), *read, masks[b].transpose(0, 1))
        rows.append(one.transpose(0, 1))
    return torch.stack(rows).flatten(2, 3)
