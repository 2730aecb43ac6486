"""The adapters on one draft base that learn together: a shared one, and one for each expert.

They are exported in PEFT's format and are read from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn

from moedraft.core import SHARED
from moedraft.distill.lora.joint_lora import JointLinear, LowRank, Routing
from moedraft.distill.lora.ranks import ALL, Kept, cut, filled_up
from moedraft.distill.peft_config import peft_config
from moedraft.drafting.experts.adapter import LORA_A, LORA_B, PREFIX, Delta, read_adapter


class JointAdapters:
    """Puts the adapters into the layers of `model`, whose own weights do not learn."""

    has_lists = False  # whether each expert may guess from tokens of its own alone
    vocab_size: int  # of the tokens that records may hold
    general: torch.Tensor  # int64, ascending: the tokens that the draft base guesses by itself

    def __init__(
        self,
        model: nn.Module,
        modules: Sequence[str],
        base_hash: str,
        *,
        rank: int,
        shared_rank: int,
        name: str = "",
        of_experts: Sequence[str] | None = None,
    ) -> None:
        """modules: of the linear layers. of_experts: those among them that experts change; None: all.

        rank: of an expert's adapter. name: of the draft base, for the adapters' configuration.
        """
        model.requires_grad_(False)
        self.base_hash, self.name = base_hash, name
        self._ranks = {True: shared_rank, False: rank}
        self._of_experts = set(modules if of_experts is None else of_experts)
        self.routing = Routing()
        self.lists: dict[str, torch.Tensor] = {}  # by expert: numbers in the draft vocabulary
        self.layers: dict[str, JointLinear] = {}
        self.names: set[str] = set()  # of the adapters that are there
        for module in modules:
            parent, _, leaf = module.rpartition(".")
            holder = model.get_submodule(parent) if parent else model
            self.layers[module] = JointLinear(model.get_submodule(module), self.routing)
            setattr(holder, leaf, self.layers[module])

    @property
    def vocabulary(self) -> torch.Tensor:
        """int64, ascending: the tokens that can be drafted now."""
        return self.general

    @property
    def device(self) -> torch.device:
        return next(iter(self.layers.values())).weight.device

    def add(self, name: str) -> None:
        """Add an adapter of `name` that changes nothing yet, unless there is one."""
        if name not in self.names:
            self.names.add(name)
            for module, layer in self.layers.items():
                if name == SHARED or module in self._of_experts:
                    layer.add(name, self._ranks[name == SHARED])

    def remove(self, name: str) -> None:
        self.names.discard(name)
        for layer in self.layers.values():
            layer.remove(name)

    def load(
        self,
        name: str,
        version: int,
        config: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        vocabulary: torch.Tensor | None = None,
    ) -> None:
        """Take the adapter of `name` from PEFT's format. Raises CorruptAdapter where it does not fit.

        vocabulary: the tokens that its output rows stand for; None: those of the draft base.
        """
        own = self._listed(vocabulary)
        deltas = read_adapter(version, config, tensors, self._shapes(), own).deltas
        self._put(name, {module: (a, self._placed(module, b, own)) for module, (a, b) in deltas.items()})

    def export(
        self, name: str, vocabulary: torch.Tensor | None = None, kept: Kept = ALL, scaling: float = 1.0
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """The adapter of `name` as it is now: its PEFT configuration and copies of its tensors.

        vocabulary: the tokens, int64 and ascending, of its output rows; None: those of the draft base.
        kept: decides its rank, see `cut`. scaling: PEFT's factor on what it adds.
        """
        parts = {
            module: (part.a, self._rows(module, part.b, vocabulary))
            for module, part in self.low_ranks(name).items()
        }
        tensors, ranks = {}, {}
        for module, pair in cut(parts, kept).items():
            ranks[module] = len(pair[0])
            for key, value in zip((LORA_A, LORA_B), pair, strict=True):
                tensors[PREFIX + module + key] = (
                    value.detach().to("cpu", torch.float32, copy=True).contiguous()
                )
        config = peft_config(ranks, self.name, scaling=scaling).to_dict()
        plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
        return plain, tensors

    def grow(self, name: str, scaling: float = 1.0) -> None:
        """Give the adapter of `name` the rank that it learns with, and undo the scaling of its export."""
        rank, parts = self._ranks[name == SHARED], self.low_ranks(name)
        self._put(name, {module: filled_up(p.a, p.b / scaling, rank) for module, p in parts.items()})

    def parameters(self, name: str) -> list[nn.Parameter]:
        """The parameters of the adapter of `name`."""
        return [p for part in self.low_ranks(name).values() for p in part.parameters()]

    def modules(self, name: str) -> tuple[str, ...]:
        """The layers that the adapter of `name` changes, in ascending order."""
        return tuple(sorted(self.low_ranks(name)))

    def widen(self, vocabulary: torch.Tensor, optimisers: Iterable[torch.optim.Optimizer] = ()) -> None:
        """Draft these tokens from now on; there is nothing to do where all tokens can be drafted."""

    def use_lists(self, lists: Mapping[str, torch.Tensor]) -> None:
        """Have these experts guess from their own tokens alone, where `has_lists`."""

    def _listed(self, vocabulary: torch.Tensor | None) -> torch.Tensor | None:
        """What an adapter's output rows stand for; None: every row of the layer. Raises CorruptAdapter."""
        return None

    def _placed(self, module: str, b: torch.Tensor, own: torch.Tensor | None) -> torch.Tensor:
        """`b` of an adapter with these tokens, with the rows that the layer has here."""
        return b

    def _rows(self, module: str, b: torch.Tensor, vocabulary: torch.Tensor | None) -> torch.Tensor:
        """The rows of `b` that are exported."""
        return b

    def _shapes(self) -> dict[str, torch.Tensor]:
        """Tensors with the layers' shapes and device, by module; each takes the memory of one number."""
        weights = {module: layer.weight for module, layer in self.layers.items()}
        return {name: torch.zeros(1, 1, device=one.device).expand(one.shape) for name, one in weights.items()}

    def _put(self, name: str, deltas: Mapping[str, Delta]) -> None:
        """Have `name` be these low-rank terms, in place of what it was."""
        self.remove(name)
        self.names.add(name)
        for module, (a, b) in deltas.items():
            self.layers[module].add(name, len(a))
            part = self.layers[module].adapter(name)
            assert part is not None
            with torch.no_grad():
                part.a.copy_(a), part.b.copy_(b)

    def low_ranks(self, name: str) -> dict[str, LowRank]:
        """The adapter of `name`, by layer."""
        found = ((module, layer.adapter(name)) for module, layer in self.layers.items())
        return {module: part for module, part in found if part is not None}

    def _route(self, owners: Sequence[str], counts: Sequence[int]) -> None:
        """Have the next rows, counts[b] for the owner b, go through their owners' adapters."""
        self.routing.parts = side_by_side(owners, counts)


def side_by_side(owners: Sequence[str], counts: Sequence[int]) -> list[tuple[str, int]]:
    """Each owner once for its neighbouring rows, with all of their counts."""
    pairs = groupby(zip(owners, counts, strict=True), key=lambda pair: pair[0])
    return [(name, sum(count for _, count in group)) for name, group in pairs]
