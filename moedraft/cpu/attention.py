"""Attention on a CPU whose sums for a token depend on nothing that is computed together with it.

PyTorch's attention multiplies by whatever product suits the number of queries and positions. For a token's
own result, compared to the last bit, these numbers matter in three ways, which are avoided here:

- products of fewer than four queries are summed in another way than those of more;
- these numbers decide how each thread's buffers are aligned in memory, and the order of sums follows that;
- long sums are taken in parts, whose sizes depend on how many positions there are.

`cpu/independence.py` measures whether anything is left of this on the CPU at hand.
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


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor, singly: int = 1
) -> torch.Tensor:
    """Attention of queries [B, kv_heads, n, d], whose shape the result has.

    keys and values: [B, kv_heads, read, d]. bias: that of `bias_of`, [B, 1, queries, read]. singly: 1, or the
    tokens of a row where each of them gets a product of its own.
    """
    batch, heads, count, size = queries.shape
    masks = bias.view(batch, 1, singly, -1, bias.shape[-1])
    asked = queries.view(batch, heads, singly, -1, size)
    padded = pad(asked, (0, 0, 0, masks.shape[3] - asked.shape[3]))
    if batch >= singly:
        each = [
            scaled_dot_product_attention(padded[:, :, t], keys, values, masks[:, :, t]) for t in range(singly)
        ]
        mixed = each[0][:, :, None] if singly == 1 else torch.stack(each, dim=2)
    else:
        rows = []
        for b in range(batch):
            read = keys[b].expand(singly, -1, -1, -1), values[b].expand(singly, -1, -1, -1)
            one = scaled_dot_product_attention(padded[b].transpose(0, 1), *read, masks[b].transpose(0, 1))
            rows.append(one.transpose(0, 1))
        mixed = torch.stack(rows)
    return mixed[:, :, :, : asked.shape[3]].reshape(batch, heads, count, size)
