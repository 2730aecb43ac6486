"""A Llama-like model's forward on a CPU, for models whose weights are too many to stay in its caches.

There a step takes as long as reading the weights once. Each weight is therefore laid out once as oneDNN's
products read it, in float32, or in bfloat16 where the CPU multiplies that itself: then half as many bytes are
read. The sum over layers is kept in float32 in both cases.

In bfloat16 rounding is coarse, and two almost equal logits often become equal or change places. Greedy
answers are still those of plain decoding, because a token's logits do not depend on what is computed
together with it, to the last bit:

- weights are laid out for a number of rows for which oneDNN has one order of summing, whatever the rows;
- many rows are multiplied in pieces of at most `PIECE` rows, since larger ones are summed otherwise;
- attention is computed for numbers of queries and positions that are summed alike (`attention.py`).

Where the CPU does not multiply bfloat16, FBGEMM keeps the weights in half precision and multiplies them in
float32. That is as few bytes, and the model's own weights are rounded alike, so that transformers' forward
has the same numbers up to the rounding of float32.

Which layout of the weights that is, and whether attention must take each token by itself, differs between
processors (`Arrangement`). `independence.py` measures whether all this holds on the CPU at hand. The plain
twin is transformers' own forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.nn.functional import pad

from moedraft.cache import Cursor, SlotCache
from moedraft.cpu import SMALL
from moedraft.cpu.huge_pages import use_huge_pages
from moedraft.cpu.lean import KNOWN
from moedraft.cpu.optional import with_compiled
from moedraft.cpu.products import bound_caches, halves, multiplies_bfloat16, packs
from moedraft.cpu.steady.attention import bias_of, positions_read
from moedraft.cpu.steady.plain import PlainMixing, PlainNorm, plain_gate
from moedraft.cpu.steady.spans import Part, Span

if TYPE_CHECKING:
    from moedraft.cpu.steady.fused import FusedMixing, FusedNorm

Rounding = Literal["bfloat16", "half"]  # of all numbers, or of weights alone to half precision
PIECE = 128  # rows of one product
SPARE = 15  # rows that a piece may be filled up by
SINGLE, DOUBLE = 8, 16  # code is generated for every number of rows up to 8, every second up to 16, then 8th


@dataclass(frozen=True)
class Arrangement:
    """How weights and queries are laid out and multiplied."""

    rows: int  # that a weight is laid out for
    fewest: int = 1  # rows that are multiplied: one row alone may be summed otherwise than several
    apart: bool = False  # attention takes each token by itself, not all tokens of a row in one product
    half: bool = False  # FBGEMM keeps the weights of a float32 model in half precision

    def filled(self, rows: int) -> int:
        """How many rows are multiplied so that code is there for them; more than a piece stay as they are."""
        if rows > PIECE:
            return rows
        return in_one_order()[rows] if self.half else max(stepped(rows), self.fewest)


# In the order in which they are tried. In bfloat16 the first is for AMX, the third for processors with
# AVX512-BF16 alone, where the sums of small products depend on the number of rows.
ARRANGEMENTS = {
    torch.bfloat16: (
        Arrangement(1),
        Arrangement(1, apart=True),
        Arrangement(5, fewest=2),
        Arrangement(5, fewest=2, apart=True),
    ),
    torch.float32: (Arrangement(5, fewest=2),),
}
# The same for models in float32 whose weights are kept in half precision.
HALVED = (Arrangement(1, half=True), Arrangement(1, apart=True, half=True))


def fits(hf: Any) -> bool:
    """Whether this module can run the model and is worth it: a known architecture, a CPU, a large model."""
    config = hf.config
    return (
        config.model_type in KNOWN
        and config._attn_implementation == "sdpa"
        and config.hidden_act == "silu"
        and not getattr(config, "pretraining_tp", 1) > 1
        and hf.num_parameters() > SMALL
        and packs(hf.get_output_embeddings().weight)
    )


def preferred(config: Any, num_parameters: int) -> Rounding | None:
    """How numbers of such a target are rounded to be the fastest here; whether they may be is seen later."""
    if config.model_type not in KNOWN or num_parameters <= SMALL:
        return None
    if multiplies_bfloat16():
        return "bfloat16" if packs(torch.empty(0, dtype=torch.bfloat16)) else None
    return "half" if halves(torch.ones(1)) else None


def halve(hf: Any) -> bool:
    """Round the weights of a float32 model's products to half precision, in place, if all of them fit.

    Returns whether they do; else nothing is changed.
    """
    layers = [module for module in hf.modules() if isinstance(module, nn.Linear)]
    if not fits(hf) or not all(halves(layer.weight) for layer in layers):
        return False
    for layer in layers:
        layer.weight.data.copy_(layer.weight.data.half())
    return True


class SteadyProduct:
    """x → x Wᵀ + bias for layers whose outputs stand end to end; their weights do not change any more."""

    def __init__(self, layers: list[nn.Linear], arranged: Arrangement) -> None:
        bound_caches()
        weight = torch.cat([layer.weight.detach() for layer in layers])
        self.bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
        self.filled, self.half = arranged.filled, arranged.half
        if self.half:
            self.packed = torch.ops.quantized.linear_prepack_fp16(weight, self.bias)
        else:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, arranged.rows)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] → [rows, out]"""
        if x.shape[0] > PIECE:
            return torch.cat([self._piece(piece) for piece in torch.split(x, PIECE)])
        return self._piece(x)

    def _piece(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        wanted = self.filled(rows)
        padded = x if wanted == rows else pad(x, (0, 0, 0, wanted - rows))
        if self.half:
            y: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(padded, self.packed)
        else:
            y = torch.ops.mkldnn._linear_pointwise(padded, self.packed, self.bias, "none", [], "")
        return y if wanted == rows else y[:rows]


def stepped(rows: int) -> int:
    """`rows` rounded up to a number that code is generated for, so that few pieces of code serve them all."""
    return rows + -rows % (1 if rows <= SINGLE else 2 if rows <= DOUBLE else 8)


@cache
@torch.inference_mode()
def in_one_order() -> list[int]:
    """For 0 … PIECE rows, how many FBGEMM is to be given so that it sums each of them in the same order.

    It multiplies a few rows at once and what is left in another way, in which one or two rows are summed
    otherwise than more. Which numbers leave such a rest differs between processors, so it is tried out.
    """
    random, most = torch.Generator().manual_seed(0), PIECE + SPARE
    weight, x = torch.randn(64, 96, generator=random), torch.randn(most, 96, generator=random)
    packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
    made = [torch.ops.quantized.linear_dynamic_fp16(x[:rows], packed) for rows in range(1, most + 1)]
    alike = [rows for rows, y in enumerate(made, 1) if torch.equal(y, made[-1][:rows])]
    table = [next(one for one in alike if one >= rows) for rows in range(PIECE + 1)]
    if any(filled > rows + SPARE for rows, filled in enumerate(table)):
        return list(range(PIECE + 1))  # filling up would cost more than it brings; `independence` will tell
    return table


class SteadyForward:
    """Runs one model. Its weights are copied into another layout.

    A forward reads all weights whatever it computes. So it takes two parts, rows that are decoded and pieces
    of prompts for instance, and each token's numbers are those of a forward by itself.
    """

    ragged = True  # padding costs as much as tokens do

    def __init__(self, hf: Any, arranged: Arrangement | None = None, *, fuse: bool = True) -> None:
        """arranged: the first of `ARRANGEMENTS` unless another is named. fuse: use compiled functions."""
        arranged = arranged or ARRANGEMENTS[hf.dtype][0]
        between = between_products(hf, arranged, fuse)
        self.dtype, self.arranged = hf.dtype, arranged
        self.max_len = hf.config.max_position_embeddings or 2**20
        self.embed = hf.model.embed_tokens
        self.mixing = between.mixing
        self.layers = [SteadyLayer(layer, between, arranged) for layer in hf.model.layers]
        self.norm = between.norm(hf.model.norm)
        self.head = SteadyProduct([hf.lm_head], arranged)
        self.group = hf.config.num_attention_heads // hf.config.num_key_value_heads
        products = [product for layer in self.layers for product in layer.products]
        if not arranged.half:
            use_huge_pages(product.packed for product in (*products, self.head))

    def __call__(self, cache: SlotCache, part: Part, beside: Part | None = None) -> torch.Tensor:
        """Logits [B, keep or T, V] of `part`; `beside` is only read into the cache."""
        spans = [Span(part, 0, self._bias(cache, part.cursor))]
        if beside is not None:
            spans.append(Span(beside, spans[0].end, self._bias(cache, beside.cursor)))
        hidden = self.embed(joined([span.token_ids for span in spans])).float()
        positions = joined([span.positions for span in spans])
        # Only padding stands behind the model's context.
        turns, added = self.mixing.turns(hidden, positions.clamp(max=self.max_len - 1)), None
        for number, (layer, store) in enumerate(zip(self.layers, cache.layers, strict=True)):
            hidden, normed = layer.before(hidden, added)
            for span in spans:
                span.collect(number, hidden)
            mixed = self.mixing(layer.qkv(normed), turns, spans, store)
            hidden, added = layer.finish(hidden, mixed)
        hidden = hidden if added is None else hidden + added[: len(hidden)]
        wanted = spans[0]
        hidden = wanted.of(hidden)
        if part.keep:
            hidden = wanted.padded(hidden)[:, -part.keep :].flatten(0, 1)
        logits = self.head(self.norm(hidden)[1])[: len(hidden)]
        return logits.view(len(part.token_ids), -1, logits.shape[-1]) if part.keep else wanted.padded(logits)

    def _bias(self, cache: SlotCache, cursor: Cursor) -> torch.Tensor:
        """What attention adds to the scores: 0 up to a token itself, −∞ after it. [B, 1, queries, read]"""
        assert cursor.positions is not None
        read = positions_read(cursor.length)
        cache.reserve(read)
        later = torch.arange(read) > cursor.positions[:, :, None]
        bias = torch.zeros(later.shape, dtype=self.dtype).masked_fill_(later, -torch.inf)
        return bias_of(bias, self.group, self.arranged.apart)


class SteadyLayer:
    """The products and norms of one decoder layer. The sum over layers is float32 [N, H]."""

    def __init__(self, layer: Any, between: Between, arranged: Arrangement) -> None:
        at, mlp = layer.self_attn, layer.mlp
        self.before = between.norm(layer.input_layernorm)
        self.between, self.gate = between.norm(layer.post_attention_layernorm), between.gate
        self.qkv = SteadyProduct([at.q_proj, at.k_proj, at.v_proj], arranged)
        self.gate_up = SteadyProduct([mlp.gate_proj, mlp.up_proj], arranged)
        self.out, self.down = SteadyProduct([at.o_proj], arranged), SteadyProduct([mlp.down_proj], arranged)
        self.products = (self.qkv, self.out, self.gate_up, self.down)

    def finish(self, hidden: torch.Tensor, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """From what attention found to the sum over layers, and what the MLP adds to it."""
        hidden, normed = self.between(hidden, self.out(mixed))
        return hidden, self.down(self.gate(self.gate_up(normed)))


@dataclass(frozen=True)
class Between:
    """What lies between the products: norms made of a model's own, attention, and the gate of an MLP."""

    norm: Callable[[Any], PlainNorm | FusedNorm]
    mixing: PlainMixing | FusedMixing
    gate: Callable[[torch.Tensor], torch.Tensor]


def between_products(hf: Any, arranged: Arrangement, fuse: bool) -> Between:
    """In compiled functions where Numba works and `fuse` is set, else in PyTorch's own operations."""
    parts = hf.config, hf.model.rotary_emb, hf.dtype, arranged.apart

    def compiled(fused: Any) -> Between:
        filled = arranged.filled
        fused.FusedNorm(hf.model.norm, hf.dtype, filled)  # what fails, fails here
        mixing, gate = fused.FusedMixing(*parts, filled), fused.FusedGate(hf.dtype)
        return Between(lambda norm: fused.FusedNorm(norm, hf.dtype, filled), mixing, gate)

    found = with_compiled("steady.fused", compiled) if fuse else None
    return found or Between(lambda norm: PlainNorm(norm, hf.dtype), PlainMixing(*parts), plain_gate)


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
