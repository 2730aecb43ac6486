"""A Llama-like model's forward in fewer, larger operations, in float32. The plain twin is transformers' own.

At batch 1 a small model on a CPU spends most of a step on calling operations, not on computing them. Here
queries, keys and values are one product, gate and up are another, a norm's weight is part of the product
after it, and attention over few queries is two products. Padding is left out of the products where rows
differ in length. A small target's weights are copied into the layouts of `products.py`. `models.py` compares
the result with that of the model's own forward when it loads a model, and uses that one where they differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from moedraft.cache import SlotCache, SlotLayer
from moedraft.cpu.products import Product
from moedraft.evidence import HiddenStates

# Architectures with RMS norms before attention and MLP, rotary positions, a SiLU gate, and nothing else.
KNOWN = ("llama", "mistral", "qwen2")
FEW_QUERIES = 16  # tokens a row up to which plain attention beats the fused kernel on a CPU
FULL = 0.8  # share of real tokens from which leaving out the padding costs more than it saves


def fits(hf: Any) -> bool:
    """Whether this module can run the model: a known architecture in float32, with the usual attention."""
    config = hf.config
    return (
        config.model_type in KNOWN
        and config._attn_implementation == "sdpa"
        and hf.dtype == torch.float32
        and config.hidden_act == "silu"
        and not getattr(config, "pretraining_tp", 1) > 1
    )


@dataclass(frozen=True)
class Packing:
    """Converts between padded tokens [B, T, …] and the real tokens alone [N, …].

    Where no token is padding, or little is, it leaves them as they are.
    """

    shape: tuple[int, int]
    real: torch.Tensor | None  # int64 [N]: the places of the real tokens among all B · T

    tokens: torch.Tensor | None = None  # int64 [B · T]: the real token in each place

    @classmethod
    def of(cls, token_ids: torch.Tensor, lengths: list[int] | None) -> Packing:
        batch, width = token_ids.shape
        if lengths is None or sum(lengths) > FULL * batch * width:
            return cls((batch, width), None)
        places: list[int] = []
        tokens: list[int] = []
        for row, wanted in enumerate(lengths):
            length = max(wanted, 1)
            tokens += range(len(places), len(places) + length)
            tokens += tokens[-1:] * (width - length)  # no other row's numbers, which may be none
            places += range(row * width, row * width + length)
        device = token_ids.device
        return cls((batch, width), torch.tensor(places, device=device), torch.tensor(tokens, device=device))

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.real is None else x.flatten(0, 1).index_select(0, self.real)

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `pack`; padding becomes a copy of the row's last token."""
        return x if self.tokens is None else x.index_select(0, self.tokens).view(*self.shape, *x.shape[1:])


@dataclass(frozen=True)
class Call:
    """One forward of a model: what `LanguageModel.forward` was given, with positions and mask made of it."""

    cache: SlotCache
    token_ids: torch.Tensor  # int64 [B, T]
    positions: torch.Tensor  # int64 [B, T]
    mask: torch.Tensor  # bool [B, 1, T, length]
    keep: int = 0  # logits of so many last positions; 0: of all
    lengths: list[int] | None = None  # the real tokens of each row; None: all
    hidden: HiddenStates | None = None

    def packing(self) -> Packing:
        return Packing.of(self.token_ids, self.lengths)

    def wants(self, layer: int) -> bool:
        """Whether the input of this layer is asked for."""
        return self.hidden is not None and layer in self.hidden.layers

    def collect(self, layer: int, states: torch.Tensor) -> None:
        """Hand over the input [B, T, H] of a layer that is asked for."""
        assert self.hidden is not None
        self.hidden.states[layer] = states


class LeanForward:
    """Runs one model.

    `fuse` joins projections and copies their weights into faster layouts. It is for small models only, and
    only for those whose layers are never adapted or trained.
    """

    def __init__(self, hf: Any, *, fuse: bool) -> None:
        self.ragged = fuse and hf.device.type == "cpu"  # padding costs as much as tokens do
        self.embed = hf.model.embed_tokens
        self.rotary = hf.model.rotary_emb
        self.norm = hf.model.norm
        self.hf = hf  # its lm_head may be replaced by an adapted one
        self.layers = [LeanLayer(layer, hf.config, fuse=fuse) for layer in hf.model.layers]
        self.head = join([hf.lm_head], self.norm) if fuse else None

    def __call__(self, call: Call) -> torch.Tensor:
        """Logits [B, keep or T, V]."""
        packing = call.packing()
        hidden = self.embed(call.token_ids)
        turns = self.rotary(hidden, call.positions)
        cos, sin = (packing.pack(turn.expand(*call.token_ids.shape, -1))[..., None, :] for turn in turns)
        hidden = packing.pack(hidden)
        # A single token sees every position that is stored, so it needs no mask.
        mask = None if call.token_ids.numel() == 1 else call.mask
        for number, (layer, store) in enumerate(zip(self.layers, call.cache.layers, strict=True)):
            if call.wants(number):
                call.collect(number, packing.pad(hidden))
            hidden = layer(hidden, cos, sin, mask, store, packing)
        if call.keep:
            packing, hidden = Packing((0, 0), None), packing.pad(hidden)[:, -call.keep :]
        if self.head is not None:
            return packing.pad(self.head(scaled(hidden, self.norm)))
        logits: torch.Tensor = self.hf.lm_head(normed(hidden, self.norm))
        return packing.pad(logits)


