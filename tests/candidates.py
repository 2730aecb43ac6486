"""Candidates as an update might have made them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from moedraft.storage.versions.candidate import Candidate


def candidate(expert: str = "code", value: float = 1.0, **changes: Any) -> Candidate:
    """With one tensor, filled with `value`; `changes` replace fields."""
    plain = Candidate(
        expert=expert,
        parent=0,
        base_hash="base",
        rank=2,
        modules=("m",),
        records=16,
        held_out=2,
        steps=1,
        loss=1.0,
        acceptance_before=0.50,
        acceptance_after=0.55,
        config={"r": 2, "peft_type": "LORA"},
        tensors={"lora_A": torch.full((2, 3), value)},
    )
    return replace(plain, **changes)
