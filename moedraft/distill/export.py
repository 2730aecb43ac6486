"""Writes an expert of the home into a folder, as one PEFT adapter over the plain draft base.

The engine drafts with base + shared adapter + expert, but PEFT users load one adapter. Two low-rank terms
can be written as one whose rank is the sum, B₁A₁ + B₂A₂ = [B₁ B₂][A₁; A₂], so the result is exact. A module
that only one of the two touches keeps that one's rank. Scalings are folded into B, so `lora_alpha` = rank.

An expert of a feature drafter has output rows for its own tokens alone. Their list is written beside the
adapter, and the drafter must use it before PEFT loads the adapter (`FeatureDraft.use_vocabulary`).
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import save_file

from moedraft.core import SHARED, AdapterVersion, InvalidRequest
from moedraft.distill.peft_config import peft_config
from moedraft.drafting.experts.adapter import HEAD, LORA_A, LORA_B, PREFIX, Delta, scaling
from moedraft.feature.vocabulary import rows_for
from moedraft.storage.store import Store
from moedraft.storage.versions.adapters import LoadedAdapter
from moedraft.storage.versions.candidate import CONFIG, VOCABULARY, WEIGHTS

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
    adapters = [adapter for _, adapter in parts]
    config, tensors = combine(adapters)
    _write(out, config, tensors, adapters[-1].vocabulary)
    return Exported(out, {version.domain: version.version for version, _ in parts}, parts[0][0].base_hash)


def combine(adapters: Sequence[LoadedAdapter]) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """One PEFT adapter that does what all of `adapters` do together, over the last one's vocabulary.

    Raises InvalidRequest where it is not known to which tokens the output rows of one of them belong, or
    where they hold nothing.
    """
    held: dict[str, list[Delta]] = {}
    for adapter in adapters:
        for module, (a, b) in _deltas(adapter.config, adapter.tensors).items():
            rows = _rows(b, adapter.vocabulary, adapters[-1].vocabulary) if module == HEAD else b
            held.setdefault(module, []).append((a, rows))
    merged = {
        module: (torch.cat([a for a, _ in deltas]), torch.cat([b for _, b in deltas], dim=1))
        for module, deltas in sorted(held.items())
    }
    if not merged:
        raise InvalidRequest("the adapter holds no LoRA matrices; there is nothing to export.")
    tensors = {}
    for module, (a, b) in merged.items():
        tensors[PREFIX + module + LORA_A], tensors[PREFIX + module + LORA_B] = a.contiguous(), b.contiguous()
    ranks = {module: a.shape[0] for module, (a, _) in merged.items()}
    known = adapters[-1].config
    return peft_config(ranks, known.get("base_model_name_or_path"), known.get("task_type")), tensors


def _rows(b: torch.Tensor, own: torch.Tensor | None, wanted: torch.Tensor | None) -> torch.Tensor:
    """Convert B of an output layer from the vocabulary `own` to `wanted`; None means the draft base's."""
    if own is None and wanted is None:
        return b
    if own is None or wanted is None:
        raise InvalidRequest(
            "expert and shared adapter were trained on different vocabularies, one of which is not stored "
            "with it; export the expert alone (--expert-only)."
        )
    return rows_for(b, own.to(torch.int64), wanted.to(torch.int64))


def _parts(store: Store, name: str, expert_only: bool) -> list[Part]:
    """The live versions that `name` drafts with, the shared one first; all belong to one draft base."""
    own = store.adapters.load_live(name)
    below: Part | None = None
    if name != SHARED and not expert_only:
        below = store.adapters.load_live(SHARED, own[0].base_hash if own else None)
    parts = [part for part in (below, own) if part is not None]
    if not parts and store.registry.versions(name):
        raise InvalidRequest(f"No version of {name!r} is live; `moedraft adapter promote` makes one live.")
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


def _write(
    out: Path, config: LoraConfig, tensors: dict[str, torch.Tensor], vocabulary: torch.Tensor | None
) -> None:
    """Write into a temporary folder beside `out` and rename it, so that `out` is whole or not there."""
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.parent / f".{out.name}-{uuid.uuid4().hex[:8]}"
    try:
        temporary.mkdir(mode=0o700)
        config.save_pretrained(str(temporary))
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        if vocabulary is not None:
            save_file({"vocabulary": vocabulary}, temporary / VOCABULARY, metadata={"format": "pt"})
        assert (temporary / CONFIG).exists()
        for file in temporary.iterdir():
            file.chmod(0o600)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
