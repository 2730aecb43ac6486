"""Low-rank terms of several adapters over one linear layer, each for the rows of a batch that are its own.

A row is computed as base + shared adapter + its own expert, and a backward gives a gradient to both. Rows of
one expert stand side by side, so that its factors are applied to one slice of the batch. An adapter without
a row in the batch takes no part and gets no gradient, so that no optimiser moves it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.functional import linear

from moedraft.core import SHARED


@dataclass
class Routing:
    """Who is on in the next forward; one for all layers of a student."""

    parts: list[tuple[str, int]] = field(default_factory=list)  # expert and number of rows, in their order
    shared: bool = True  # whether the shared adapter is on


class LowRank(nn.Module):
    """B·A, zero at first. The scaling is 1, so that what is learned does not depend on the rank's name."""

    def __init__(self, size_in: int, size_out: int, rank: int, device: torch.device) -> None:
        super().__init__()
        bound = size_in**-0.5
        self.a = nn.Parameter(torch.empty(rank, size_in, device=device).uniform_(-bound, bound))
        self.b = nn.Parameter(torch.zeros(size_out, rank, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(linear(x.to(self.a.dtype), self.a), self.b)


class JointLinear(nn.Module):
    """A linear layer of the draft base that does not learn, with the adapters that do."""

    def __init__(self, base: nn.Linear, routing: Routing) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.routing = routing
        self.adapters = nn.ModuleDict()

    @property
    def weight(self) -> torch.Tensor:
        """The base layer's weight."""
        return self.base.weight

    def add(self, name: str, rank: int) -> None:
        """An adapter that changes nothing yet."""
        out, inner = self.base.weight.shape
        self.adapters[_key(name)] = LowRank(inner, out, rank, self.base.weight.device)

    def remove(self, name: str) -> None:
        if _key(name) in self.adapters:
            del self.adapters[_key(name)]

    def take(self, name: str) -> LowRank | None:
        """Remove the adapter of `name` and return it, None where there is none; `put` puts it back."""
        found = self.adapter(name)
        self.remove(name)
        return found

    def put(self, name: str, part: LowRank) -> None:
        self.adapters[_key(name)] = part

    def adapter(self, name: str) -> LowRank | None:
        return dict(self.adapters.items()).get(_key(name))  # type: ignore[return-value]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, …, in]; the first dimension is what `routing.parts` counts."""
        y: torch.Tensor = self.base(x)
        shared = self.adapter(SHARED) if self.routing.shared else None
        if shared is not None:
            y = y + shared(x).to(y.dtype)
        if any(self.adapter(name) for name, _ in self.routing.parts if name != SHARED):
            y = y + self._own(x, y)
        return y

    def rows(self, x: torch.Tensor, name: str, numbers: torch.Tensor) -> torch.Tensor:
        """The outputs `numbers` (int64, of the layer's) for x [n, in], all of whose rows belong to `name`."""
        y = linear(x, self.base.weight[numbers])
        shared = self.adapter(SHARED) if self.routing.shared else None
        for part in (shared, self.adapter(name) if name != SHARED else None):
            if part is not None:
                y = y + linear(linear(x.to(part.a.dtype), part.a), part.b[numbers]).to(y.dtype)
        return y

    def _own(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """What each row's own expert adds."""
        pieces = []
        sizes = [count for _, count in self.routing.parts]
        pairs = zip(self.routing.parts, torch.split(x, sizes), torch.split(like, sizes), strict=True)
        for (name, _), piece, same in pairs:
            own = self.adapter(name) if name != SHARED else None
            pieces.append(torch.zeros_like(same) if own is None else own(piece).to(like.dtype))
        return torch.cat(pieces)


def _key(name: str) -> str:
    """Never the name of an attribute of PyTorch's ModuleDict, and without dots."""
    return f"adapter_{name}"
