"""What a target computes for texts that are read again and again: kept after the first time."""

from __future__ import annotations

import torch
from torch.nn.utils.rnn import pad_sequence

from moedraft.feature.features import Teacher
from moedraft.feature.unroll import Batch

KEPT_BYTES = 2 * 1024**3  # of all texts together


class Reader:
    """Has the target read texts, and keeps features and states in main memory, at most `room` bytes.

    Where there is no more room, further texts are read each time. Replacing those that are there would gain
    nothing, since a training passes over all texts before it comes to one again.
    """

    def __init__(self, teacher: Teacher, room: int = KEPT_BYTES) -> None:
        self.teacher, self.room = teacher, room
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def batch(self, texts: list[tuple[int, list[int]]]) -> Batch:
        """texts: token ids behind a number that always stands for them."""
        missing = {number: ids for number, ids in texts if number not in self._kept}
        found = self._kept | self._read(missing) if missing else self._kept
        device = self.teacher.hf.device
        ids = [torch.tensor(text) for _, text in texts]
        features, states = zip(*(found[number] for number, _ in texts), strict=True)
        parts = (pad_sequence(list(part), batch_first=True).to(device) for part in (ids, features, states))
        token_ids, joined, last = parts
        return Batch(token_ids, torch.tensor([len(text) for text in ids], device=device), joined, last)

    def _read(self, texts: dict[int, list[int]]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        batch = Batch.read(self.teacher, list(texts.values()))
        found = {}
        for row, (number, ids) in enumerate(texts.items()):
            features, states = (
                part[row, : len(ids)].to("cpu", copy=True) for part in (batch.features, batch.states)
            )
            found[number] = features, states
            size = features.nbytes + states.nbytes
            if size <= self.room:
                self._kept[number] = found[number]
                self.room -= size
        return found
