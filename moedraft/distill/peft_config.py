"""PEFT's configuration of an adapter, from the rank of each of its modules."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from peft import LoraConfig

from moedraft.distill.lora.ranks import filled_up
from moedraft.drafting.experts.adapter import LORA_A, LORA_B


def peft_config(
    ranks: Mapping[str, int], base: str | None, task: str | None = None, *, scaling: float = 1.0
) -> LoraConfig:
    """Build the configuration. ranks: by module name. base: the draft base's name."""
    usual = Counter(ranks.values()).most_common(1)[0][0]
    pattern = {re.escape(module): rank for module, rank in ranks.items() if rank != usual}
    return LoraConfig(
        r=usual,
        lora_alpha=_alpha(usual, scaling),
        rank_pattern=dict(pattern),
        alpha_pattern={module: _alpha(rank, scaling) for module, rank in pattern.items()},
        target_modules=sorted(ranks),
        bias="none",
        task_type=task,
        inference_mode=True,
        base_model_name_or_path=base,
    )


def _alpha(rank: int, scaling: float) -> int:
    return rank if scaling == 1 else scaling * rank  # type: ignore[return-value]  # a float does as well


def widened(
    config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], rank: int
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """An adapter that guesses as this one does, of the rank `rank` at least, so that it can learn more.

    Adapters whose rank or scaling differs by module stay as they are.
    """
    before = config.get("r", 0)
    odd = config.get("rank_pattern") or config.get("alpha_pattern") or config.get("use_rslora")
    if odd or config.get("lora_alpha") != before or before >= rank:
        return dict(config), dict(tensors)
    made = {}
    for first in (key for key in tensors if key.endswith(LORA_A)):
        second = first.removesuffix(LORA_A) + LORA_B
        made[first], made[second] = filled_up(tensors[first], tensors[second], rank)
    return dict(config) | {"r": rank, "lora_alpha": rank}, made
