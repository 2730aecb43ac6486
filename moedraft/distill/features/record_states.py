"""What the target computes for a replay record: kept as it was served, or computed again to learn from it.

A feature drafter reads the target's hidden states. The drafter's frozen `fc` joins the states of its layers
into one, and that one is kept in half precision: a third of the bytes of the features themselves. Where the
home holds none for a record, the trainer's own copy of the target reads the record's tokens once. What is in
memory is bounded in bytes; the record that was used longest ago goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from moedraft.core import ReplayRecord
from moedraft.evidence import HiddenStates
from moedraft.feature.features import FeatureCapture
from moedraft.feature.model import FeatureDraft
from moedraft.models import LanguageModel
from moedraft.storage.records.replay import ReplayBuffer

READ_TOGETHER = 2048  # tokens of one forward of the target, padding included
ROWS = 16  # records of one forward, at most
HALF = torch.bfloat16  # the range of float32: states of some targets pass what float16 can hold

Key = tuple[int, ...]
Kept = Callable[[Sequence[ReplayRecord]], Mapping[Key, torch.Tensor]]


class States(Protocol):
    """Where a batch gets the states of its records from."""

    on_forward: Callable[[], None]  # is called after each forward of the target, as a heartbeat

    def of(self, records: Sequence[ReplayRecord]) -> list[torch.Tensor]: ...

    def forget(self) -> None: ...


class RecordStates:
    """Fused states [tokens, H] of records, recomputed by `target` and kept up to `limit_bytes`."""

    def __init__(
        self,
        target: LanguageModel,
        draft: FeatureDraft,
        limit_bytes: int = 256 * 2**20,
        kept: Kept | None = None,
    ) -> None:
        """kept: finds the states that were kept when the records were made."""
        self.target, self.draft, self.limit_bytes = target, draft, limit_bytes
        self.kept = kept
        self.on_forward: Callable[[], None] = lambda: None
        self.bytes = 0  # kept now
        self.tokens_read = 0  # by the target, all in all
        self._latest: OrderedDict[Key, torch.Tensor] = OrderedDict()
        self._through_cache = max(draft.config.feature_layers) < target.num_layers

    def of(self, records: Sequence[ReplayRecord]) -> list[torch.Tensor]:
        """The states of all positions of each record, in half precision, in the records' order.

        Those of the last position are there only where they were computed here: nothing is learned from them.
        """
        keys = [tuple(record.token_ids) for record in records]
        found = {key: self._latest[key] for key in keys if key in self._latest}
        if self.kept is not None:
            unknown = [one for key, one in zip(keys, records, strict=True) if key not in found]
            device, kept = self.draft.fc.weight.device, self.kept(unknown)
            found |= {key: states.to(device) for key, states in kept.items() if self._fits(key, states)}
        for chosen in _grouped(sorted(set(keys) - found.keys(), key=len)):
            found |= dict(zip(chosen, self._read(chosen), strict=True))
            self.on_forward()
        for key in keys:
            self._remember(key, found[key])
        return [found[key] for key in keys]

    @property
    def layers(self) -> tuple[int, ...]:
        """Of the target, whose inputs are read; none where its serving forward does not capture them all."""
        return tuple(self.draft.config.feature_layers) if self._through_cache else ()

    @torch.inference_mode()
    def take(self, text: Key, features: torch.Tensor) -> None:
        """Keep what the target's serving forward has read of this text elsewhere, [tokens − 1, n·H]."""
        weight = self.draft.fc.weight
        fused = self.draft.fuse(features.to(weight.device, weight.dtype)).to(HALF)
        with torch.inference_mode(False):
            self._remember(text, fused.clone())

    def forget(self) -> None:
        """Drop all states: to be called after records were purged, or the draft base was exchanged."""
        self._latest.clear()
        self.bytes = 0

    def _fits(self, key: Key, states: torch.Tensor) -> bool:
        return states.shape == (len(key) - 1, self.draft.config.hidden_size)

    def _remember(self, key: Key, states: torch.Tensor) -> None:
        if key not in self._latest:
            self.bytes += states.nbytes
        self._latest[key] = states
        self._latest.move_to_end(key)
        while self.bytes > self.limit_bytes and self._latest:
            _, oldest = self._latest.popitem(last=False)
            self.bytes -= oldest.nbytes

    @torch.inference_mode()
    def _read(self, texts: list[Key]) -> list[torch.Tensor]:
        """States as the engine computes them, whatever precision the drafter learns in at the moment."""
        with torch.autocast(self.target.device.type, enabled=False):
            return self._read_exactly(texts)

    def _read_exactly(self, texts: list[Key]) -> list[torch.Tensor]:
        lengths = [len(text) for text in texts]
        ids = torch.zeros(len(texts), max(lengths), dtype=torch.int64)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = torch.tensor(text)
        features = self._features(ids.to(self.target.device), lengths)
        weight = self.draft.fc.weight
        fused = self.draft.fuse(features.to(weight.device, weight.dtype)).to(HALF)
        self.tokens_read += sum(lengths)
        # Clones: a view would keep the whole batch alive, and tensors of inference cannot be trained on.
        with torch.inference_mode(False):
            return [row[:length].clone() for row, length in zip(fused, lengths, strict=True)]

    def _features(self, ids: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """int64 [B, L] → features [B, L, n·H]; by the serving forward where that captures all layers."""
        layers = self.draft.config.feature_layers
        if not self._through_cache:
            with FeatureCapture(self.target.hf, layers) as capture:
                self.target.hf.base_model(input_ids=ids, use_cache=False)
            return capture.joined()
        hidden = HiddenStates(layers)
        cache = self.target.new_cache(len(ids))  # a new one each time: it would keep the size of the longest
        self.target.forward(cache, 0, ids, [0] * len(ids), keep=1, lengths=lengths, hidden=hidden)
        return torch.cat([hidden.states[layer] for layer in layers], dim=-1)


def kept_in(replay: ReplayBuffer, base_hash: str) -> Kept:
    """Finds the states that were kept with records of this home, as a drafter of this base has read them."""

    def find(records: Sequence[ReplayRecord]) -> dict[Key, torch.Tensor]:
        found = replay.states(records, base_hash)
        return {tuple(record.token_ids): found[record.id] for record in records if record.id in found}

    return find


def _grouped(texts: Sequence[Key]) -> list[list[Key]]:
    """In their order, in groups of at most READ_TOGETHER tokens with padding, and of at most ROWS."""
    groups: list[list[Key]] = []
    for text in texts:  # ascending in length
        room = groups and len(groups[-1]) < ROWS and len(text) * (len(groups[-1]) + 1) <= READ_TOGETHER
        if room:
            groups[-1].append(text)
        else:
            groups.append([text])
    return groups
