"""A linear layer of the draft base whose weight may differ from row to row of a batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from moedraft.cpu.products import Product, expect, halves

Multiplies = Callable[[torch.Tensor], torch.Tensor]  # x [..., in] → [..., out]


class LoRALinear(nn.Module):
    """A linear layer that multiplies by what the bank has put into `product`, or else by its own weight."""

    def __init__(self, base: nn.Module, small: bool = False, half: bool = False) -> None:
        """small, half: as `Product`'s, whether it uses the layouts for small models on a CPU."""
        super().__init__()
        self.base = base
        self.small, self.halved = small, half
        self.transposed = not isinstance(base, nn.Linear)  # GPT-2's Conv1D keeps [in, out]
        self.product: Multiplies | None = None
        if small and not (half and halves(self.base_weight())):
            expect(self.base_weight(), base.bias)  # type: ignore[arg-type]

    @property
    def weight(self) -> nn.Parameter:
        """The base layer's weight; some models' own code asks for it."""
        return self.base.weight  # type: ignore[return-value]

    def base_weight(self) -> torch.Tensor:
        """[out, in]"""
        weight: torch.Tensor = self.base.weight  # type: ignore[assignment]
        return weight.T if self.transposed else weight

    def with_weight(self, weight: torch.Tensor) -> Product:
        """The same layer with another weight [out, in]."""
        return Product(weight, self.base.bias, small=self.small, half=self.halved)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x) if self.product is None else self.product(x)
        return y


class Mixed:
    """x → x Wᵀ + (x Aᵀ ∘ mask) Bᵀ for one batch, where each row has its own expert or none.

    A and B are the low-rank factors of several experts, end to end: two products, whatever the number of
    experts. The mask of zeros and ones lets a row see its own expert's factors only.
    """

    def __init__(self, plain: Multiplies, down: Multiplies, up: Multiplies, mask: torch.Tensor) -> None:
        """plain: x → x Wᵀ, what all rows have in common. down: x → x Aᵀ. up: y → y Bᵀ. mask [B, 1, R]."""
        self.plain, self.down, self.up, self.mask = plain, down, up, mask

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(x) + self.up(self.down(x) * _shaped(self.mask, x))


def _shaped(mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """mask [B, 1, R] in the shape that fits x: [B, T, in], [B, …, in], or [B·T, in] row after row."""
    if x.dim() == 2:
        return mask[:, 0].repeat_interleave(x.shape[0] // mask.shape[0], dim=0)
    return mask.view(mask.shape[0], *[1] * (x.dim() - 2), mask.shape[2])
