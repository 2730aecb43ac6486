"""The same forward with fewer, larger operations, for Llama-like models in float32.

At batch 1 a small model on a CPU spends most of a step calling operations, not computing them: here the
norms are fused, queries, keys and values are one product, gate and up another, and nothing is wrapped.
Weights stay transformers' own (the fused matrices are the storage, its layers become views of them).
`models.py` compares it with the model's own forward at load time and does without it where they differ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from moedraft.cache import SlotCache, SlotLayer

KNOWN = ("llama", "mistral", "qwen2")  # RMS norms before attention and MLP, rotary halves, SiLU gate, no more


def fits(hf: Any) -> bool:
    """Whether the architecture is one whose forward is written down here."""
    config = hf.config
    return (
        config.model_type in KNOWN
        and config._attn_implementation == "sdpa"
        and hf.dtype == torch.float32
        and config.hidden_act == "silu"
        and not getattr(config, "pretraining_tp", 1) > 1
    )


class LeanForward:
    """Callable like `LanguageModel.forward`, on one model. `fuse` joins projections (no adapters then)."""

    def __init__(self, hf: Any, *, fuse: bool) -> None:
        self.embed = hf.model.embed_tokens
        self.rotary = hf.model.rotary_emb
        self.norm = hf.model.norm
        self.hf = hf  # its lm_head may be replaced by an adapted one
        self.layers = [LeanLayer(layer, hf.config, fuse=fuse) for layer in hf.model.layers]

    def __call__(
        self,
        cache: SlotCache,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        keep: int,
    ) -> torch.Tensor:
        """Logits [B, keep or T, V]; mask bool [B, 1, T, length]."""
        hidden = self.embed(token_ids)
        cos, sin = self.rotary(hidden, positions)
        cos, sin = cos[:, :, None], sin[:, :, None]
        # One token that sees all there is needs no mask.
        open_mask = None if mask.shape[0] * mask.shape[2] == 1 else mask
        for layer, store in zip(self.layers, cache.layers, strict=True):
            hidden = layer(hidden, cos, sin, open_mask, store)
        if keep:
            hidden = hidden[:, -keep:]
        hidden = rms_norm(hidden, self.norm.weight.shape, self.norm.weight, self.norm.variance_epsilon)
        logits: torch.Tensor = self.hf.lm_head(hidden)
        return logits


class LeanLayer:
    """One decoder layer."""

    def __init__(self, layer: Any, config: Any, *, fuse: bool) -> None:
        self.attention, self.mlp = layer.self_attn, layer.mlp
        self.before, self.between = layer.input_layernorm, layer.post_attention_layernorm
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = self.attention.head_dim
        self.grouped = self.heads != self.kv_heads
        self.qkv: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self.gate_up: tuple[torch.Tensor, torch.Tensor | None] | None = None
        if fuse:
            at = self.attention
            self.qkv = join([at.q_proj, at.k_proj, at.v_proj])
            self.gate_up = join([self.mlp.gate_proj, self.mlp.up_proj])

    def __call__(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: torch.Tensor | None,
        store: SlotLayer,
    ) -> torch.Tensor:
        batch, width, _ = hidden.shape
        x = rms_norm(hidden, self.before.weight.shape, self.before.weight, self.before.variance_epsilon)
        joined = self._project(x).view(batch, width, -1, self.head_dim)
        turned = joined[:, :, : -self.kv_heads]  # queries and keys
        first, second = turned.chunk(2, dim=-1)
        turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
        keys, values = store.update(
            turned[:, :, self.heads :].transpose(1, 2), joined[:, :, -self.kv_heads :].transpose(1, 2)
        )
        queries = turned[:, :, : self.heads].transpose(1, 2)
        mixed = scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=self.grouped)
        hidden = hidden + self.attention.o_proj(mixed.transpose(1, 2).reshape(batch, width, -1))
        x = rms_norm(hidden, self.between.weight.shape, self.between.weight, self.between.variance_epsilon)
        if self.gate_up is None:
            gated = silu(self.mlp.gate_proj(x)) * self.mlp.up_proj(x)
        else:
            gate, up = linear(x, *self.gate_up).chunk(2, dim=-1)
            gated = silu(gate) * up
        result: torch.Tensor = hidden + self.mlp.down_proj(gated)
        return result

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values of all heads, end to end."""
        if self.qkv is not None:
            return linear(x, *self.qkv)
        at = self.attention
        return torch.cat((at.q_proj(x), at.k_proj(x), at.v_proj(x)), dim=-1)


def join(layers: list[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One weight [Σ out, in] and bias for several layers, which become views of it."""
    weight = torch.cat([layer.weight.data for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([layer.bias.data for layer in layers])
    start = 0
    for layer in layers:
        rows = slice(start, start + layer.out_features)
        layer.weight.data = weight[rows]
        if bias is not None:
            layer.bias.data = bias[rows]
        start += layer.out_features
    return weight, bias
