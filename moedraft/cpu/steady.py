"""A Llama-like model's forward on a CPU, for models whose weights are too many to stay in its caches.

There a step takes as long as reading the weights once. Each weight is therefore laid out once as oneDNN's
products read it, in float32, or in bfloat16 where the CPU multiplies that itself: then half as many bytes are
read. The sum over layers is kept in float32 in both cases.

In bfloat16 rounding is coarse, and two almost equal logits often become equal or change places. Greedy
answers are still those of plain decoding, because a token's logits do not depend on what is computed
together with it, to the last bit:

- weights are laid out for a number of rows for which oneDNN has one order of summing, whatever the rows;
- many rows are multiplied in pieces of at most `PIECE` rows, since larger ones are summed otherwise;
- attention is computed for numbers of queries and positions that are summed alike (`cpu/attention.py`).

Which layout of the weights that is, and whether attention must take each token by itself, differs between
processors (`Arrangement`). `cpu/independence.py` measures whether all this holds on the CPU at hand. The
plain twin is transformers' own forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad, silu

from moedraft.cache import Cursor, SlotCache, SlotLayer
from moedraft.cpu import SMALL
from moedraft.cpu.attention import attend, bias_of, positions_read
from moedraft.cpu.huge_pages import use_huge_pages
from moedraft.cpu.lean import KNOWN, Packing
from moedraft.cpu.products import bound_caches, packs
from moedraft.evidence import Beside, HiddenStates

PIECE = 128  # rows of one product
SINGLE, DOUBLE = 8, 16  # code is generated for every number of rows up to 8, every second up to 16, then 8th


@dataclass(frozen=True)
class Arrangement:
    """How weights and queries are laid out and multiplied."""

    rows: int  # that a weight is laid out for
    fewest: int = 1  # rows that are multiplied: one row alone may be summed otherwise than several
    apart: bool = False  # attention takes each token by itself, not all tokens of a row in one product


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


def prefers_bfloat16(config: Any, num_parameters: int) -> bool:
    """Whether a target of this kind is faster in bfloat16 here; `independent` says whether it may be."""
    known = config.model_type in KNOWN and num_parameters > SMALL
    return known and packs(torch.empty(0, dtype=torch.bfloat16))


class SteadyProduct:
    """x → x Wᵀ + bias for layers whose outputs stand end to end; their weights do not change any more."""

    def __init__(self, layers: list[nn.Linear], arranged: Arrangement) -> None:
        bound_caches()
        weight = torch.cat([layer.weight.detach() for layer in layers])
        self.bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
        self.fewest = arranged.fewest
        self.blocked = torch.ops.mkldnn._reorder_linear_weight(weight, arranged.rows)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] → [rows, out]"""
        if x.shape[0] > PIECE:
            return torch.cat([self._piece(piece) for piece in torch.split(x, PIECE)])
        return self._piece(x)

    def _piece(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        wanted = max(stepped(rows), self.fewest)
        padded = x if wanted == rows else pad(x, (0, 0, 0, wanted - rows))
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(padded, self.blocked, self.bias, "none", [], "")
        return y if wanted == rows else y[:rows]


def stepped(rows: int) -> int:
    """`rows` rounded up to a number that code is generated for, so that few pieces of code serve them all."""
    return rows + -rows % (1 if rows <= SINGLE else 2 if rows <= DOUBLE else 8)


class SteadyNorm:
    """RMS norm of float32 rows, in the precision of the products."""

    def __init__(self, norm: Any, dtype: torch.dtype) -> None:
        weight = norm.weight.detach().float()
        self.weight, self.dtype = weight * weight.numel() ** 0.5, dtype
        self.epsilon = norm.variance_epsilon * weight.numel()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, H] → x · weight / √(mean x² + ε), [N, H]"""
        factor = (x * x).sum(-1, keepdim=True).add_(self.epsilon).rsqrt_()
        return torch.mul(x * factor, self.weight, out=torch.empty_like(x, dtype=self.dtype))


@dataclass(frozen=True)
class Part:
    """A part of a forward: tokens int64 [B, T] of neighbouring slots.

    Shorter rows are padded, so a part holds rows of similar length.
    """

    token_ids: torch.Tensor
    cursor: Cursor
    lengths: list[int] | None = None  # the real tokens of each row; None: all
    hidden: HiddenStates | None = None  # layers whose input is asked for
    keep: int = 0  # logits of so many last positions; 0: of all

    @classmethod
    def at(
        cls,
        cache: SlotCache,
        first: int,
        token_ids: torch.Tensor,
        starts: list[int],
        lengths: list[int] | None,
        hidden: HiddenStates | None,
        keep: int = 0,
    ) -> Part:
        """What `LanguageModel.forward` is called with, as a part."""
        cursor = cache.cursor_at(first, starts, token_ids.shape[1], token_ids.device)
        return cls(token_ids, cursor, lengths, hidden, keep)

    @classmethod
    def beside(cls, cache: SlotCache, other: Beside) -> Part:
        return cls.at(cache, other.first, other.token_ids, other.starts, other.lengths, other.hidden)


class Span:
    """A part within a forward: its real tokens are rows `first` to `end − 1` of the hidden states [N, H]."""

    def __init__(self, part: Part, first: int, bias: torch.Tensor) -> None:
        """bias [B, 1, queries, read]: what attention adds to the scores, as `attend` takes it."""
        self.cursor, self.hidden, self.bias = part.cursor, part.hidden, bias
        self.packing = Packing.of(part.token_ids, part.lengths)
        self.token_ids = self.flat(part.token_ids)
        assert part.cursor.positions is not None
        self.positions = self.flat(part.cursor.positions)
        self.first, self.end = first, first + len(self.token_ids)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Its rows of x [N, …]."""
        return x[self.first : self.end]

    def flat(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, …] → its real tokens, [n, …]"""
        return x.flatten(0, 1) if self.packing.real is None else self.packing.pack(x)

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `flat`."""
        if self.packing.real is None:
            return x.view(*self.packing.shape, *x.shape[1:])
        return self.packing.pad(x)

    def collect(self, layer: int, hidden: torch.Tensor) -> None:
        """Hand over the input [N, H] of a layer where it is asked for."""
        if self.hidden is not None and layer in self.hidden.layers:
            self.hidden.states[layer] = self.padded(self.of(hidden))


