"""A linear layer over a batch of several experts, computed expert by expert, for a small draft on a CPU.

The time of a product with few rows is the time of reading its weight. So each expert's merged weight
multiplies the rows of that expert. Many experts in one batch would mean reading many weights. Where their
low-rank terms are small they are added to one product instead (`moedraft.drafting.experts.joined`, which
every other model uses); where these are large as well, the shared draft serves all rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

import torch

from moedraft.cpu.products import Product

FEW_EXPERTS = 2  # up to which reading each expert's own weights pays


class Factored(Protocol):
    """What an expert adds to the layers of a model."""

    @property
    def terms(self) -> int:
        """How many numbers its low-rank factors are."""

    @property
    def merged(self) -> int:
        """How many numbers the weights of the layers are to which they are added."""


def joins(experts: Collection[Factored]) -> bool:
    """Whether a batch of all these experts adds their low-rank terms to one product."""
    return len(experts) > FEW_EXPERTS and light(experts)


def too_many(experts: Collection[Factored]) -> bool:
    """Whether reading what all these experts need costs more time than their better drafts save."""
    return len(experts) > FEW_EXPERTS and not light(experts)


def light(experts: Collection[Factored]) -> bool:
    """Whether all their terms together are no more numbers than the merged weights of a single one."""
    return sum(one.terms for one in experts) <= max(one.merged for one in experts)


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
