"""Experts merged into the draft base's weights: those used last, within a budget of memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping

from moedraft.cpu.products import Product
from moedraft.drafting.experts.adapter import Adapter

RECENT = 2  # experts whose next version is merged before it is used

Products = dict[str, Product]  # by module name


class MergedExperts:
    """The merged weights of some experts, by name, the one used last at the end."""

    def __init__(self, budget: int, copies: int, modules: Collection[str]) -> None:
        """budget: bytes of all merged weights together. copies: how many a `Product` keeps of its weight.

        modules: those whose weights are kept here.
        """
        self.budget = budget
        self.copies = copies
        self.modules = modules
        self._kept: OrderedDict[str, tuple[int, Products]] = OrderedDict()  # with their bytes

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def recent(self) -> list[str]:
        """The experts used last."""
        return list(self._kept)[-RECENT:]

    def keep(self, expert: str, adapter: Adapter, products: Products) -> None:
        self._kept[expert] = (self._bytes(adapter), products)

    def drop(self, expert: str) -> None:
        self._kept.pop(expert, None)

    def clear(self) -> None:
        self._kept.clear()

    def fitting(self, adapters: Mapping[str, Adapter]) -> list[str]:
        """As many of these experts as can be kept beside the others, those used last at the end."""
        kept = list(self._kept.items())  # at once: another thread may use them meanwhile
        order = [name for name, _ in kept]
        names = sorted(adapters, key=lambda name: order.index(name) if name in order else -1)
        others = sum(size for name, (size, _) in kept if name not in adapters)
        while names and others + sum(self._bytes(adapters[name]) for name in names) > self.budget:
            del names[0]
        return names

    def of(
        self, adapters: Mapping[str, Adapter], merge: Callable[[Adapter], Products]
    ) -> dict[str, Products] | None:
        """Merged weights of these experts, made by `merge` where they are not kept.

        None where all of them together would be over the budget. Those that were not used for longest are
        dropped to stay below it.
        """
        if len(adapters) * max(map(self._bytes, adapters.values()), default=0) > self.budget:
            return None
        return self.needed(adapters, merge)

    def needed(
        self, adapters: Mapping[str, Adapter], merge: Callable[[Adapter], Products]
    ) -> dict[str, Products]:
        """As `of`, but always made, even over the budget; other experts' weights are dropped for them."""
        for expert, adapter in adapters.items():
            if expert not in self._kept:
                self.keep(expert, adapter, merge(adapter))
            self._kept.move_to_end(expert)
        found = {expert: self._kept[expert][1] for expert in adapters}
        while self._kept and sum(size for size, _ in self._kept.values()) > self.budget:
            self._kept.popitem(last=False)
        return found

    def _bytes(self, adapter: Adapter) -> int:
        deltas = [pair for name, pair in adapter.deltas.items() if name in self.modules]
        return self.copies * sum(b.shape[0] * a.shape[1] * a.element_size() for a, b in deltas)
