"""The feature drafter that learns: the trainer's own copy, with an adapter for each expert and a shared one.

Adapters change the queries, the layer's output projection, its MLP and the output rows. `fc`, keys,
values and norms stay as they are, so that the drafter's cache is the same whichever expert drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moedraft.cpu.products import multiplies_bfloat16
from moedraft.distill.features.feature_batches import FeatureBatch
from moedraft.distill.features.unrolled import unroll
from moedraft.distill.lora.adapters import JointAdapters, side_by_side
from moedraft.drafting.experts.adapter import HEAD
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


class FeatureStudent(JointAdapters):
    """Owns its copy of the draft base and all adapters on it."""

    has_lists = True

    def __init__(
        self, draft: FeatureDraft, base_hash: str, *, rank: int = 32, shared_rank: int = 32, name: str = ""
    ) -> None:
        """rank: of an expert's adapter. name: of the draft base, for the adapters' configuration."""
        super().__init__(draft, MODULES, base_hash, rank=rank, shared_rank=shared_rank, name=name)
        self.draft = draft
        self.general, self.vocab_size = draft.vocabulary, draft.config.vocab_size

    @property
    def vocabulary(self) -> torch.Tensor:
        return self.draft.vocabulary

    # -- adapters --------------------------------------------------------------------------------

    def _listed(self, vocabulary: torch.Tensor | None) -> torch.Tensor:
        if vocabulary is None:
            return self.general
        return checked(vocabulary, self.vocab_size).to(self.general.device)

    def _placed(self, module: str, b: torch.Tensor, own: torch.Tensor | None) -> torch.Tensor:
        if module != HEAD:
            return b
        assert own is not None
        return rows_for(b, own, self.draft.vocabulary)  # tokens that the adapter lacks get zeros

    def _rows(self, module: str, b: torch.Tensor, vocabulary: torch.Tensor | None) -> torch.Tensor:
        if module != HEAD:
            return b
        own = self.general if vocabulary is None else vocabulary.to(self.general.device)
        return rows_for(b, self.draft.vocabulary, own)

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
        for name, count in side_by_side(owners, counts):
            mine, numbers = slice(first, first + count), self.lists.get(name)
            first += count
            if not count:
                continue
            if numbers is None:
                yield Guesses(mine, None, self.logits(hidden[mine], [name], [count]))
                continue
            states = hidden[mine] if self.draft.config.norm_output else self.draft.norm(hidden[mine])
            yield Guesses(mine, numbers, self.layers[HEAD].rows(states, name, numbers))

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
