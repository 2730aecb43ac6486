"""PEFT's configuration of an adapter, from the rank of each of its modules."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from peft import LoraConfig


def peft_config(ranks: Mapping[str, int], base: str | None, task: str | None = None) -> LoraConfig:
    """Build the configuration. ranks: by module name; the scaling is 1. base: name of the draft base."""
    usual = Counter(ranks.values()).most_common(1)[0][0]
    pattern = {re.escape(module): rank for module, rank in ranks.items() if rank != usual}
    return LoraConfig(
        r=usual,
        lora_alpha=usual,
        rank_pattern=dict(pattern),
        alpha_pattern=dict(pattern),
        target_modules=sorted(ranks),
        bias="none",
        task_type=task,
        inference_mode=True,
        base_model_name_or_path=base,
    )
