"""What lies between the products of a decoder layer, in PyTorch's own operations: the twins of `fused.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import silu

from moedraft.cache import SlotLayer
from moedraft.cpu.steady.attention import attend, laid_out, taken_back
from moedraft.cpu.steady.spans import Span

Turns = tuple[torch.Tensor, torch.Tensor]  # what rotary positions multiply by


class PlainNorm:
    """The sum over layers in float32, and its RMS norm in the precision of the products."""

    def __init__(self, norm: Any, dtype: torch.dtype) -> None:
        weight = norm.weight.detach().float()
        self.weight, self.dtype = weight * weight.numel() ** 0.5, dtype
        self.epsilon = norm.variance_epsilon * weight.numel()

    def __call__(
        self, hidden: torch.Tensor, added: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden float32 [N, H] → hidden + added, and that · weight / √(mean of its squares + ε)."""
        x = hidden if added is None else hidden + added
        factor = (x * x).sum(-1, keepdim=True).add_(self.epsilon).rsqrt_()
        return x, torch.mul(x * factor, self.weight, out=torch.empty_like(x, dtype=self.dtype))


def plain_gate(joined: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half of [N, 2 I] times the second half."""
    gate, up = joined.chunk(2, dim=-1)
    return silu(gate).mul_(up)


class PlainMixing:
    """Turns queries and keys by their positions, stores keys and values, and attends."""

    def __init__(self, config: Any, rotary: Any, dtype: torch.dtype, apart: bool) -> None:
        """apart: as `Arrangement`'s."""
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.rotary, self.dtype, self.apart = rotary, dtype, apart

    def turns(self, hidden: torch.Tensor, positions: torch.Tensor) -> Turns:
        """Cosines, and sines with the sign that the exchanged halves get; [N, 1, 2, head_dim / 2]."""
        cos, sin = (turn[0].view(len(positions), 1, 2, -1) for turn in self.rotary(hidden, positions[None]))
        signs = torch.tensor([[-1.0], [1.0]])
        return cos.to(self.dtype), (sin * signs).to(self.dtype)

    def __call__(
        self, joined: torch.Tensor, turns: Turns, spans: list[Span], store: SlotLayer
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
        queries = turned[:, :, : self.heads].view(batch, width, self.kv_heads, group, -1).transpose(1, 2)
        queries = laid_out(queries, self.apart)
        keys, values = (stored[at.first : at.last, :, :read] for stored in (store.keys, store.values))
        mixed = attend(queries, keys, values, span.bias, width if self.apart else 1)
        found = taken_back(mixed, width, group, self.apart)  # [B, kv_heads, T, group, d]
        return span.flat(found.transpose(1, 2).flatten(2))