class SteadyForward:
    """Runs one model. Its weights are copied into another layout.

    A forward reads all weights whatever it computes. So it takes two parts, rows that are decoded and pieces
    of prompts for instance, and each token's numbers are those of a forward by itself.
    """

    ragged = True  # padding costs as much as tokens do

    def __init__(self, hf: Any, arranged: Arrangement | None = None) -> None:
        """arranged: the first of `ARRANGEMENTS` unless another is named."""
        arranged = arranged or ARRANGEMENTS[hf.dtype][0]
        self.dtype = hf.dtype
        self.max_len = hf.config.max_position_embeddings or 2**20
        self.embed = hf.model.embed_tokens
        self.rotary = hf.model.rotary_emb
        self.layers = [SteadyLayer(layer, hf.config, hf.dtype, arranged) for layer in hf.model.layers]
        self.norm = SteadyNorm(hf.model.norm, hf.dtype)
        self.head = SteadyProduct([hf.lm_head], arranged)
        self.arranged = arranged
        self.group = hf.config.num_attention_heads // hf.config.num_key_value_heads
        products = [product for layer in self.layers for product in layer.products]
        use_huge_pages(product.blocked for product in (*products, self.head))

    def __call__(self, cache: SlotCache, part: Part, beside: Part | None = None) -> torch.Tensor:
        """Logits [B, keep or T, V] of `part`; `beside` is only read into the cache."""
        spans = [Span(part, 0, self._bias(cache, part.cursor))]
        if beside is not None:
            spans.append(Span(beside, spans[0].end, self._bias(cache, beside.cursor)))
        token_ids, positions = self._rows(spans)
        hidden = self.embed(token_ids).float()
        turns = self._turns(hidden, positions)
        for number, (layer, store) in enumerate(zip(self.layers, cache.layers, strict=True)):
            for span in spans:
                span.collect(number, hidden)
            hidden = layer(hidden, turns, spans, store)
        hidden, wanted = spans[0].of(hidden), spans[0]
        if part.keep:
            hidden = wanted.padded(hidden)[:, -part.keep :].flatten(0, 1)
        logits = self.head(self.norm(hidden))
        return logits.view(len(part.token_ids), -1, logits.shape[-1]) if part.keep else wanted.padded(logits)

    def _rows(self, spans: list[Span]) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and positions, [N]; a single token gets a second row here, not before each product."""
        token_ids = torch.cat([span.token_ids for span in spans])
        positions = torch.cat([span.positions for span in spans])
        missing = (0, max(0, self.arranged.fewest - len(token_ids)))
        return pad(token_ids, missing), pad(positions, missing)

    def _turns(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines, and sines with the sign that the exchanged halves get; [N, 1, 2, head_dim / 2]."""
        within = positions.clamp(max=self.max_len - 1)  # only padding stands behind the model's context
        turns = self.rotary(hidden, within[None])
        cos, sin = (turn[0].view(len(positions), 1, 2, -1) for turn in turns)
        signs = torch.tensor([[-1.0], [1.0]])
        return cos.to(self.dtype), (sin * signs).to(self.dtype)

    def _bias(self, cache: SlotCache, cursor: Cursor) -> torch.Tensor:
        """What attention adds to the scores: 0 up to a token itself, −∞ after it. [B, 1, queries, read]"""
        assert cursor.positions is not None
        read = positions_read(cursor.length)
        cache.reserve(read)
        later = torch.arange(read) > cursor.positions[:, :, None]
        bias = torch.zeros(later.shape, dtype=self.dtype).masked_fill_(later, -torch.inf)
        return bias_of(bias, self.group, self.arranged.apart)