class LeanLayer:
    """One decoder layer."""

    def __init__(self, layer: Any, config: Any, *, fuse: bool) -> None:
        self.attention, self.mlp = layer.self_attn, layer.mlp
        self.before, self.between = layer.input_layernorm, layer.post_attention_layernorm
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = self.attention.head_dim
        self.grouped = self.heads != self.kv_heads
        at = self.attention
        self.qkv = join([at.q_proj, at.k_proj, at.v_proj], self.before) if fuse else None
        self.gate_up = join([self.mlp.gate_proj, self.mlp.up_proj], self.between) if fuse else None
        self.out = join([at.o_proj]) if fuse else None
        self.down = join([self.mlp.down_proj]) if fuse else None

    def __call__(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: torch.Tensor | None,
        store: SlotLayer,
        packing: Packing,
    ) -> torch.Tensor:
        joined = self._project(hidden).view(*hidden.shape[:-1], -1, self.head_dim)
        turned = joined[..., : -self.kv_heads, :]  # queries and keys
        first, second = turned.chunk(2, dim=-1)
        turned = packing.pad(turned * cos + torch.cat((-second, first), dim=-1) * sin)
        fresh = packing.pad(joined[..., -self.kv_heads :, :])
        keys, values = store.update(turned[:, :, self.heads :].transpose(1, 2), fresh.transpose(1, 2))
        mixed = self._attend(turned[:, :, : self.heads].transpose(1, 2), keys, values, mask)
        mixed = packing.pack(mixed.transpose(1, 2).flatten(2))
        hidden = hidden + (self.out or self.attention.o_proj)(mixed)
        result: torch.Tensor = hidden + (self.down or self.mlp.down_proj)(self._gated(hidden))
        return result

    def _project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values of all heads, end to end."""
        if self.qkv is not None:
            return self.qkv(scaled(hidden, self.before))
        at, x = self.attention, normed(hidden, self.before)
        return torch.cat((at.q_proj(x), at.k_proj(x), at.v_proj(x)), dim=-1)

    def _attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """[B, heads, T, head_dim]; mask bool [B, 1, T, length]."""
        if self.grouped or queries.shape[2] > FEW_QUERIES or queries.device.type != "cpu":
            return scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=self.grouped)
        scores: torch.Tensor = (queries * self.head_dim**-0.5) @ keys.transpose(2, 3)
        if mask is not None:
            scores = scores.masked_fill_(~mask, -torch.inf)
        return scores.softmax(-1) @ values

    def _gated(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.gate_up is not None:
            gate, up = self.gate_up(scaled(hidden, self.between)).chunk(2, dim=-1)
            return silu(gate) * up
        x = normed(hidden, self.between)
        gated: torch.Tensor = silu(self.mlp.gate_proj(x)) * self.mlp.up_proj(x)
        return gated


def join(layers: list[nn.Linear], norm: Any = None) -> Product:
    """One product that gives the outputs of several layers end to end.

    The weight of `norm`, which comes before them, is multiplied into theirs; the input must be `scaled` then.
    """
    weight = torch.cat([layer.weight.data for layer in layers])
    if norm is not None:
        weight = weight * (norm.weight.data * norm.weight.numel() ** 0.5)
    bias = None if layers[0].bias is None else torch.cat([layer.bias.data for layer in layers])
    return Product(weight, bias, small=True)


def scaled(x: torch.Tensor, norm: Any) -> torch.Tensor:
    """x / √(Σ x² + n ε): the RMS norm without its weight and without its factor √n, for `join`ed products."""
    squares = (x * x).sum(-1, keepdim=True)
    factor: torch.Tensor = squares.add_(norm.variance_epsilon * x.shape[-1]).rsqrt_()
    return x * factor


def normed(x: torch.Tensor, norm: Any) -> torch.Tensor:
    """The whole RMS norm."""
    if x.device.type != "cpu":
        return rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
    # PyTorch has no fused norm for CPUs and would run more operations one by one.
    return scaled(x, norm).mul_(norm.weight * norm.weight.numel() ** 0.5)
