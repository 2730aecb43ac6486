"""Whether a model gives each token the same logits whatever is computed together with it.

Two looks at it. `independent` compares the logits of a few tokens, so it sees whatever the model does, but an
order of summing that changes one rounding in a million passes it. `sums_alike` looks at the sums alone, on
numbers that cancel each other: what is left is nothing but their roundings, so any other order shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn

from moedraft.cache import SlotCache
from moedraft.cpu import attention, steady
from moedraft.evidence import Beside

ROWS = (1, 2, 3, 5, 8, 11, 16, 24, 40, 128, 150)  # that are multiplied together
SEEN = (20, 64, 100, 160, 200, 300, 500, 700)  # positions that a token sees
MORE = (0, 40, 150, 400)  # positions that another row in the batch sees beyond these
BATCHES = ((1, 1), (1, 5), (6, 1), (3, 3), (1, 40), (1, 270))  # rows, tokens


class SlotModel(Protocol):
    """What `independent` needs of a `LanguageModel`."""

    vocab_size: int

    def new_cache(self, slots: int) -> SlotCache: ...

    def forward(
        self,
        cache: SlotCache,
        first: int,
        token_ids: torch.Tensor,
        starts: list[int],
        *,
        beside: Beside | None = None,
    ) -> torch.Tensor: ...


@torch.inference_mode()
def independent(model: SlotModel) -> bool:
    """Whether logits are the same to the last bit, however many tokens and rows are computed together."""
    ids = torch.randint(model.vocab_size, (6, 45), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache(6)
    for row in range(6):  # each by itself
        model.forward(cache, row, ids[row : row + 1, :30], [0])
    singly = [model.forward(cache, 2, ids[2:3, at : at + 1], [at])[0, 0] for at in range(30, 45)]
    for rows, width in ((1, 5), (6, 5), (6, 15)):
        first = 2 if rows == 1 else 0
        logits = model.forward(cache, first, ids[first : first + rows, 30 : 30 + width], [30] * rows)
        if not all(torch.equal(logits[2 - first, at], singly[at]) for at in range(width)):
            return False
    whole = model.new_cache(6)
    together = model.forward(whole, 0, ids, [0] * 6)
    if not all(torch.equal(together[2, 30 + at], singly[at]) for at in range(15)):
        return False
    # The prompt of row 2 is read beside row 1, which is decoded, and then the other way round.
    model.forward(whole, 1, ids[1:2, :30], [0])
    prompt = Beside(2, ids[2:3, :30], [0], [30])
    model.forward(whole, 1, ids[1:2, 30:33], [30], beside=prompt)
    other = Beside(1, ids[1:2, 33:45], [33], [12])
    mixed = model.forward(whole, 2, ids[2:3, 30:35], [30], beside=other)
    return all(torch.equal(mixed[0, at], singly[at]) for at in range(5))


@torch.inference_mode()
def sums_alike(config: Any, dtype: torch.dtype, arranged: steady.Arrangement) -> bool:
    """Whether the products and the attention of such a model sum in one order, whatever goes with a token."""
    random = torch.Generator().manual_seed(0)
    return all(_products_alike(*shape, dtype, arranged, random) for shape in _shapes(config)) and all(
        _attention_alike(config, dtype, arranged, seen, random) for seen in SEEN
    )


def _head_size(config: Any) -> int:
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(size)


def _shapes(config: Any) -> Iterator[tuple[int, int]]:
    """(outputs, inputs) of the products of a layer."""
    queries = config.num_attention_heads * _head_size(config)
    keys = config.num_key_value_heads * _head_size(config)
    yield queries + 2 * keys, config.hidden_size
    yield config.hidden_size, queries
    yield 2 * config.intermediate_size, config.hidden_size
    yield config.hidden_size, config.intermediate_size


def _cancelling(x: torch.Tensor, sign: int) -> torch.Tensor:
    """x, and the same once more with a sign, along the last dimension."""
    return torch.cat([x, sign * x], dim=-1)


def _products_alike(
    outputs: int, inputs: int, dtype: torch.dtype, arranged: steady.Arrangement, random: torch.Generator
) -> bool:
    layer = nn.Linear(inputs // 2 * 2, outputs, bias=False, dtype=dtype)
    layer.weight.copy_(_cancelling(torch.randn(outputs, inputs // 2, generator=random), 1))
    product = steady.SteadyProduct([layer], arranged)
    x = _cancelling(torch.randn(max(ROWS), inputs // 2, generator=random), -1).to(dtype)
    singly = torch.cat([product(x[row : row + 1]) for row in range(max(ROWS))])
    return all(torch.equal(product(x[:rows]), singly[:rows]) for rows in ROWS)


def _attention_alike(
    config: Any, dtype: torch.dtype, arranged: steady.Arrangement, seen: int, random: torch.Generator
) -> bool:
    """Of equal tokens that see so many positions, in batches that are read further and further."""
    heads, size = config.num_key_value_heads, _head_size(config)
    group = config.num_attention_heads // heads
    rows, width = (max(batch) for batch in zip(*BATCHES, strict=True))
    longest = attention.positions_read(seen + max(MORE))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    queries = normal(rows, heads, 1, group, size).to(dtype).expand(-1, -1, width, -1, -1)
    keys, values = normal(rows, heads, longest, size), normal(rows, heads, longest, size)
    half = seen // 2
    keys[:, :, half : 2 * half], values[:, :, half : 2 * half] = keys[:, :, :half], -values[:, :, :half]
    keys, values = keys.to(dtype), values.to(dtype)

    def attended(first: int, batch: int, tokens: int, more: int) -> torch.Tensor:
        """[batch, heads, tokens, group, size]"""
        read = attention.positions_read(seen + more)
        mask = torch.zeros(batch, tokens, read, dtype=dtype)
        mask[..., seen:] = -torch.inf
        bias, singly = attention.bias_of(mask, group, arranged.apart), tokens if arranged.apart else 1
        chosen = queries[first : first + batch, :, :tokens].flatten(2, 3)
        stored = (x[first : first + batch, :, :read] for x in (keys, values))
        return attention.attend(chosen, *stored, bias, singly).view(batch, heads, tokens, group, size)

    singly = torch.cat([attended(row, 1, 1, 0) for row in range(rows)])
    return all(
        torch.equal(attended(0, batch, tokens, more), singly[:batch].expand(-1, -1, tokens, -1, -1))
        for batch, tokens in BATCHES
        for more in MORE
    )
