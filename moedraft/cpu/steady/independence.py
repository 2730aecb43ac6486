"""Whether a model gives each token the same logits whatever is computed together with it.

Two looks at it. `independent` compares the logits of a few tokens, so it sees whatever the model does, but an
order of summing that changes one rounding in a million passes it. `sums_alike` looks at the sums alone, on
numbers that cancel each other: what is left is nothing but their roundings, so any other order shows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from moedraft.cache import SlotCache
from moedraft.cpu.steady import attention, forward
from moedraft.evidence import Beside

log = logging.getLogger(__name__)

ROWS = (1, 2, 3, 5, 8, 11, 16, 24, 40, 128, 150)  # that are multiplied together
OUTPUTS = 8192  # of a product that are looked at, at most
SEEN = (20, 64, 100, 160, 200, 300, 500, 700)  # positions that a token sees
MORE = (0, 40, 150, 400)  # positions that another row in the batch sees beyond these
BATCHES = ((1, 1), (1, 5), (6, 1), (8, 2), (3, 3), (1, 40))  # rows, tokens
LONG = (200, 800)  # queries of a row, as prompts have; PyTorch takes more of them at a time
SCALE = 1024.0  # makes what is left of scores that cancel as large as scores usually are


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


class FastModel(SlotModel, Protocol):
    """What `made_independent` needs: the model as transformers has it, and its fast forward."""

    hf: Any
    lean: Any

    @property
    def dtype(self) -> torch.dtype: ...


def made_independent(model: FastModel, arrangements: Sequence[forward.Arrangement] = ()) -> bool:
    """Bring the model into the first arrangement in which its logits do not depend on the batch.

    arrangements: those to try, in the first of which it is; none: those of its precision. Returns whether
    there is one; no, where that cannot be found out.
    """
    try:
        for number, arranged in enumerate(arrangements or forward.ARRANGEMENTS[model.dtype]):
            if not sums_alike(model.hf.config, model.dtype, arranged):
                continue
            if number:  # the model is in the first one
                model.lean = None  # its copy of the weights, before another is made
                model.lean = forward.SteadyForward(model.hf, arranged)
            if independent(model):
                return True
    except Exception:
        log.exception("It could not be found out whether answers depend on the batch.")
    return False


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
def sums_alike(config: Any, dtype: torch.dtype, arranged: forward.Arrangement) -> bool:
    """Whether the products and the attention of such a model sum in one order, whatever goes with a token."""
    random = torch.Generator().manual_seed(0)
    return all(
        _products_alike(outputs, inputs, biased, dtype, arranged, random)
        for outputs, inputs, biased in _shapes(config)
    ) and all(
        _attention_alike(config, dtype, arranged, seen, of_scores, random)
        for seen in SEEN
        for of_scores in (False, True)
    )


def _head_size(config: Any) -> int:
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(size)


def _shapes(config: Any) -> Iterator[tuple[int, int, bool]]:
    """(outputs, inputs, whether there may be a bias) of the products of a layer, and of the last one."""
    queries = config.num_attention_heads * _head_size(config)
    keys = config.num_key_value_heads * _head_size(config)
    yield queries + 2 * keys, config.hidden_size, False
    yield queries + 2 * keys, config.hidden_size, True
    yield config.hidden_size, queries, False
    yield 2 * config.intermediate_size, config.hidden_size, False
    yield config.hidden_size, config.intermediate_size, False
    yield config.vocab_size, config.hidden_size, False


def _cancelling(x: torch.Tensor, sign: int) -> torch.Tensor:
    """x, and the same once more with a sign, along the last dimension."""
    return torch.cat([x, sign * x], dim=-1)


def _products_alike(
    outputs: int,
    inputs: int,
    biased: bool,
    dtype: torch.dtype,
    arranged: forward.Arrangement,
    random: torch.Generator,
) -> bool:
    outputs, half = min(outputs, OUTPUTS), inputs // 2
    layer = nn.Linear(2 * half, outputs, bias=biased, dtype=dtype, device="meta")
    weight = _cancelling(torch.randn(outputs, half, generator=random).to(dtype), 1)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if biased:
        layer.bias = nn.Parameter(torch.zeros(outputs, dtype=dtype), requires_grad=False)
    product = forward.SteadyProduct([layer], arranged)
    x = _cancelling(torch.randn(max(ROWS), half, generator=random), -1).to(dtype)
    singly = torch.cat([product(x[row : row + 1]) for row in range(max(ROWS))])
    return all(torch.equal(product(x[:rows]), singly[:rows]) for rows in ROWS)


def _attention_alike(
    config: Any,
    dtype: torch.dtype,
    arranged: forward.Arrangement,
    seen: int,
    of_scores: bool,
    random: torch.Generator,
) -> bool:
    """Of equal tokens that see so many positions, in batches that are read further and further.

    of_scores: queries and keys cancel each other, so that sums over them show; else values do.
    """
    heads, size = config.num_key_value_heads, _head_size(config)
    group = config.num_attention_heads // heads
    batches = [*BATCHES, *((1, -(-queries // group)) for queries in LONG if seen == SEEN[2])]
    rows, width = (max(batch) for batch in zip(*batches, strict=True))
    longest = attention.positions_read(seen + max(MORE))
    made = (_scores_cancel if of_scores else _values_cancel)(rows, heads, group, longest, size, seen, random)
    queries, keys, values = (x.to(dtype) for x in made)
    queries = queries.expand(-1, -1, width, -1, -1)

    def attended(first: int, batch: int, tokens: int, more: int) -> torch.Tensor:
        """[batch, heads, tokens, group, size]"""
        read = attention.positions_read(seen + more)
        mask = torch.zeros(batch, tokens, read, dtype=dtype)
        mask[..., seen:] = -torch.inf
        bias, singly = attention.bias_of(mask, group, arranged.apart), tokens if arranged.apart else 1
        asked = attention.laid_out(queries[first : first + batch, :, :tokens], arranged.apart)
        stored, held = (x[first : first + batch, :, :read] for x in (keys, values))
        mixed = attention.attend(asked, stored, held, bias, singly)
        return attention.taken_back(mixed, tokens, group, arranged.apart)

    singles = torch.cat([attended(row, 1, 1, 0) for row in range(rows)])
    return all(
        torch.equal(attended(0, batch, tokens, more), singles[:batch].expand(-1, -1, tokens, -1, -1))
        for batch, tokens in batches
        for more in MORE
    )


Made = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # queries [rows, heads, 1, group, size], keys, values


def _values_cancel(
    rows: int, heads: int, group: int, longest: int, size: int, seen: int, random: torch.Generator
) -> Made:
    """The second half of the positions that are seen has the first half's keys and its values' negatives."""
    queries = torch.randn(rows, heads, 1, group, size, generator=random)
    keys, values = torch.randn(2, rows, heads, longest, size, generator=random)
    half = seen // 2
    keys[:, :, half : 2 * half], values[:, :, half : 2 * half] = keys[:, :, :half], -values[:, :, :half]
    return queries, keys, values


def _scores_cancel(
    rows: int, heads: int, group: int, longest: int, size: int, seen: int, random: torch.Generator
) -> Made:
    """The second half of each query is the first half's negative, and of each key the first half."""
    part = -(-size // 2)
    queries = SCALE * torch.randn(rows, heads, 1, group, part, generator=random)
    keys = SCALE * torch.randn(rows, heads, longest, part, generator=random)
    values = torch.randn(rows, heads, longest, size, generator=random)
    return _cancelling(queries, -1)[..., :size], _cancelling(keys, 1)[..., :size], values
