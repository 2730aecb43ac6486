"""The feature drafter that learns: the trainer's own copy, with an adapter for each expert and a shared one.

Adapters change the queries, the layer's output projection, its MLP and the output rows. `fc`, keys,
values and norms stay as they are, so that the drafter's cache is the same whichever expert drafts. Adapters
are exported in PEFT's format and are read from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn

from moedraft.core import SHARED
from moedraft.cpu.products import multiplies_bfloat16
from moedraft.distill.joint.feature_batches import FeatureBatch
from moedraft.distill.joint.joint_lora import JointLinear, LowRank, Routing
from moedraft.distill.joint.joint_unroll import unroll
from moedraft.distill.peft_config import peft_config
from moedraft.drafting.adapter import HEAD, LORA_A, LORA_B, PREFIX, read_adapter
from moedraft.feature.model import FeatureDraft
from moedraft.feature.vocabulary import checked, places, rows_for

LAYER = "layers.0."
MODULES = (
    *(f"{LAYER}self_attn.{name}" for name in ("q_proj", "o_proj")),
    *(f"{LAYER}mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    HEAD,
)


@dataclass(frozen=True)
class Guesses:
    """What one expert guesses for its rows of a batch."""

    rows: slice
    numbers: (
        torch.Tensor | None
    )  # int64 [n]: the tokens of the columns of `logits`, as numbers in the draft vocabulary; None: all
    logits: torch.Tensor  # [rows, n]


class JointStudent:
    """Owns its copy of the draft base and all adapters on it."""

    def __init__(
        self, draft: FeatureDraft, base_hash: str, *, rank: int = 32, shared_rank: int = 32, name: str = ""
    ) -> None:
        """rank: of an expert's adapter. name: of the draft base, for the adapters' configuration."""
        self.draft, self.base_hash, self.name = draft.requires_grad_(False), base_hash, name
        self.general = draft.vocabulary  # the draft base's own
        self._ranks = {True: shared_rank, False: rank}
        self.routing = Routing()
        self.lists: dict[
            str, torch.Tensor
        ] = {}  # by expert: numbers in the draft vocabulary, see `use_lists`
        self.layers: dict[str, JointLinear] = {}
        self.names: set[str] = set()  # of the adapters that are there
        for module in MODULES:
            parent, _, leaf = module.rpartition(".")
            holder = draft.get_submodule(parent) if parent else draft
            self.layers[module] = JointLinear(draft.get_submodule(module), self.routing)  # type: ignore[arg-type]
            setattr(holder, leaf, self.layers[module])

    # -- adapters --------------------------------------------------------------------------------

    def add(self, name: str) -> None:
        """Add an adapter of `name` that changes nothing yet, unless there is one."""
        if name not in self.names:
            self.names.add(name)
            for layer in self.layers.values():
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
        weights = {module: layer.base.weight.float() for module, layer in self.layers.items()}
        own = self.general
        if vocabulary is not None:
            own = checked(vocabulary, self.draft.config.vocab_size).to(own.device)
        deltas = dict(read_adapter(version, config, tensors, weights, own).deltas)
        if HEAD in deltas:
            a, b = deltas[HEAD]
            deltas[HEAD] = a, rows_for(b, own, self.draft.vocabulary)
        self.remove(name)
        self.names.add(name)
        for module, (a, b) in deltas.items():
            self.layers[module].add(name, len(a))
            part = self.layers[module].adapter(name)
            assert part is not None
            with torch.no_grad():
                part.a.copy_(a), part.b.copy_(b)

    def export(
        self, name: str, vocabulary: torch.Tensor | None = None
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """The adapter of `name` as it is now: its PEFT configuration and copies of its tensors.

        vocabulary: the tokens, int64 and ascending, of its output rows; None: those of the draft base.
        """
        vocabulary = self.general if vocabulary is None else vocabulary.to(self.general.device)
        tensors, ranks = {}, {}
        for module, part in self._parts(name).items():
            ranks[module] = len(part.a)
            b: torch.Tensor = part.b
            if module == HEAD:
                b = rows_for(b, self.draft.vocabulary, vocabulary)
            for key, value in ((LORA_A, part.a), (LORA_B, b)):
                tensors[PREFIX + module + key] = (
                    value.detach().to("cpu", torch.float32, copy=True).contiguous()
                )
        config = peft_config(ranks, self.name).to_dict()
        plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
        return plain, tensors

    def widen(self, vocabulary: torch.Tensor, optimisers: Iterable[torch.optim.Optimizer] = ()) -> None:
        """Draft these tokens from now on (int64, ascending); all that could be drafted before are among them.

        What was learned stays, in the adapters and in the optimisers; rows of new tokens begin at zero.
        """
        before, head = self.draft.vocabulary, self.layers[HEAD]
        self.draft.vocabulary, self.lists = vocabulary, {}
        head.base.weight = nn.Parameter(self.draft.rows(vocabulary), requires_grad=False)
        for part in (head.adapter(name) for name in self.names):
            if part is not None:
                old, part.b = part.b, nn.Parameter(rows_for(part.b.detach(), before, vocabulary))
                for optimiser in optimisers:
                    _exchange(optimiser, old, part.b, lambda rows: rows_for(rows, before, vocabulary))

    def use_lists(self, lists: Mapping[str, torch.Tensor]) -> None:
        """Have these experts guess from their own tokens alone (int64, ascending), as they will be served."""
        vocabulary = self.draft.vocabulary
        found = {name: places(own.to(vocabulary.device), vocabulary) for name, own in lists.items()}
        self.lists = {name: numbers[numbers >= 0] for name, numbers in found.items()}

    def parameters(self, name: str) -> list[nn.Parameter]:
        """The parameters of the adapter of `name`."""
        return [p for part in self._parts(name).values() for p in part.parameters()]

    def _parts(self, name: str) -> dict[str, LowRank]:
        parts = {module: layer.adapter(name) for module, layer in self.layers.items()}
        return {module: part for module, part in parts.items() if part is not None}

    # -- running ---------------------------------------------------------------------------------

    def outputs(self, batch: FeatureBatch, steps: int, *, shared: bool = True) -> Iterator[torch.Tensor]:
        """The drafter's outputs [B, A, H] of steps 1 … `steps`; each row with its own expert's adapter."""
        self.routing.shared = shared
        counts = [1] * len(batch.owners)
        self._route(batch.owners, counts)
        for hidden in unroll(self.draft, batch, steps):
            yield hidden
            self._route(batch.owners, counts)  # a call of `logits` in between has changed the routing

    def logits(self, hidden: torch.Tensor, owners: list[str], counts: list[int]) -> torch.Tensor:
        """hidden [N, H]: counts[b] rows of the batch's row b after another → logits [N, draft vocabulary]."""
        self._route(owners, counts)
        return self.draft.logits(hidden)

    def guesses(self, hidden: torch.Tensor, owners: list[str], counts: list[int]) -> Iterator[Guesses]:
        """As `logits`, but one result for each expert, over the tokens of its own list alone."""
        first = 0
        for name, group in groupby(zip(owners, counts, strict=True), key=lambda pair: pair[0]):
            count = sum(number for _, number in group)
            mine, numbers = slice(first, first + count), self.lists.get(name)
            first += count
            if not count:
                continue
            if numbers is None:
                yield Guesses(mine, None, self.logits(hidden[mine], [name], [count]))
                continue
            states = hidden[mine] if self.draft.config.norm_output else self.draft.norm(hidden[mine])
            yield Guesses(mine, numbers, self.layers[HEAD].rows(states, name, numbers))

    def _route(self, owners: list[str], counts: list[int]) -> None:
        pairs = groupby(zip(owners, counts, strict=True), key=lambda pair: pair[0])
        self.routing.parts = [(name, sum(count for _, count in group)) for name, group in pairs]

    def precision(self) -> Any:
        """A context that computes in bfloat16 where the processor multiplies it, and changes nothing else."""
        device = self.draft.fc.weight.device.type
        fast = device != "cpu" or multiplies_bfloat16()
        return torch.autocast(device, torch.bfloat16) if fast else nullcontext()


def _exchange(
    optimiser: torch.optim.Optimizer,
    old: nn.Parameter,
    new: nn.Parameter,
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Replace `old` by `new` in `optimiser`; `change` turns the rows of its state into those of `new`."""
    for group in optimiser.param_groups:
        group["params"] = [new if parameter is old else parameter for parameter in group["params"]]
    if old in optimiser.state:
        known = optimiser.state.pop(old)
        optimiser.state[new] = {key: change(v) if v.dim() == 2 else v for key, v in known.items()}
