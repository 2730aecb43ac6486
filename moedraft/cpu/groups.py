"""A linear layer over a batch of several experts, computed expert by expert, for a small draft on a CPU.

The time of a product with few rows is the time of reading its weight. So each expert's merged weight
multiplies the rows of that expert, and with many experts in one batch, which would mean reading many weights,
the shared draft serves all rows. The plain twin is `moedraft.drafting.experts.joined`, which adds the
low-rank terms of all experts to one product and takes any number of experts; every other model uses it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from moedraft.cpu.products import Product

FEW_EXPERTS = 2  # up to which reading each expert's own weights pays


def too_many(experts: Collection[str]) -> bool:
    """Whether reading the weights of all these experts costs more time than their better drafts save."""
    return len(experts) > FEW_EXPERTS


class Grouped:
    """x → x Wᵀ + bias for one batch, with another weight W for each group of rows."""

    def __init__(self, owners: list[str], products: Mapping[str, Product]) -> None:
        """owners: whose product multiplies each row of the batch."""
        self.groups: list[tuple[torch.Tensor, Product]] = []  # numbers of rows, and what multiplies them
        for owner in dict.fromkeys(owners):
            rows = torch.tensor([row for row, name in enumerate(owners) if name == owner])
            self.groups.append((rows, products[owner]))
        self._batch = len(owners)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, …, in] or [B · T, in] → the same with out in place of in."""
        inner = x.view(self._batch, -1, x.shape[-1])
        y = x.new_empty(self._batch, inner.shape[1], self.groups[0][1].out)
        for rows, product in self.groups:
            y[rows] = product(inner[rows])
        return y.view(*x.shape[:-1], y.shape[-1])
