"""A feature drafter's forward on a CPU, with what lies between its products in compiled functions.

The plain twin is `FeatureDraft`'s own forward. With SmolLM2 on two cores a step of that took .8 ms, of which
products were .3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from moedraft.cache import Cursor, SlotCache
from moedraft.cpu.compiled import BITS, add_norm, gate, norm, take_back, turn

MORE_TURNS = 512  # positions by which the table of turns grows


def fused_for(draft: Any) -> FusedFeature | None:
    """For a drafter on a CPU with a Llama layer and in the precision of the embeddings; None for others."""
    dtype = draft.fc.weight.dtype
    known = dtype in BITS and draft.embeddings.dtype == dtype and draft.embeddings.is_contiguous()
    fits = known and draft.fc.weight.device.type == "cpu" and draft.config.kind == "llama"
    return FusedFeature(draft) if fits else None


class FusedFeature:
    """Runs one drafter whose norms and embeddings do not change any more; its products may."""

    def __init__(self, draft: Any) -> None:
        self.draft, self.config, self.layer = draft, draft.config, draft.layer
        layer = self.layer
        self.dtype = draft.fc.weight.dtype
        self._zero = BITS[self.dtype]
        self._norm, self._add_norm = norm(self.dtype), add_norm(self.dtype, self.dtype)
        self._turn, self._take_back, self._gate = turn(self.dtype), take_back(self.dtype), gate(self.dtype)
        self._embeds, self._states = weights_of(layer.input_layernorm), weights_of(layer.hidden_norm)
        self._between, self._last = weights_of(layer.post_attention_layernorm), weights_of(draft.norm)
        self._features: torch.Tensor | None = None  # float32 [parts, size]
        if self.config.norm_before_fc:
            self._features = weights_of(draft.input_norm)[None]
        elif self.config.fc_norm:
            self._features = torch.stack([weights_of(one) for one in draft.fc_norm])
        self._turns = (torch.empty(0, self.config.head_dim // 2),) * 2  # cosines and sines by position

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """As `FeatureDraft.fuse`."""
        assert features.dtype == self.dtype, "read by its address"
        if self._features is not None:
            normed = torch.empty(features.shape, dtype=self.dtype)
            self._normed(features.contiguous(), self._features, normed, features.shape[-1])
            features = normed
        fused: torch.Tensor = self.draft.fc(features)
        return fused

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """The drafter's last norm of [..., H]."""
        assert hidden.dtype == self.dtype, "read by its address"
        normed = torch.empty(hidden.shape, dtype=self.dtype)
        self._normed(hidden.contiguous(), self._last[None], normed, hidden.shape[-1])
        return normed

    def advance(
        self, cache: SlotCache, states: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """As `FeatureDraft.advance`, for states [B, T, H] at the cache's cursor."""
        assert (states.dtype, token_ids.dtype) == (self.dtype, torch.int64), "read by their addresses"
        assert states.shape[:2] == token_ids.shape == positions.shape, "one state for each token"
        layer, size, states = self.layer, states.shape[-1], states.contiguous()
        joined = torch.empty(*token_ids.shape, 2 * size, dtype=self.dtype)
        begin = joined[..., size:]
        self._normed(self.draft.embeddings, self._embeds[None], joined, 2 * size, token_ids.contiguous())
        self._normed(states, self._states[None], begin, 2 * size)
        mixed = layer.self_attn.o_proj(self._attend(layer.self_attn, cache, joined, positions))
        residual = begin.contiguous() if layer.norm_before_residual else states
        hidden, normed = self._sum(residual, mixed, self._between)
        more = layer.mlp.down_proj(self._gated(layer.mlp, normed))
        hidden, normed = self._sum(hidden, more, self._last)
        return normed if self.config.norm_output else hidden

    def _normed(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        step: int,
        chosen: torch.Tensor | None = None,
    ) -> None:
        """RMS norms of the rows of x, or of those `chosen` [B, T], into every `step` numbers of `out`."""
        parts, size = weight.shape
        rows = x.numel() // (parts * size) if chosen is None else chosen.numel()
        where = 0 if chosen is None else chosen.data_ptr()
        epsilon = self.config.rms_norm_eps
        addresses = x.data_ptr(), where, weight.data_ptr(), out.data_ptr()
        known = x.numel() // (parts * size)
        self._norm(self._zero, *addresses, rows, known, parts, size, step, epsilon)

    def _sum(
        self, hidden: torch.Tensor, added: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden + added [B, T, H], and its norm."""
        sums, normed, added = torch.empty_like(hidden), torch.empty_like(hidden), added.contiguous()
        size = hidden.shape[-1]
        rows = hidden.numel() // size
        tensors = (hidden, added, weight, sums, normed)
        addresses = [each.data_ptr() for each in tensors]
        self._add_norm(self._zero, self._zero, *addresses, rows, rows, size, self.config.rms_norm_eps)
        return sums, normed

    def _attend(self, layer: Any, cache: SlotCache, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What attention finds [B, T, heads · head_dim] for normed embeddings and states x [B, T, 2 H]."""
        (batch, width), at, store = positions.shape, cache.cursor, cache.layers[0]
        heads, kv_heads, size = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        asked, made, held = (
            project(x).contiguous() for project in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        if not store.is_initialized:
            like = x.new_empty(1, kv_heads, 1, size)
            store.lazy_initialization(like, like)
        turns = self._turns_until(at.length)
        group, positions = heads // kv_heads, positions.contiguous()
        queries = x.new_empty(batch, kv_heads, width * group, size)
        made_of = [each.data_ptr() for each in (asked, made, held)]
        turned_by = [each.data_ptr() for each in (*turns, positions)]
        written_to = [each.data_ptr() for each in (queries, store.keys, store.values)]
        rows, wide = (batch * width, width, at.first), (heads * size, kv_heads * size)
        sizes = heads, kv_heads, size // 2, store.capacity, group, width * group
        where = 0, positions.data_ptr()
        self._turn(self._zero, *made_of, *wide, *turned_by, *where, *written_to, *rows, *sizes)
        keys, values = (stored[at.first : at.last, :, : at.length] for stored in (store.keys, store.values))
        mixed = scaled_dot_product_attention(queries, keys, values, self._mask(at, positions, group))
        out = x.new_empty(batch, width, heads * size)
        shape = batch * width, batch * width, width, heads, kv_heads, size, group
        self._take_back(self._zero, mixed.data_ptr(), 0, out.data_ptr(), *shape, *mixed.stride()[:3])
        return out

    @staticmethod
    def _mask(at: Cursor, positions: torch.Tensor, group: int) -> torch.Tensor | None:
        """Which positions each query sees, bool [B, 1, T · group, length]; None: all of them."""
        if at.start is not None and positions.shape[1] == 1:
            return None
        seen = torch.arange(at.length) <= positions[:, :, None]
        return seen.repeat_interleave(group, dim=1)[:, None]

    def _turns_until(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines for the positions below `length`, and more."""
        if length > len(self._turns[0]):
            positions = torch.arange(length + MORE_TURNS)[:, None].float()
            angles = positions * self.layer.self_attn.frequencies
            self._turns = angles.cos(), angles.sin()
        return self._turns

    def _gated(self, mlp: Any, x: torch.Tensor) -> torch.Tensor:
        """SiLU of the gate's product times the other one, [B, T, I]."""
        one, other = mlp.gate_proj(x).contiguous(), mlp.up_proj(x).contiguous()
        out, size = torch.empty_like(one), one.shape[-1]
        addresses = [each.data_ptr() for each in (one, other, out)]
        self._gate(self._zero, *addresses, one.numel() // size, size, size)
        return out


def weights_of(layer: Any) -> torch.Tensor:
    """A norm's weights, float32 [size]."""
    weight: torch.Tensor = layer.weight.detach().float().contiguous()
    return weight
