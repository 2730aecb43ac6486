"""The output rows of several experts in one product, for batches in which each row has its own expert.

Experts guess from lists of tokens that have much in common: when lists had 4 096 tokens, those of seven
experts had 5 292 between them. So the rows of all these tokens are multiplied once, low-rank terms give each
row of the batch what its own expert adds, and tokens that are not in the expert's list are set to −inf.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from moedraft.cpu.products import Product
from moedraft.drafting.experts.adapter import HEAD, Adapter
from moedraft.drafting.experts.joined import RESIDENT, Factors, residents
from moedraft.drafting.experts.layer import LoRALinear, Mixed, Multiplies
from moedraft.feature.model import FeatureDraft
from moedraft.feature.vocabulary import places, rows_for, union

WORTH = 0.6  # see `JoinedHeads.worth`; until it is measured
TERMS = 0.8  # what the low-rank terms and the mask leave of the gain: two experts have .2 ms more with them
ROUNDS = 7  # times that a product is timed; the fastest counts
STEP = 1024  # lists are filled up to a multiple of this, so that code is generated for few shapes of products


@dataclass(frozen=True)
class CommonRows:
    """What the output rows of all experts have in common."""

    tokens: torch.Tensor  # int64, ascending: the tokens that at least one expert may guess
    product: Product  # with the base's rows of these tokens and what the shared adapter adds to them
    shared: Adapter | None


class JoinedHeads:
    """Output rows for batches of several experts of one bank."""

    def __init__(self, draft: FeatureDraft, layer: LoRALinear) -> None:
        """layer: the drafter's output layer."""
        self.draft, self.layer = draft, layer
        self.general = draft.vocabulary  # the base's
        self.common: CommonRows | None = None
        # Rows are joined only where they are at most this share of the rows of all experts together.
        self.worth = WORTH
        self._clear()

    def _clear(self) -> None:
        self._members: dict[str, Adapter] = {}  # whose factors are joined, the one used last at the end
        self._numbers: dict[str, int] = {}
        self._factors: Factors | None = None
        self._outside = torch.empty(0)  # by member and token: −inf where it is not in the member's list

    def measure(self, product: Multiplies, rows: int) -> None:
        """Set `worth` by how much longer the base's output rows take for a full batch than for a single row.

        Experts by themselves multiply one row each, the joined rows multiply all rows of the batch.
        """
        weight = self.draft.fc.weight
        x = torch.ones(rows, 1, self.draft.config.hidden_size, dtype=weight.dtype, device=weight.device)
        self.worth = min(1.0, TERMS * _seconds(product, x[:1]) / _seconds(product, x))

    def list_of(self, adapter: Adapter | None) -> torch.Tensor:
        """The tokens that an adapter guesses."""
        return self.general if adapter is None or adapter.vocabulary is None else adapter.vocabulary

    def made(self, experts: Collection[Adapter], shared: Adapter | None) -> CommonRows | None:
        """What these experts have in common; None where no batch gains by it. Any thread may call this."""
        if len(experts) < 2:
            return None
        known, spare = self.common, self.list_of(shared)
        tokens = union([self.list_of(adapter) for adapter in experts])
        longest = sorted(len(self.list_of(adapter)) for adapter in experts)[-RESIDENT:]
        if len(tokens) > self.worth * sum(longest):  # no batch of RESIDENT experts or fewer would gain by it
            return None
        others = spare[places(spare, tokens) < 0]
        tokens = union([tokens, others[: -len(tokens) % STEP]])
        if known is not None and known.shared is shared and torch.equal(known.tokens, tokens):
            return known
        weight = self.draft.rows(tokens)
        if shared is not None and HEAD in shared.deltas:
            a, b = shared.deltas[HEAD]
            weight = weight + rows_for(b, spare, tokens) @ a
        return CommonRows(tokens, self.layer.with_weight(weight), shared)

    def take(self, common: CommonRows | None) -> None:
        """Use `common`, and the newest versions of the experts, from the next forward on."""
        self.common = common
        self._clear()

    def pays(self, present: Mapping[str, Adapter]) -> bool:
        """Whether one product over the common rows costs less than one product for each expert."""
        each = sum(len(self.list_of(adapter)) for adapter in present.values())
        return self.common is not None and len(present) > 1 and len(self.common.tokens) <= self.worth * each

    def select(
        self, rows: Sequence[str], present: Mapping[str, Adapter]
    ) -> tuple[torch.Tensor, RowsOfExperts]:
        """The tokens [v], and what multiplies hidden states [B, T, H] of rows of these experts."""
        assert self.common is not None
        if any(self._members.get(name) is not adapter for name, adapter in present.items()):
            self._join(present, self.common.tokens)
        for name in present:
            self._members[name] = self._members.pop(name)
        numbers = torch.tensor([self._numbers[row] for row in rows], device=self._outside.device)
        return self.common.tokens, RowsOfExperts(
            self.common.product, self._factors, numbers, self._outside[numbers][:, None]
        )

    def _join(self, present: Mapping[str, Adapter], tokens: torch.Tensor) -> None:
        members = residents(self._members, present)
        numbers = {name: number for number, name in enumerate(members)}  # also of `_outside`
        deltas = {}
        for name, adapter in members.items():
            if HEAD in adapter.deltas:
                a, b = adapter.deltas[HEAD]
                deltas[numbers[name]] = a, rows_for(b, self.list_of(adapter), tokens)
        layer = self.layer
        factors = Factors(deltas, small=layer.small, half=layer.halved) if deltas else None
        inside = torch.stack([places(tokens, self.list_of(one)) >= 0 for one in members.values()])
        zeros = torch.zeros(inside.shape, dtype=self.draft.fc.weight.dtype, device=tokens.device)
        outside = zeros.masked_fill_(~inside, -torch.inf)
        # All at once, at the end: what failed above is tried again at the next batch.
        self._members, self._numbers, self._factors, self._outside = members, numbers, factors, outside


def _seconds(product: Multiplies, x: torch.Tensor) -> float:
    """The shortest time that it took."""
    taken = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        product(x)
        if x.is_cuda:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return min(taken)


class RowsOfExperts:
    """x [B, T, H] → [B, T, v]: each row's logits by its own expert, −inf outside its list."""

    def __init__(
        self, common: Product, factors: Factors | None, numbers: torch.Tensor, outside: torch.Tensor
    ) -> None:
        """numbers int64 [B]: each row's expert, as `factors` number them. outside [B, 1, v]: 0 or −inf."""
        self.outside = outside
        self.product = (
            common if factors is None else Mixed(common, factors.down, factors.up, factors.mask(numbers))
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x) + self.outside