class SteadyLayer:
    """One decoder layer. The hidden states [N, H] of all real tokens are float32."""

    def __init__(self, layer: Any, config: Any, dtype: torch.dtype, arranged: Arrangement) -> None:
        at, mlp = layer.self_attn, layer.mlp
        self.apart = arranged.apart
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.before, self.between = (
            SteadyNorm(layer.input_layernorm, dtype),
            SteadyNorm(layer.post_attention_layernorm, dtype),
        )
        self.qkv = SteadyProduct([at.q_proj, at.k_proj, at.v_proj], arranged)
        self.gate_up = SteadyProduct([mlp.gate_proj, mlp.up_proj], arranged)
        self.out, self.down = SteadyProduct([at.o_proj], arranged), SteadyProduct([mlp.down_proj], arranged)
        self.products = (self.qkv, self.out, self.gate_up, self.down)

    def __call__(
        self,
        hidden: torch.Tensor,
        turns: tuple[torch.Tensor, torch.Tensor],
        spans: list[Span],
        store: SlotLayer,
    ) -> torch.Tensor:
        mixed = self._attend(self.qkv(self.before(hidden)), turns, spans, store)
        # Where a second row only fills up, it gets the first one's by broadcasting. Nobody reads it.
        hidden = hidden + self.out(mixed)
        gate, up = self.gate_up(self.between(hidden)).chunk(2, dim=-1)
        return hidden + self.down(silu(gate).mul_(up))

    def _attend(
        self,
        joined: torch.Tensor,
        turns: tuple[torch.Tensor, torch.Tensor],
        spans: list[Span],
        store: SlotLayer,
    ) -> torch.Tensor:
        """From queries, keys and values [N, (heads + 2 kv_heads) · head_dim] to [N, heads · head_dim]."""
        cos, sin = turns
        halves = joined.view(joined.shape[0], -1, 2, cos.shape[-1])
        turned = halves[:, : -self.kv_heads]
        turned = (turned * cos).addcmul_(turned.flip(-2), sin).flatten(2)
        fresh = halves[:, -self.kv_heads :].flatten(2)
        mixed = [self._mix(span, span.of(turned), span.of(fresh), store) for span in spans]
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _mix(self, span: Span, turned: torch.Tensor, fresh: torch.Tensor, store: SlotLayer) -> torch.Tensor:
        """The attention output of one part's rows.

        turned [n, heads + kv_heads, head_dim], fresh [n, kv_heads, …].
        """
        at, read, turned = span.cursor, span.bias.shape[-1], span.padded(turned)
        store.write(at, turned[:, :, self.heads :].transpose(1, 2), span.padded(fresh).transpose(1, 2))
        # Queries that share a key stand side by side, all of one token before all of the next.
        batch, width, group = *span.packing.shape, self.heads // self.kv_heads
        queries = turned[:, :, : self.heads].view(batch, width, self.kv_heads, group, -1)
        queries = queries.transpose(1, 2).flatten(2, 3)
        keys, values = (stored[at.first : at.last, :, :read] for stored in (store.keys, store.values))
        mixed = attend(queries, keys, values, span.bias, width if self.apart else 1)
        return span.flat(mixed.view(batch, self.kv_heads, width, group, -1).transpose(1, 2).flatten(2))
