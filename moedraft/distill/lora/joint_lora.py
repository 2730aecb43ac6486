"""Low-rank terms of several adapters over one linear layer; each row of a batch uses those of its own expert.

A row is computed as base + shared adapter + its own expert, and a backward gives a gradient to both. Rows of
one expert stand side by side, so that its factors are applied to one slice of the batch. An adapter without
a row in the batch takes no part and gets no gradient, so that no optimiser moves it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.functional import linear

from moedraft.core import SHARED

LISTS_KEPT = 16  # experts whose picked rows of the output layer are cached: those used last


@dataclass
class Routing:
    """Which adapters are on in the next forward; one object for all layers of a student."""

    parts: list[tuple[str, int]] = field(default_factory=list)  # expert and number of rows, in their order
    shared: bool = True  # whether the shared adapter is on


class LowRank(nn.Module):
    """One adapter's term B·A, which is zero at first. The scaling is 1, whatever the rank."""

    def __init__(self, size_in: int, size_out: int, rank: int, device: torch.device) -> None:
        super().__init__()
        bound = size_in**-0.5
        self.a = nn.Parameter(torch.empty(rank, size_in, device=device).uniform_(-bound, bound))
        self.b = nn.Parameter(torch.zeros(size_out, rank, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.through(x, self.b)

    def through(self, x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """As `forward`, with `b` [n, rank], some of the rows of B, in the place of B."""
        # Autocast brings both sides of a product to one precision by itself.
        x = x if torch.is_autocast_enabled(x.device.type) else x.to(self.a.dtype)
        return linear(linear(x, self.a), b)


class FrozenWeight:
    """A weight that does not learn, kept in the precision that its products are computed in.

    Autocast converts such a weight anew at each product; here the converted one is kept, and so are the rows
    of it that an expert's own vocabulary picks.
    """

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer
        self._whole: tuple[torch.Tensor, torch.Tensor] | None = None  # the original weight, the converted one
        self._picked: OrderedDict[str, tuple[torch.Tensor, torch.Tensor]] = OrderedDict()  # numbers, rows

    def whole(self) -> torch.Tensor:
        weight, dtype = self.layer.weight, self._dtype()
        if self._whole is None or self._whole[0] is not weight or self._whole[1].dtype != dtype:
            self._whole = weight, self._laid_out(weight.detach()).to(dtype)
            self._picked.clear()
        return self._whole[1]

    def rows(self, name: str, numbers: torch.Tensor) -> torch.Tensor:
        """The weight's rows `numbers` for expert `name`; they are cached for this very tensor `numbers`."""
        weight = self.whole()
        kept = self._picked.get(name)
        if kept is None or kept[0] is not numbers:
            kept = numbers, weight.index_select(0, numbers)
        self._picked[name] = kept
        self._picked.move_to_end(name)
        if len(self._picked) > LISTS_KEPT:
            self._picked.popitem(last=False)
        return kept[1]

    def _laid_out(self, weight: torch.Tensor) -> torch.Tensor:
        """[out, in]"""
        return weight if isinstance(self.layer, nn.Linear) else weight.T.contiguous()

    def _dtype(self) -> torch.dtype:
        device = self.layer.weight.device.type
        cast = torch.is_autocast_enabled(device)
        return torch.get_autocast_dtype(device) if cast else self.layer.weight.dtype


class JointLinear(nn.Module):
    """A linear layer of the draft base that does not learn, with the adapters that do."""

    def __init__(self, base: nn.Module, routing: Routing) -> None:
        """base: a linear layer, or transformers' `Conv1D`, whose weight lies the other way round."""
        super().__init__()
        self.base: nn.Linear = base.requires_grad_(False)  # type: ignore[assignment]
        self.frozen = FrozenWeight(self.base)
        self.routing = routing
        self.adapters = nn.ModuleDict()

    @property
    def weight(self) -> torch.Tensor:
        """The base layer's weight [out, in]."""
        return self.base.weight if isinstance(self.base, nn.Linear) else self.base.weight.T

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base.bias

    def add(self, name: str, rank: int) -> None:
        """Add an adapter that changes nothing yet."""
        out, inner = self.weight.shape
        self.adapters[_key(name)] = LowRank(inner, out, rank, self.weight.device)

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
        """x [rows, …, in] or [rows · positions, in] → the same with `out` at its end.

        `routing.parts` says which rows belong to which expert.
        """
        y = linear(x, self.frozen.whole(), self.bias)
        shared = self.adapter(SHARED) if self.routing.shared else None
        if shared is not None:
            y = y + shared(x).to(y.dtype)
        if any(self.adapter(name) for name, _ in self.routing.parts if name != SHARED):
            y = y + self._own(x, y)
        return y

    def rows(self, x: torch.Tensor, name: str, numbers: torch.Tensor) -> torch.Tensor:
        """The outputs `numbers` (int64, of the layer's) for x [n, in], all of whose rows belong to `name`."""
        y = linear(x, self.frozen.rows(name, numbers))
        shared = self.adapter(SHARED) if self.routing.shared else None
        for part in (shared, self.adapter(name) if name != SHARED else None):
            if part is not None:
                y = y + part.through(x, part.b.index_select(0, numbers)).to(y.dtype)
        return y

    def _own(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """What each row's own expert adds."""
        pieces = []
        # Some models give a layer the positions of all rows one after another, [rows · positions, in].
        each = len(x) // sum(count for _, count in self.routing.parts)
        sizes = [count * each for _, count in self.routing.parts]
        pairs = zip(self.routing.parts, torch.split(x, sizes), torch.split(like, sizes), strict=True)
        for (name, _), piece, same in pairs:
            own = self.adapter(name) if name != SHARED else None
            pieces.append(torch.zeros_like(same) if own is None else own(piece).to(like.dtype))
        return torch.cat(pieces)


def _key(name: str) -> str:
    """A valid key of PyTorch's ModuleDict: the prefix keeps it from being the name of an attribute."""
    return f"adapter_{name}"
