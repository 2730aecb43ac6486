"""The draft base that learns: the trainer's own copy of it, with PEFT adapters that follow the live versions.

Drafts are made by base + shared adapter + expert. While an expert learns, the shared adapter is active and
frozen; while the shared adapter learns, no expert is active.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

from moedraft.core import SHARED, AdapterVersion, UnsupportedModel
from moedraft.distill.peft_config import widened
from moedraft.distill.text.batches import RecordBatch
from moedraft.distill.text.forward import OutputLayer, ends_in_head, hidden_at, logits_at
from moedraft.drafting.experts.adapter import LORA_A, PREFIX
from moedraft.drafting.experts.modules import adaptable
from moedraft.models import LanguageModel
from moedraft.storage.versions.adapters import AdapterStore
from moedraft.storage.versions.candidate import Candidate, Weights

# What a new version takes over from the configuration of the stored one.
KEPT = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora")


class Student:
    """Owns its copy of the draft base, in float32, and the optimiser of each adapter on it."""

    def __init__(
        self, draft: LanguageModel, adapters: AdapterStore, *, scope: str, rank: int, shared_rank: int
    ) -> None:
        self.draft = draft
        self.base_hash = draft.weights_hash()
        self.model: Any = None  # the PEFT model, once there is an adapter
        self.versions: dict[str, int] = {}  # which version an adapter's weights were taken from
        self._plain_logits: bool | None = None  # what `_ends_there` has found; None before its first call
        self._kept: Candidate | None = None  # unpublished shared adapter, which its next update continues
        self._adapters = adapters
        self._scope, self._rank, self._shared_rank = scope, rank, shared_rank
        self._modules = {name: adaptable(draft, name) for name in ("tail", "full")}
        self._configs: dict[str, LoraConfig] = {}
        self._optimisers: dict[str, torch.optim.Optimizer] = {}

    def activate(self, expert: str) -> None:
        """Make `expert` (or SHARED) the adapter that learns, beginning with its live version.

        Raises UnsupportedModel where PEFT covers other modules than the engine does, and StorageError.
        """
        wanted = [SHARED] if expert == SHARED else [SHARED, expert]
        kept = self._kept
        if expert != SHARED and kept is not None:
            self.forget(SHARED)  # an expert is trained on the shared adapter that is live
        for name in wanted:
            self._follow(name)
        if kept is not None and kept.parent == self.versions[SHARED]:
            self._kept = kept
            if expert == SHARED:
                set_peft_model_state_dict(self.model, dict(kept.tensors), adapter_name=_key(SHARED))
        self.model.base_model.set_adapter([_key(name) for name in wanted])
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(f".{_key(expert)}." in name)

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that learn."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def optimiser(self, expert: str) -> torch.optim.Optimizer:
        """The optimiser of the active `expert`; its state is kept from one update to the next."""
        if expert not in self._optimisers:
            self._optimisers[expert] = torch.optim.AdamW(self.parameters(), weight_decay=0.0)
        return self._optimisers[expert]

    def logits(self, batch: RecordBatch) -> torch.Tensor:
        """The logits [N, V] at the positions of `batch.mask`."""
        return logits_at(self.draft, batch, lambda chosen: chosen)

    def hidden(self, batch: RecordBatch) -> torch.Tensor:
        """The output layer's inputs [N, H] at these positions."""
        return hidden_at(self.draft, batch)

    def output_layer(self) -> OutputLayer | None:
        """The output layer with its active adapters; None where the logits are not simply its output."""
        layer = self.draft.hf.get_output_embeddings()
        base = getattr(layer, "base_layer", layer)
        if type(base) is not torch.nn.Linear or not self._ends_there():
            return None
        names = [
            name for name in self.model.base_model.active_adapters if name in getattr(layer, "lora_A", ())
        ]
        lora = None
        if names:
            below = torch.cat([layer.lora_A[name].weight for name in names])
            scaled = [layer.lora_B[name].weight * layer.scaling[name] for name in names]
            lora = below, torch.cat(scaled, dim=1)
        return OutputLayer(base.weight, base.bias, lora)

    def _ends_there(self) -> bool:
        if self._plain_logits is None:
            self._plain_logits = ends_in_head(self.draft)
        return self._plain_logits

    def export(self, expert: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """The adapter of `expert` as it is now: its PEFT configuration and copies of its tensors."""
        config = copy.deepcopy(self._configs[expert])
        config.base_model_name_or_path = self.draft.name
        config.inference_mode = True
        plain = {
            key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()
        }
        tensors = {
            name: value.detach().to("cpu", torch.float32, copy=True).contiguous()
            for name, value in self._state(expert).items()
        }
        return plain, tensors

    @contextmanager
    def standing(self, parts: Sequence[Weights]) -> Iterator[None]:
        """Draft by base + these stored or exported adapters for a while, instead of those that learn.

        Call `activate` before learning goes on.
        """
        if self.model is None:
            self._follow(SHARED)  # nothing has been trained since this process began
        keys = [f"stored_{number}" for number in range(len(parts))]
        active = list(self.model.base_model.active_adapters)
        try:
            for key, part in zip(keys, parts, strict=True):
                self._add(key, self._config(SHARED, part), part.tensors)
            self.model.base_model.set_adapter(keys)
            yield
        finally:
            self.model.base_model.set_adapter(active)
            for key in keys:
                if key in self.model.peft_config:
                    self.model.delete_adapter(key)

    def _add(self, key: str, config: LoraConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT's advice about tied output layers; we merge into a copy
            self.model.add_adapter(key, config)
            set_peft_model_state_dict(self.model, dict(tensors), adapter_name=key)

    def published(self, version: AdapterVersion) -> None:
        """Note that the last export was published as `version`; the next update may continue from memory."""
        self.versions[version.domain] = version.version
        self._kept = None if version.domain == SHARED else self._kept

    def kept(self, candidate: Candidate) -> None:
        """Note that the last export was not published, but that its adapter's next update continues from it.

        An expert's weights stay in memory; those of the shared adapter have to make way for the live ones
        while experts learn.
        """
        if candidate.expert == SHARED:
            self._kept = candidate

    def forget(self, name: str) -> None:
        """Drop `name` from memory; the next update loads its live version from storage."""
        for known in (self.versions, self._configs, self._optimisers):
            known.pop(name, None)
        self._kept = None if name == SHARED else self._kept
        if self.model is not None and _key(name) in self.model.peft_config:
            self.model.delete_adapter(_key(name))

    def _follow(self, name: str) -> None:
        """Load the live version of `name`, unless that is what is loaded."""
        key, found = _key(name), self._adapters.load_live(name, self.base_hash)
        version = found[0].version if found else 0
        if self.versions.get(name) == version:
            return
        self.forget(name)
        stored = found[1] if found else None
        if stored is not None:  # one that was learned jointly has been cut to a lower rank
            rank = self._shared_rank if name == SHARED else self._rank
            wide, tensors = widened(stored.config, stored.tensors, rank)
            stored = stored._replace(config=wide, tensors=tensors)
        config = self._config(name, stored)
        self._configs[name] = copy.deepcopy(config)  # PEFT may change its own
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT's advice about tied output layers; we merge into a copy
            if self.model is None:
                self.model = get_peft_model(self.draft.hf, config, adapter_name=key)
            else:
                self.model.add_adapter(key, config)
            self._state(name)  # refuses a model whose adapters could never be published
            if stored is not None:
                set_peft_model_state_dict(self.model, stored.tensors, adapter_name=key)
        self.versions[name] = version

    def _config(self, name: str, stored: Weights | None) -> LoraConfig:
        """Rank and modules of the stored version where there is one, else those of the settings."""
        if stored is None:
            rank = self._shared_rank if name == SHARED else self._rank
            modules = self._modules["full" if name == SHARED else self._scope]
            options: dict[str, Any] = {"r": rank, "lora_alpha": rank}
        else:
            modules = sorted(modules_of(stored.tensors))
            options = {key: stored.config[key] for key in KEPT if key in stored.config}
        pattern = "|".join(re.escape(module) for module in modules)  # PEFT matches it as a whole
        return LoraConfig(**options, target_modules=f"(?:{pattern})", bias="none")

    def _state(self, name: str) -> dict[str, torch.Tensor]:
        """The adapter's tensors, of exactly the modules wanted. Raises UnsupportedModel."""
        state: dict[str, torch.Tensor] = get_peft_model_state_dict(
            self.model, adapter_name=_key(name), save_embedding_layers=False
        )
        pattern = str(self._configs[name].target_modules)
        held, wanted = modules_of(state), {m for m in self._modules["full"] if re.fullmatch(pattern, m)}
        if held != wanted or len(state) != 2 * len(held):
            other = ", ".join(sorted(held ^ wanted)[:3]) or "something else than lora_A and lora_B"
            raise UnsupportedModel(f"{self.draft.name}: PEFT and the engine do not agree on {other}.")
        return state


def modules_of(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """The modules of the draft base that these tensors of an adapter belong to."""
    return {key.removeprefix(PREFIX).removesuffix(LORA_A) for key in tensors if key.endswith(LORA_A)}


def _key(name: str) -> str:
    """The key of `name` in PEFT; with the prefix it is never an attribute of PyTorch's ModuleDict."""
    return f"adapter_{name}"
