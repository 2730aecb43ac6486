"""The drafter itself: a layer that reads the target's features and the next token, and guesses the one after.

Entry i of its cache stands for the target's features at position i together with the token at i + 1; its
output is a guess at the token at i + 2. Where the target has not been yet, the drafter's own output takes the
place of the features. Token embeddings and output rows are the target's: they are used here, never copied
into a checkpoint unless that is asked for.

The names of the parameters are those of a `speculators` checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn
from torch.nn.functional import embedding, rms_norm, scaled_dot_product_attention, silu

from moedraft.cache import SlotCache
from moedraft.core import InvalidRequest
from moedraft.feature.config import FeatureConfig
from moedraft.feature.vocabulary import places

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # queries, keys, values: [B, heads, T, head_dim]


class Norm(nn.Module):
    """x / √(mean x² + ε) · weight, over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Projections of a layer whose queries, keys and values read [embedding, feature], 2 H wide."""

    frequencies: torch.Tensor

    def __init__(self, config: FeatureConfig) -> None:
        super().__init__()
        self.config = config
        size, bias = 2 * config.hidden_size, config.attention_bias
        queries, pairs = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(size, queries, bias=bias)
        self.k_proj = nn.Linear(size, pairs, bias=bias)
        self.v_proj = nn.Linear(size, pairs, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=bias)
        normed = config.kind == "qwen3"
        self.q_norm = Norm(config.head_dim, config.rms_norm_eps) if normed else nn.Identity()
        self.k_norm = Norm(config.head_dim, config.rms_norm_eps) if normed else nn.Identity()
        frequencies = torch.tensor(config.frequencies(), dtype=torch.float32)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Attention:
        """As `Module.to` and its like want it, but the frequencies stay float32.

        Rounded to bfloat16 they would turn a key that is 1 000 tokens away by up to a radian too far.
        """
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        frequencies = torch.tensor(self.config.frequencies(), dtype=torch.float32)
        self.frequencies = frequencies.to(self.frequencies.device)
        return self

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> Heads:
        """x [B, T, 2H], positions int64 [B, T] → queries, keys and values, rotated."""
        queries, keys, values = (
            rows.unflatten(2, (-1, self.config.head_dim))
            for rows in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        queries, keys = self.q_norm(queries), self.k_norm(keys)
        angles = positions[..., None].float() * self.frequencies
        cos, sin = angles.cos()[:, :, None].to(x.dtype), angles.sin()[:, :, None].to(x.dtype)
        turned = (rotate(each, cos, sin).transpose(1, 2) for each in (queries, keys))
        return next(turned), next(turned), values.transpose(1, 2)

    def mix(self, mixed: torch.Tensor) -> torch.Tensor:
        """The heads' attention outputs [B, heads, T, head_dim] → the layer's output [B, T, H]."""
        result: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return result


class Mlp(nn.Module):
    def __init__(self, config: FeatureConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class FeatureLayer(nn.Module):
    """A decoder layer whose residual is the feature (or the drafter's own output in its place)."""

    def __init__(self, config: FeatureConfig) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.self_attn, self.mlp = Attention(config), Mlp(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.hidden_norm = Norm(size, eps), Norm(size, eps)
        self.post_attention_layernorm = Norm(size, eps)

    def project(self, embeds: torch.Tensor, states: torch.Tensor, positions: torch.Tensor) -> Heads:
        """embeds, states [B, T, H] → queries, keys and values."""
        joined = torch.cat([self.input_layernorm(embeds), self.hidden_norm(states)], dim=-1)
        return self.self_attn.project(joined, positions)

    def finish(self, states: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """What attention found, [B, heads, T, head_dim], added to the residual, and the MLP: [B, T, H]."""
        residual = self.hidden_norm(states) if self.norm_before_residual else states
        hidden = residual + self.self_attn.mix(mixed)
        result: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return result


class FastForward(Protocol):
    """The same computations in another way, without gradients."""

    def fuse(self, features: torch.Tensor) -> torch.Tensor: ...
    def normed(self, hidden: torch.Tensor) -> torch.Tensor: ...
    def advance(
        self, cache: SlotCache, states: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor: ...


class FeatureDraft(nn.Module):
    """A drafter for one target.

    embeddings [V, H]: the target's, shared with it. output [V, H]: the target's output matrix, of which the
    drafter uses the rows `vocabulary`, sorted token ids int64 [draft vocabulary]; `own_rows` [same, H] in
    their place, where a checkpoint has trained its own. Raises InvalidRequest where they do not fit.
    """

    def __init__(
        self,
        config: FeatureConfig,
        vocabulary: torch.Tensor,
        embeddings: torch.Tensor,
        output: torch.Tensor,
        own_rows: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.config, self.embeddings, self.output = config, embeddings, output
        self.trained = None if own_rows is None else (vocabulary, own_rows.detach())
        self._check(vocabulary, own_rows if own_rows is not None else output[: len(vocabulary)])
        self.fc = nn.Linear(config.features_size, config.hidden_size, bias=False)
        eps = config.rms_norm_eps
        if config.norm_before_fc:
            self.input_norm = Norm(config.features_size, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(Norm(config.state_size, eps) for _ in config.feature_layers)
        self.layers = nn.ModuleList([FeatureLayer(config)])
        self.norm = Norm(config.hidden_size, eps)
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        rows = output[vocabulary] if own_rows is None else own_rows
        self.lm_head = nn.Linear(config.hidden_size, len(vocabulary), bias=False, dtype=rows.dtype)
        self.lm_head.weight = nn.Parameter(rows.detach().clone(), requires_grad=False)
        self.faster: FastForward | None = None  # runs the drafter where no gradient is asked for

    def _check(self, vocabulary: torch.Tensor, rows: torch.Tensor) -> None:
        size, wide = self.config.draft_vocab_size, self.config.hidden_size
        if len(vocabulary) != size:
            raise InvalidRequest(f"the drafter lists {len(vocabulary)} tokens, and its size is {size}.")
        if not bool((vocabulary.diff() > 0).all()):
            raise InvalidRequest("a draft vocabulary is a sorted list of different token ids.")
        if rows.ndim != 2 or len(rows) != size:
            raise InvalidRequest(f"the drafter has output rows {list(rows.shape)} for {size} tokens.")
        if self.embeddings.shape[1] != wide or rows.shape[1] != wide:
            found = f"{self.embeddings.shape[1]} and {rows.shape[1]}"
            raise InvalidRequest(
                f"the drafter is {wide} wide; the target's embeddings and output are {found}."
            )
        if int(vocabulary[-1]) >= len(self.embeddings):
            raise InvalidRequest("the draft vocabulary names tokens that the target does not have.")

    @property
    def layer(self) -> FeatureLayer:
        layer: FeatureLayer = self.layers[0]  # type: ignore[assignment]
        return layer

    def new_cache(self, slots: int) -> SlotCache:
        return SlotCache(1, slots)

    def rows(self, vocabulary: torch.Tensor) -> torch.Tensor:
        """Rows [..., H] of these tokens, int64 [...]: the target's output, or as the checkpoint trained."""
        rows = self.output[vocabulary].to(self.fc.weight)
        if self.trained is None:
            return rows
        tokens, own = self.trained = self.trained[0].to(rows.device), self.trained[1].to(rows.device)
        found = places(vocabulary, tokens)
        return torch.where((found >= 0)[..., None], own[found.clamp(min=0)].to(rows), rows)

    def use_vocabulary(self, vocabulary: torch.Tensor) -> None:
        """Draft these tokens (int64, sorted) from now on."""
        rows = self.rows(vocabulary)
        self.vocabulary = vocabulary
        self.lm_head = nn.Linear(rows.shape[1], len(rows), bias=False, dtype=rows.dtype)
        self.lm_head.weight = nn.Parameter(rows.detach().clone(), requires_grad=False)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """The target's joined features [B, T, 3H] → states [B, T, H]."""
        if (fast := self._faster()) is not None:
            return fast.fuse(features)
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = torch.split(features, self.config.state_size, dim=-1)
            features = torch.cat([norm(x) for norm, x in zip(self.fc_norm, parts, strict=True)], dim=-1)
        fused: torch.Tensor = self.fc(features)
        return fused

    def _faster(self) -> FastForward | None:
        return None if torch.is_grad_enabled() else self.faster

    def embed(self, token_ids: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """int64 [B, T] → [B, T, H] in the precision of `like`."""
        return embedding(token_ids, self.embeddings).to(like.dtype)

    def fed_back(self, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's output as it takes the features' place at the next step."""
        normed: torch.Tensor = self.norm(hidden) if self.config.norm_output else hidden
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """What `fed_back` gave [..., H] → logits over the draft vocabulary."""
        return self.guess(self.normed(hidden))

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """What `fed_back` gave [..., H] → what output rows are multiplied with."""
        norm = self.norm if (fast := self._faster()) is None else fast.normed
        normed: torch.Tensor = hidden if self.config.norm_output else norm(hidden)
        return normed

    def guess(self, normed: torch.Tensor) -> torch.Tensor:
        """What `normed` gave [..., H] → logits over the draft vocabulary."""
        logits: torch.Tensor = self.lm_head(normed.to(self.lm_head.weight.dtype))
        return logits

    def get_output_embeddings(self) -> nn.Module:
        """The output layer, by the name that models of transformers give it."""
        return self.lm_head

    def advance(
        self,
        cache: SlotCache,
        first: int,
        states: torch.Tensor,
        token_ids: torch.Tensor,
        starts: list[int],
    ) -> torch.Tensor:
        """One forward over the cache: what `fed_back` gives of the layer's output, [B, T, H].

        states [B, T, 3H] features or [B, T, H] fused ones or own output; token_ids int64 [B, T]: the tokens
        one position after them. Row b is slot `first + b`, its first entry is number `starts[b]`; entries
        from there on are overwritten. Shorter rows are padded on the right, what comes of that means nothing.
        """
        if states.shape[-1] == self.config.features_size != self.config.hidden_size:
            states = self.fuse(states)
        positions = cache.at(first, starts, token_ids.shape[1], token_ids.device)
        if (fast := self._faster()) is not None:
            return fast.advance(cache, states, token_ids, positions)
        length = cache.cursor.length
        mask = torch.arange(length, device=token_ids.device) <= positions[:, None, :, None]
        queries, keys, values = self.layer.project(self.embed(token_ids, states), states, positions)
        keys, values = cache.layers[0].update(keys, values)
        grouped = self.config.num_heads != self.config.num_kv_heads
        mixed = scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=grouped)
        return self.fed_back(self.layer.finish(states, mixed))

    def step(
        self,
        cache: SlotCache,
        first: int,
        states: torch.Tensor,
        token_ids: torch.Tensor,
        starts: list[int],
        keep: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`advance`, and logits of the last `keep` entries (0: all)."""
        hidden = self.advance(cache, first, states, token_ids, starts)
        return hidden, self.logits(hidden[:, -keep:])


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions, halves as pairs. x [B, T, heads, d]; cos, sin [B, T, 1, d / 2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
