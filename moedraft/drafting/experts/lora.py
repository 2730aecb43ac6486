"""Many LoRA experts over one draft base, any mix of them in one batch.

Each adapted linear layer multiplies by W, the base's weight with the shared adapter merged in; rows without
an expert use W alone. For the experts of a batch there are three ways: weights merged for a single expert
and kept (`merged`), the low-rank terms of all experts beside one product (`joined`), and, for a batch of few
or large experts of a small draft on a CPU, one product for each expert (`moedraft.cpu.groups`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from moedraft import cpu
from moedraft.core import SHARED, CorruptAdapter
from moedraft.cpu import groups
from moedraft.cpu.products import Product, halves
from moedraft.drafting.experts.adapter import HEAD, Adapter, opposite, read_adapter
from moedraft.drafting.experts.joined import JoinedExperts
from moedraft.drafting.experts.layer import LoRALinear, Multiplies
from moedraft.drafting.experts.merged import MergedExperts, Products
from moedraft.drafting.experts.modules import AdaptableBase, adaptable, keeps_cache
from moedraft.drafting.heads.expert_heads import ExpertHeads
from moedraft.drafting.heads.joined_heads import CommonRows
from moedraft.feature.model import FeatureDraft


@dataclass(frozen=True)
class Prepared:
    """New versions, with what was computed for them before they are used."""

    changes: Mapping[str, Adapter | None]  # by expert; None: the zero adapter
    shared: Adapter | None  # what the weights below hold beside the base's
    products: Products  # base with the shared adapter merged in
    merged: dict[str, tuple[Adapter, Products]]  # by expert: the version, and its merged weights
    heads: Mapping[str, Product]  # their output rows, and the shared adapter's, of a feature drafter
    unadapted: frozenset[str] | None = None  # whom the base alone drafts for; None: as before
    common: CommonRows | None = None  # of all experts' output rows


class ExpertBank:
    """The shared adapter and all experts of one draft base. `select` comes before each forward."""

    def __init__(self, draft: AdaptableBase, merged_cache_mb: int = 512) -> None:
        self.base_hash = draft.weights_hash()  # before the layers below are wrapped
        self.experts: dict[str, Adapter] = {}  # what the rows of each add to base and shared adapter
        self.shared: Adapter | None = None
        self.unadapted: frozenset[str] = frozenset()  # experts whose rows the base alone drafts
        self._held: dict[str, Adapter] = {}  # the newest versions, those of `unadapted` too
        small = cpu.suits(draft)
        half = small and isinstance(draft.hf, FeatureDraft) and halves(draft.hf.fc.weight)
        self.layers = _wrapped(draft, small, half)
        self.tail = frozenset(name for name in self.layers if keeps_cache(name, draft.num_layers))
        budget, copies = merged_cache_mb * 2**20, 1 if half or not small else 2
        self.body = dict(self.layers)  # what `merged` and `joined` are for
        self.heads: ExpertHeads | None = None
        if isinstance(draft.hf, FeatureDraft):
            self.heads = ExpertHeads(draft.hf, self.body.pop(HEAD), budget, copies)
            if small:  # no adapter covers it, so one layout serves for ever
                fuse = LoRALinear(draft.hf.fc, small, half)
                fuse.product = fuse.with_weight(fuse.base_weight())
                draft.hf.fc = fuse  # type: ignore[assignment]
        self.merged = MergedExperts(budget, copies, self.body)
        self.grouped = small and self.heads is None  # a mixed batch of few goes expert by expert
        self.joined = JoinedExperts(self.body, groups.light if self.grouped else None)
        self.selected: tuple[str, ...] | None = None
        self._exact = False
        self._bases: Products = {}  # the base's own weights, where they have a faster layout
        if small:
            self._bases = {n: layer.with_weight(layer.base_weight()) for n, layer in self.body.items()}
        self._bare = False
        self._shared_products: Products = {}

    def measure(self, rows: int) -> None:
        """Find out which way to compute a mixed batch of so many rows is the fastest here."""
        if self.heads is not None:
            self.heads.joined.measure(self.heads.base[1], rows)

    # -- publishing ------------------------------------------------------------------------------

    def publish(self, expert: str, adapter: Adapter | None) -> bool:
        """Use `adapter` for `expert` (None: the zero adapter) from the next forward on.

        Returns whether keys and values change, so that draft caches filled before are stale.
        """
        return expert in self.take(self.prepare({expert: adapter}))

    def prepare(
        self,
        changes: Mapping[str, Adapter | None],
        recent: Sequence[str] = (),
        unadapted: Collection[str] | None = None,
        ahead: bool = False,
    ) -> Prepared:
        """Compute what takes long before new versions can be used, for `take`.

        Any thread may call this while the engine drafts, but only one thread at a time. Weights of the
        experts in `recent` are merged, so that a batch of one of them alone can use them at once. ahead: make
        the output rows of all experts that change, as many as are kept; else each when it is first needed.
        unadapted: the experts whose rows the base alone drafts from then on; None: as it is.
        """
        alone = self.unadapted if unadapted is None else frozenset(unadapted)
        shared, products = self.shared, self._shared_products
        if SHARED in changes:
            shared = changes[SHARED]
            products = self._merged(shared) if shared else {}
        experts = {**self._held, **changes}
        drawn = {name: one for name, one in experts.items() if one and name not in {SHARED, *alone}}
        changed = {name: one for name, one in drawn.items() if SHARED in changes or name in changes}
        merged = {n: (changed[n], self._merged(shared, changed[n])) for n in recent if n in changed}
        heads: dict[str, Product] = {}
        common = None
        if self.heads is not None:
            if shared is not None and SHARED in changes:
                heads[SHARED] = self.heads.made(shared)
            for name in self.heads.kept.fitting(changed) if ahead else ():
                heads[name] = self.heads.made(shared, changed[name])
            common = self.heads.joined.made(list(drawn.values()), shared)
        return Prepared(changes, shared, products, merged, heads, alone, common)

    def take(self, prepared: Prepared) -> set[str]:
        """Use these versions from the next forward on. Returns the experts whose keys and values change."""
        stale = set()
        for expert, adapter in prepared.changes.items():
            before = self.shared if expert == SHARED else self._held.get(expert)
            touched = {name for a in (before, adapter) if a for name in a.deltas}
            if not touched <= self.tail:
                stale.add(expert)
            if expert == SHARED:
                self.shared = adapter
                self._shared_products = prepared.products
                self.merged.clear()
            elif adapter is None:
                self._held.pop(expert, None)
            else:
                self._held[expert] = adapter
            self.merged.drop(expert)
        stale |= self._stand_aside(self.unadapted if prepared.unadapted is None else prepared.unadapted)
        for expert, (merged_of, products) in prepared.merged.items():
            if self.experts.get(expert) is merged_of and prepared.shared is self.shared:
                self.merged.keep(expert, merged_of, products)
        self.joined.drop(prepared.changes.keys())
        if self.heads is not None:
            self.heads.take(prepared.changes, prepared.heads, self.experts, prepared.common)
        self.selected = None
        return stale

    def _stand_aside(self, unadapted: frozenset[str]) -> set[str]:
        """Have the base alone draft for these. Returns the experts whose keys and values change."""
        moved, self.unadapted = unadapted ^ self.unadapted, unadapted
        self.experts = {name: held for name, held in self._held.items() if name not in unadapted}
        if self.shared is not None:
            self.experts |= dict.fromkeys(unadapted, opposite(self.shared))
        self.joined.drop(unadapted | moved)
        for name in unadapted | moved:
            self.merged.drop(name)
            if self.heads is not None:
                self.heads.kept.drop(name)
        adapters = [self.shared, *(self._held.get(name) for name in moved)]
        touched = {name for adapter in adapters if adapter for name in adapter.deltas}
        return set() if touched <= self.tail else set(moved)

    @property
    def recent(self) -> list[str]:
        """The experts whose merged weights were used last."""
        return self.merged.recent

    def read(
        self,
        version: int,
        config: Mapping[str, object],
        tensors: Mapping[str, torch.Tensor],
        vocabulary: torch.Tensor | None = None,
    ) -> Adapter:
        """An `Adapter` from a PEFT configuration and state. Raises CorruptAdapter where it does not fit.

        vocabulary: the token ids of its output rows, as they are stored; None: those of the base.
        """
        weights = {name: layer.base_weight() for name, layer in self.layers.items()}
        if vocabulary is not None and self.heads is None:
            raise CorruptAdapter(
                "the adapter has a vocabulary of its own, and the draft base is no feature drafter."
            )
        if vocabulary is not None and self.heads is not None:
            vocabulary = self.heads.checked(vocabulary)
        return read_adapter(version, config, tensors, weights, vocabulary)

    @property
    def shares_cache(self) -> bool:
        """Whether the draft's keys and values are the same whichever expert drafts."""
        return all(adapter.deltas.keys() <= self.tail for adapter in self.experts.values())

    # -- running ---------------------------------------------------------------------------------

    def version(self, expert: str) -> int:
        """The number of the version that drafts; 0: none, the expert is untrained or stands aside."""
        return 0 if expert in self.unadapted else self.held(expert)

    def held(self, expert: str) -> int:
        """The number of the newest version that was taken, though it may stand aside; 0: there is none."""
        adapter = self.shared if expert == SHARED else self._held.get(expert)
        return adapter.version if adapter else 0

    @property
    def names(self) -> list[str]:
        """The experts that have a version."""
        return list(self._held)

    @property
    def common(self) -> Products:
        """What rows without an expert multiply by, where that is not the base's own layer."""
        return self._bases if self._bare else self._bases | self._shared_products

    def bare(self, on: bool) -> None:
        """Switch the shared adapter and all experts off, so that the base drafts every row, or on again."""
        self._bare, self.selected = on, None

    def drafters(self, rows: list[str]) -> list[str]:
        """Who drafts for rows with these experts: the experts, or the shared draft for all of them.

        The shared draft serves where the batch holds so many experts that their drafts cost too much.
        """
        present = [self.experts[name] for name in {*rows} if name in self.experts]
        many = self.grouped and groups.too_many(present)
        return [SHARED] * len(rows) if many and self.shares_cache else rows

    def select(self, rows: list[str], *, exact: bool = False) -> None:
        """Set the expert of each row of the next forward.

        exact: no row's numbers may depend on the other rows' experts, not even by rounding.
        """
        if (tuple(rows), exact) == (self.selected, self._exact):
            return
        self.selected = None  # until all is set: after an error the next batch begins anew
        bare = self._bare or {*rows} <= self.unadapted
        plain = self._bases if bare else self.common
        names = [] if bare else sorted({name for name in rows if name in self.experts})
        present = {name: self.experts[name] for name in names}
        grouped = self.grouped and not groups.joins(present.values())
        merge = exact or grouped or ({*rows} == {*present} and len(present) == 1)
        merge_now = self.merged.needed if exact else self.merged.of
        merged = merge_now(present, self._merge) if present and merge else None
        for name, layer in self.body.items():
            layer.product = plain.get(name)
            held = [expert for expert, adapter in present.items() if name in adapter.deltas]
            if held and merged is not None:
                layer.product = self._grouped(name, rows, {expert: merged[expert][name] for expert in held})
        if present and merged is None:
            self.joined.select(present, rows)
        if self.heads is not None:
            own = {name: adapter for name, adapter in present.items() if name not in self.unadapted}
            aside = {*rows} if bare else self.unadapted
            self.heads.select(rows, own, self.shared, aside, exact=exact)
        self.selected, self._exact = tuple(rows), exact

    def _grouped(self, name: str, rows: list[str], own: Mapping[str, Product]) -> Multiplies:
        """The layer's product for a batch with these experts: each one's own weight for its rows."""
        layer = self.layers[name]
        if len(own) == 1 and {*rows} == {*own}:
            return own[rows[0]]
        common = layer.product or layer.with_weight(layer.base_weight())
        owners = [row if row in own else SHARED for row in rows]
        return groups.Grouped(owners, {SHARED: common, **own})  # type: ignore[dict-item]

    def _merge(self, adapter: Adapter) -> Products:
        """The layers of an expert, with base, shared adapter and expert in one weight each."""
        return self._merged(self.shared, adapter)

    def _merged(self, *adapters: Adapter | None) -> Products:
        """The layers of the last of these adapters: base and all of them in one weight each, as products."""
        last = adapters[-1]
        names = [name for name in (last.deltas if last else ()) if name in self.body]
        return {name: self.layers[name].with_weight(self._weight(name, adapters)) for name in names}

    def _weight(self, name: str, adapters: Sequence[Adapter | None]) -> torch.Tensor:
        """[out, in]"""
        weight = self.layers[name].base_weight()
        for adapter in adapters:
            if adapter is not None and name in adapter.deltas:
                a, b = adapter.deltas[name]
                weight = weight + b @ a
        return weight


def _wrapped(draft: AdaptableBase, small: bool, half: bool) -> dict[str, LoRALinear]:
    """Put a LoRALinear around every layer of `draft` that an adapter may cover; these, by module name."""
    layers = {}
    for name in adaptable(draft, "full"):
        parent, _, leaf = name.rpartition(".")
        layers[name] = LoRALinear(draft.hf.get_submodule(name), small, half)
        setattr(draft.hf.get_submodule(parent) if parent else draft.hf, leaf, layers[name])
    return layers
