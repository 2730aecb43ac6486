"""The low-rank terms of several experts in one product, for batches in which each row has its own expert."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from moedraft.cpu.products import Product
from moedraft.drafting.experts.adapter import Adapter, Delta
from moedraft.drafting.experts.layer import LoRALinear, Mixed

NOBODY = -2  # no row's expert; a row without one has the number −1
RESIDENT = 8  # experts whose factors stay joined though the batch at hand has fewer
STEP = 64  # columns are filled up to a multiple of this, so that code is generated for few shapes of products


def residents(known: Mapping[str, Adapter], present: Mapping[str, Adapter]) -> dict[str, Adapter]:
    """The experts `present` and, before them, those of `known` that were used last: RESIDENT, if there are.

    known: the expert that was used last at its end.
    """
    others = [(name, adapter) for name, adapter in known.items() if name not in present]
    leaving = max(0, len(others) + len(present) - RESIDENT)
    return dict(others[leaving:]) | dict(present)


def numbered(adapters: Mapping[str, Adapter]) -> dict[str, int]:
    """A number for each expert; those that are served by one and the same adapter share one."""
    numbers: dict[int, int] = {}
    return {name: numbers.setdefault(id(adapter), len(numbers)) for name, adapter in adapters.items()}


class Factors:
    """A and B of one layer: the factors of several experts, end to end."""

    def __init__(self, deltas: Mapping[int, Delta], *, small: bool, half: bool = False) -> None:
        """deltas: by the expert's number. small, half: as `LoRALinear`'s."""
        owners = [number for number, (a, _) in deltas.items() for _ in range(a.shape[0])]
        spare = -len(owners) % STEP
        downs, ups = [a for a, _ in deltas.values()], [b for _, b in deltas.values()]
        down = torch.cat([*downs, downs[0].new_zeros(spare, downs[0].shape[1])])  # [R, in]
        up = torch.cat([*ups, ups[0].new_zeros(len(ups[0]), spare)], dim=1)  # [out, R]
        self.down, self.up = (Product(part, small=small, half=half) for part in (down, up))
        self.owners = torch.tensor(owners + [NOBODY] * spare, device=down.device)  # [R]
        self.dtype = down.dtype

    def mask(self, rows: torch.Tensor) -> torch.Tensor:
        """rows int64 [B], the number of each row's expert → ones where a factor is its own, [B, 1, R]."""
        return (self.owners == rows[:, None]).to(self.dtype)[:, None]


class JoinedExperts:
    """Joins the factors of the experts of a batch, and keeps them while batches have these experts."""

    def __init__(
        self, layers: Mapping[str, LoRALinear], light: Callable[[Collection[Adapter]], bool] | None = None
    ) -> None:
        """light: which experts may stay joined together, beside the limit of RESIDENT."""
        self.layers, self.light = layers, light
        self._adapters: dict[str, Adapter] = {}  # whose factors are joined, the one used last at the end
        self._numbers: dict[str, int] = {}
        self._factors: dict[str, Factors] = {}  # by layer

    def select(self, present: Mapping[str, Adapter], rows: Sequence[str]) -> None:
        """Add to each layer's product what the expert of each row adds; other rows stay as they are."""
        if any(self._adapters.get(name) is not adapter for name, adapter in present.items()):
            self._join(present)
        for name in present:
            self._adapters[name] = self._adapters.pop(name)
        numbers = torch.tensor([self._numbers[row] if row in present else -1 for row in rows])
        for name, factors in self._factors.items():
            layer = self.layers[name]
            numbers = numbers.to(factors.owners.device)
            plain = layer.product or layer.base
            layer.product = Mixed(plain, factors.down, factors.up, factors.mask(numbers))

    def drop(self, experts: Collection[str]) -> None:
        """Forget the joined factors if one of these experts is among them: it has a new version."""
        if any(name in self._adapters for name in experts):
            self._adapters, self._factors = {}, {}

    def _join(self, present: Mapping[str, Adapter]) -> None:
        adapters = residents(self._adapters, present)
        while self.light and len(adapters) > len(present) and not self.light(adapters.values()):
            del adapters[next(iter(adapters))]  # the one that was not used for longest
        numbers = numbered(adapters)
        factors = {}
        for name, layer in self.layers.items():
            deltas = {numbers[one]: a.deltas[name] for one, a in adapters.items() if name in a.deltas}
            if deltas:
                factors[name] = Factors(deltas, small=layer.small, half=layer.halved)
        # All at once, at the end: what failed above is tried again at the next batch.
        self._adapters, self._numbers, self._factors = adapters, numbers, factors
