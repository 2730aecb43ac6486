"""Writes an expert of the home into a folder, as one PEFT adapter over the plain draft base.

The engine drafts with base + shared adapter + expert, but PEFT users load one adapter. Two low-rank terms
can be written as one whose rank is the sum, B₁A₁ + B₂A₂ = [B₁ B₂][A₁; A₂], so the result is exact. A module
that only one of the two touches keeps that one's rank. Scalings are folded into B, so `lora_alpha` = rank.
"""

from __future__ import annotations

import re
import shutil
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import save_file

from moedraft.core import SHARED, AdapterVersion, InvalidRequest
from moedraft.drafting.adapter import LORA_A, LORA_B, PREFIX, Delta, scaling
from moedraft.storage.adapters import LoadedAdapter
from moedraft.storage.candidate import CONFIG, WEIGHTS
from moedraft.storage.store import Store

Part = tuple[AdapterVersion, LoadedAdapter]


@dataclass(frozen=True)
class Exported:
    path: Path
    versions: dict[str, int]  # those that were combined, by name
    base_hash: str


def export_adapter(store: Store, name: str, out: Path, *, expert_only: bool = False) -> Exported:
    """Write the live version of `name`, by default with the shared adapter below it, to the folder `out`.

    Raises InvalidRequest for an `out` in use or an expert that was never trained, having written nothing.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidRequest(f"{out} exists and is not an empty folder; name another.")
    parts = _parts(store, name, expert_only)
    config, tensors = combine([adapter for _, adapter in parts])
    _write(out, config, tensors)
    return Exported(out, {version.domain: version.version for version, _ in parts}, parts[0][0].base_hash)


def combine(adapters: Sequence[LoadedAdapter]) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """One PEFT adapter that does what all of `adapters` do together."""
    held: dict[str, list[Delta]] = {}
    for adapter in adapters:
        for module, delta in _deltas(adapter.config, adapter.tensors).items():
            held.setdefault(module, []).append(delta)
    merged = {
        module: (torch.cat([a for a, _ in deltas]), torch.cat([b for _, b in deltas], dim=1))
        for module, deltas in sorted(held.items())
    }
    tensors = {}
    for module, (a, b) in merged.items():
        tensors[PREFIX + module + LORA_A], tensors[PREFIX + module + LORA_B] = a.contiguous(), b.contiguous()
    ranks = {module: a.shape[0] for module, (a, _) in merged.items()}
    return _config(ranks, adapters[0].config.get("base_model_name_or_path")), tensors


def _parts(store: Store, name: str, expert_only: bool) -> list[Part]:
    """The live versions that `name` drafts with, the shared one first; all belong to one draft base."""
    own = store.adapters.load_live(name)
    below: Part | None = None
    if name != SHARED and not expert_only:
        below = store.adapters.load_live(SHARED, own[0].base_hash if own else None)
    parts = [part for part in (below, own) if part is not None]
    if not parts:
        raise InvalidRequest(f"{name!r} was never trained; there is nothing to export.")
    return parts


def _deltas(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Delta]:
    """By module: A [r, in] and B [out, r] in float32, with the scaling multiplied into B."""
    deltas = {}
    for key, a in tensors.items():
        if key.endswith(LORA_A):
            module = key.removeprefix(PREFIX).removesuffix(LORA_A)
            b = tensors[PREFIX + module + LORA_B].float()
            deltas[module] = (a.float(), b * scaling(config, module, a.shape[0]))
    return deltas


def _config(ranks: Mapping[str, int], base: str | None) -> LoraConfig:
    usual = Counter(ranks.values()).most_common(1)[0][0]
    pattern = {re.escape(module): rank for module, rank in ranks.items() if rank != usual}
    return LoraConfig(
        r=usual,
        lora_alpha=usual,
        rank_pattern=dict(pattern),
        alpha_pattern=dict(pattern),
        target_modules=list(ranks),
        bias="none",
        task_type="CAUSAL_LM",
        inference_mode=True,
        base_model_name_or_path=base,
    )


def _write(out: Path, config: LoraConfig, tensors: dict[str, torch.Tensor]) -> None:
    """Write into a temporary folder beside `out` and rename it, so that `out` is whole or not there."""
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.parent / f".{out.name}-{uuid.uuid4().hex[:8]}"
    try:
        temporary.mkdir()
        config.save_pretrained(str(temporary))
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        assert (temporary / CONFIG).exists()
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
