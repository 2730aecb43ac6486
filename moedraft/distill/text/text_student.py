"""An independent draft model that learns jointly: the trainer's own copy, with all adapters on it.

The shared adapter changes every linear layer, an expert those of its scope. With the scope "tail" an expert
leaves keys and values as the shared adapter makes them, as it does in the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from moedraft.core import SHARED
from moedraft.distill.lora.adapters import JointAdapters, side_by_side
from moedraft.distill.lora.joint_lora import LowRank
from moedraft.distill.text.batches import RecordBatch
from moedraft.distill.text.forward import OutputLayer, ends_in_head, hidden_at, logits_at
from moedraft.drafting.experts.modules import adaptable
from moedraft.models import LanguageModel

Part = tuple[str, slice]  # an expert, and its rows


class TextStudent(JointAdapters):
    """Owns its copy of the draft model and all adapters on it.

    Raises UnsupportedModel where there are no layers that an adapter could change.
    """

    def __init__(
        self, draft: LanguageModel, *, scope: str = "tail", rank: int = 64, shared_rank: int = 64
    ) -> None:
        """scope: of the experts, as in `adaptable`."""
        modules = adaptable(draft, "full")
        super().__init__(
            draft.hf,
            modules,
            draft.weights_hash(),
            rank=rank,
            shared_rank=shared_rank,
            name=draft.name,
            of_experts=adaptable(draft, scope),
        )
        self.draft, self.head = draft, self.layers[modules[-1]]
        self.vocab_size = draft.vocab_size
        self.general = torch.arange(draft.vocab_size, device=draft.device)
        self._ends: bool | None = None  # what `ends_in_head` has found; None before its first call

    def logits(self, batch: RecordBatch, owners: Sequence[str]) -> torch.Tensor:
        """The logits [N, V] at the positions of `batch.mask`. owners: the rows' experts, side by side."""
        counts = batch.mask.sum(1).tolist()

        def choose(hidden: torch.Tensor) -> torch.Tensor:
            self._route(owners, counts)
            return hidden

        self._route(owners, [1] * len(owners))
        return logits_at(self.draft, batch, choose)

    def hidden(self, batch: RecordBatch, owners: Sequence[str]) -> torch.Tensor:
        """The output layer's inputs [N, H] at these positions."""
        self._route(owners, [1] * len(owners))
        return hidden_at(self.draft, batch)

    def parts(self, batch: RecordBatch, owners: Sequence[str]) -> Iterator[Part]:
        """Which of the N positions of `batch.mask` belong to which expert."""
        first = 0
        for name, count in side_by_side(owners, batch.mask.sum(1).tolist()):
            yield name, slice(first, first + count)
            first += count

    def output_layer(self, name: str) -> OutputLayer:
        """The output layer with the shared adapter and that of `name`."""
        names = dict.fromkeys((SHARED, name) if self.routing.shared else (name,))
        lows: list[LowRank] = [low for one in names if (low := self.head.adapter(one)) is not None]
        if not lows:
            return OutputLayer(self.head.weight, self.head.bias, None)
        lora = torch.cat([low.a for low in lows]), torch.cat([low.b for low in lows], dim=1)
        return OutputLayer(self.head.weight, self.head.bias, lora)

    def ends_in_head(self) -> bool:
        """Whether the logits are the output layer's, neither scaled nor capped, by trying some tokens."""
        if self._ends is None:
            self.routing.parts = []
            self._ends = ends_in_head(self.draft)
        return self._ends
