"""Many LoRA experts over one draft base, any mix of them in one batch.

Every adapted linear layer computes `x W' + (x Aᵀ ∘ mask) Bᵀ`, where W' is the base with the shared
adapter merged in, and A and B are the blocks of the experts present in the batch, end to end: one matrix
product each, with a 0/1 mask that lets a row see its own expert's block only. A batch with a single
expert uses weights merged once and kept. With a small model on a CPU, where products with few rows cost
what reading their weights costs, so does a mixed batch, expert by expert; one with more than a few experts
is drafted by W' alone there, since reading them all would cost more than they bring. Rows without an expert
use W' alone.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from moedraft.core import SHARED, CorruptAdapter
from moedraft.cpu.products import SMALL, Product, expect
from moedraft.drafting.modules import adaptable, keeps_cache
from moedraft.models import LanguageModel

FEW_EXPERTS = 2  # in one batch of a small model on a CPU; with more of them the shared draft serves all
PREFIX, LORA_A, LORA_B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}  # that an adapter may have

Delta = tuple[torch.Tensor, torch.Tensor]  # A [r, in], B [out, r] with the scaling folded in


@dataclass(frozen=True)
class Adapter:
    """One version of one expert, ready to run."""

    version: int
    deltas: Mapping[str, Delta]  # by module name


@dataclass(frozen=True)
class Prepared:
    """New versions by expert (None: the zero adapter), with what was computed for them ahead of their use."""

    changes: Mapping[str, Adapter | None]
    weights: dict[str, torch.Tensor]  # base and shared adapter, by module
    products: dict[str, Product]  # of these
    merged: dict[str, tuple[Adapter, dict[str, Product]]]  # by expert


class LoRALinear(nn.Module):
    """A linear layer of the draft base that the bank can bend, per row of the batch."""

    def __init__(self, base: nn.Module, small: bool = False) -> None:
        super().__init__()
        self.base = base
        self.small = small  # part of a small model
        self.transposed = not isinstance(base, nn.Linear)  # GPT-2's Conv1D keeps [in, out]
        self.product: Product | None = None  # replaces the base's: shared and, maybe, one expert merged
        self.groups: list[tuple[torch.Tensor, Product]] = []  # rows of the batch and what they go through
        self.blocks: Delta | None = None  # A [R, in], B [out, R] of all experts in the batch
        self.mask: torch.Tensor | None = None  # [B, 1, R]
        if small:
            expect(self.base_weight(), base.bias)  # type: ignore[arg-type]

    @property
    def weight(self) -> nn.Parameter:
        """The base's, as code of the model's own may ask for."""
        return self.base.weight  # type: ignore[return-value]

    def base_weight(self) -> torch.Tensor:
        """[out, in]"""
        weight: torch.Tensor = self.base.weight  # type: ignore[assignment]
        return weight.T if self.transposed else weight

    def with_weight(self, weight: torch.Tensor) -> Product:
        """The same layer with another weight [out, in]."""
        return Product(weight, self.base.bias, small=self.small)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.groups:
            return self._by_group(x)
        y: torch.Tensor = self.base(x) if self.product is None else self.product(x)
        if self.blocks is not None and self.mask is not None:
            down, up = self.blocks
            y = y + nn.functional.linear(nn.functional.linear(x, down) * _shaped(self.mask, x), up)
        return y

    def _by_group(self, x: torch.Tensor) -> torch.Tensor:
        batch = sum(len(rows) for rows, _ in self.groups)
        inner = x.view(batch, -1, x.shape[-1])
        y = x.new_empty(batch, inner.shape[1], self.groups[0][1].weight.shape[0])
        for rows, product in self.groups:
            y[rows] = product(inner[rows])
        return y.view(*x.shape[:-1], y.shape[-1])


def _shaped(mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """[B, 1, R] → what multiplies x's rows: [B, T, h], [B·T, h] with T tokens of each row, or [B, …, h]."""
    if x.dim() == 2:
        return mask[:, 0].repeat_interleave(x.shape[0] // mask.shape[0], dim=0)
    return mask.view(mask.shape[0], *[1] * (x.dim() - 2), mask.shape[2])


class ExpertBank:
    """The shared adapter and all experts of one draft base. `select` comes before each forward."""

    def __init__(self, draft: LanguageModel, scope: str = "tail", merged_cache_mb: int = 512) -> None:
        self.base_hash = draft.weights_hash()  # before the layers below are wrapped
        self.experts: dict[str, Adapter] = {}
        self.shared: Adapter | None = None
        self.layers: dict[str, LoRALinear] = {}
        small = draft.hf.num_parameters() <= SMALL
        for name in adaptable(draft, "full"):
            parent, _, leaf = name.rpartition(".")
            layer = LoRALinear(draft.hf.get_submodule(name), small)
            setattr(draft.hf.get_submodule(parent) if parent else draft.hf, leaf, layer)
            self.layers[name] = layer
        self.tail = frozenset(name for name in self.layers if keeps_cache(name, draft.num_layers))
        bases = {name: layer.with_weight(layer.base_weight()) for name, layer in self.layers.items()}
        self._bases = bases if small else {}
        self.merged: OrderedDict[str, dict[str, Product]] = OrderedDict()
        self.merged_budget = merged_cache_mb * 2**20
        self.selected: tuple[str, ...] | None = None
        self._bare = False
        self._shared_weights: dict[str, torch.Tensor] = {}
        self._shared_products: dict[str, Product] = {}

    # -- publishing ------------------------------------------------------------------------------

    def publish(self, expert: str, adapter: Adapter | None) -> bool:
        """Use `adapter` for `expert` (None: the zero adapter) from the next forward on.

        Returns whether keys and values change, so that draft caches filled before are stale.
        """
        return expert in self.take(self.prepare({expert: adapter}))

    def prepare(self, changes: Mapping[str, Adapter | None], recent: Sequence[str] = ()) -> Prepared:
        """What takes long about new versions; in any thread, while others draft, but by one at a time.

        Experts in `recent` are made ready for batches of their own.
        """
        weights, products = self._shared_weights, self._shared_products
        if SHARED in changes:
            shared = changes[SHARED]
            deltas = shared.deltas if shared else {}
            weights = {name: self.layers[name].base_weight() + b @ a for name, (a, b) in deltas.items()}
            products = {name: self.layers[name].with_weight(weight) for name, weight in weights.items()}
        again = [name for name in recent if SHARED in changes or name in changes]
        adapters = {name: changes.get(name, self.experts.get(name)) for name in again}
        merged = {name: (a, self._merged(a, weights)) for name, a in adapters.items() if a is not None}
        return Prepared(changes, weights, products, merged)

    def take(self, prepared: Prepared) -> set[str]:
        """Use these versions from the next forward on; those of them that change keys and values."""
        stale = set()
        for expert, adapter in prepared.changes.items():
            before = self.shared if expert == SHARED else self.experts.get(expert)
            touched = {name for a in (before, adapter) if a for name in a.deltas}
            if not touched <= self.tail:
                stale.add(expert)
            if expert == SHARED:
                self.shared = adapter
                self._shared_weights, self._shared_products = prepared.weights, prepared.products
                self.merged.clear()
            elif adapter is None:
                self.experts.pop(expert, None)
            else:
                self.experts[expert] = adapter
            self.merged.pop(expert, None)
        for expert, (merged_of, products) in prepared.merged.items():
            if self.experts.get(expert) is merged_of and prepared.weights is self._shared_weights:
                self.merged[expert] = products
        self.selected = None
        return stale

    @property
    def recent(self) -> list[str]:
        """Experts whose merged weights were used last."""
        return list(self.merged)[-FEW_EXPERTS:]

    def read(
        self, version: int, config: Mapping[str, object], tensors: Mapping[str, torch.Tensor]
    ) -> Adapter:
        """An `Adapter` from a PEFT configuration and state. Raises CorruptAdapter where it does not fit."""
        deltas: dict[str, Delta] = {}
        firsts = [key for key in tensors if key.startswith(PREFIX) and key.endswith(LORA_A)]
        names = {key.removeprefix(PREFIX).removesuffix(LORA_A) for key in firsts}
        if not names or len(tensors) != 2 * len(names):
            raise CorruptAdapter("the adapter holds something else than pairs of lora_A and lora_B.")
        for name in sorted(names):
            if name not in self.layers:
                raise CorruptAdapter(f"the adapter's module {name!r} does not exist in the draft base.")
            base = self.layers[name].base_weight()
            a, b = tensors[PREFIX + name + LORA_A], tensors.get(PREFIX + name + LORA_B)
            if b is None or a.shape[1:] != base.shape[1:] or b.shape != (base.shape[0], len(a)):
                raise CorruptAdapter(f"the adapter's shapes for {name!r} do not fit the draft base.")
            if not {a.dtype, b.dtype} <= DTYPES:
                raise CorruptAdapter(f"the adapter's numbers for {name!r} are {a.dtype} and {b.dtype}.")
            try:
                scale = scaling(config, name, len(a))
            except (
                ValueError,
                TypeError,
                OverflowError,
                ZeroDivisionError,
                RecursionError,
                re.error,
            ) as error:
                raise CorruptAdapter(
                    f"the adapter's scaling for {name!r} makes no sense: {error}."
                ) from error
            deltas[name] = (a.to(base), (b * scale).to(base))
        return Adapter(version, deltas)

    @property
    def shares_cache(self) -> bool:
        """Whether keys and values are the same whichever expert is on."""
        return all(adapter.deltas.keys() <= self.tail for adapter in self.experts.values())

    # -- running ---------------------------------------------------------------------------------

    def version(self, expert: str) -> int:
        adapter = self.shared if expert == SHARED else self.experts.get(expert)
        return adapter.version if adapter else 0

    def bare(self, on: bool) -> None:
        """While on, every row is drafted by the base as it came, without shared adapter or experts."""
        self._bare, self.selected = on, None

    def drafters(self, rows: list[str]) -> list[str]:
        """Who should draft for rows of these experts: they, or the shared draft where many cost too much."""
        many = len({name for name in rows if name in self.experts}) > FEW_EXPERTS
        return [SHARED] * len(rows) if many and self._bases and self.shares_cache else rows

    def select(self, rows: list[str]) -> None:
        """The expert of each row of the next forward."""
        key = tuple(rows)
        if key == self.selected:
            return
        self.selected = key
        if self._bare:
            self._clear(self._bases)
            return
        self._clear(self._bases | self._shared_products)
        present = sorted({name for name in rows if name in self.experts})
        alone = len(present) == 1 and all(name == present[0] for name in rows)
        merged = self._merge(present) if alone or self._bases else None
        for name, layer in self.layers.items():
            if merged is None:
                self._mix(layer, name, rows, present)
            elif alone:
                layer.product = merged[present[0]].get(name, layer.product)
            else:
                self._group(layer, name, rows, merged)

    def _clear(self, products: Mapping[str, Product]) -> None:
        for name, layer in self.layers.items():
            layer.product, layer.groups, layer.blocks, layer.mask = products.get(name), [], None, None

    def _group(
        self, layer: LoRALinear, name: str, rows: list[str], merged: Mapping[str, Mapping[str, Product]]
    ) -> None:
        """Rows by expert, those without an own weight here together."""
        own = [row if name in merged.get(row, ()) else SHARED for row in rows]
        if set(own) == {SHARED}:
            return
        assert layer.product is not None  # a small model: its base is a product too
        for expert in dict.fromkeys(own):
            at = torch.tensor([b for b, row in enumerate(own) if row == expert])
            layer.groups.append((at, layer.product if expert == SHARED else merged[expert][name]))

    def _mix(self, layer: LoRALinear, name: str, rows: list[str], present: list[str]) -> None:
        parts = [(expert, self.experts[expert].deltas.get(name)) for expert in present]
        held = [(expert, delta) for expert, delta in parts if delta is not None]
        if not held:
            return
        layer.blocks = (torch.cat([a for _, (a, _) in held]), torch.cat([b for _, (_, b) in held], dim=1))
        owners = [expert for expert, (a, _) in held for _ in range(a.shape[0])]
        mask = [[float(owner == row) for owner in owners] for row in rows]
        layer.mask = torch.tensor(mask, dtype=layer.blocks[0].dtype, device=layer.blocks[0].device)[:, None]

    def _merge(self, present: list[str]) -> dict[str, dict[str, Product]] | None:
        """Each expert's weights merged into the base, kept up to the memory budget; None if over it."""
        sizes = [self._size(expert) for expert in present]
        if len(present) * max(sizes, default=0) > self.merged_budget:
            return None
        for expert in present:
            if expert not in self.merged:
                self.merged[expert] = self._merged(self.experts[expert], self._shared_weights)
            self.merged.move_to_end(expert)
        while sum(self._size(expert) for expert in self.merged) > self.merged_budget:
            self.merged.popitem(last=False)
        return {expert: self.merged[expert] for expert in present}

    def _size(self, expert: str) -> int:
        """Bytes of its merged weights; a `Product` of a small model keeps two copies."""
        deltas = self.experts[expert].deltas.values()
        copies = 2 if self._bases else 1
        return copies * sum(b.shape[0] * a.shape[1] * a.element_size() for a, b in deltas)

    def _merged(self, adapter: Adapter, weights: Mapping[str, torch.Tensor]) -> dict[str, Product]:
        """Its layers with base, shared adapter (`weights`, where it has the layer) and itself in one."""
        return {
            name: self.layers[name].with_weight(weights.get(name, self.layers[name].base_weight()) + b @ a)
            for name, (a, b) in adapter.deltas.items()
        }


def scaling(config: Mapping[str, object], name: str, rank: int) -> float:
    """PEFT's factor on B·A: lora_alpha / r, or lora_alpha / √r with rsLoRA; patterns by module suffix.

    Raises ValueError, TypeError or re.error for a configuration that makes no sense.
    """
    alpha = float(str(config.get("lora_alpha", rank)))
    patterns = config.get("alpha_pattern")
    if isinstance(patterns, Mapping):
        for pattern, value in patterns.items():
            if re.fullmatch(rf"(.*\.)?({pattern})", name):
                alpha = float(value)
                break
    if not math.isfinite(alpha):
        raise ValueError(f"lora_alpha is {alpha}")
    return float(alpha / (rank**0.5 if config.get("use_rslora") else rank))
