"""One update: replayed records in, a new immutable adapter version out. Meets the engine only in storage.

The draft base is a copy of its own. draft = base + shared + expert: while an expert learns, the shared
adapter is on and frozen; the shared adapter learns alone. The loss is the forward KL from the target's
stored top-k (with its tail as one bucket) to the draft, at every position of the answer.
"""

from __future__ import annotations

import copy
import re
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import save_file

from moedraft.core import SHARED, AdapterVersion, ReplayRecord, UnsupportedModel
from moedraft.distill.batches import MAX_CONTEXT, Batch, collate
from moedraft.distill.publish import HomeOutlet, Outlet
from moedraft.drafting.adapter import LORA_A, PREFIX
from moedraft.drafting.modules import adaptable
from moedraft.kernels import Kind, divergence
from moedraft.models import LanguageModel
from moedraft.storage.adapters import LoadedAdapter
from moedraft.storage.store import TARGET_ID, Store

HELD_OUT_EVERY = 8  # one record in so many is never trained on and measures the update
MEASURED = 32  # held-out records that one update is measured by, at most
SAMPLE = 512  # records that one update looks at, at most
KEPT = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora")  # of a stored configuration

OnStep = Callable[[int, float | None], None]  # optimiser steps done, their mean loss (None before the first)


@dataclass(frozen=True)
class Update:
    """What one update did."""

    expert: str
    version: AdapterVersion
    records: int
    steps: int
    loss: float  # mean over the update, nats per token
    acceptance_before: float | None  # share of held-out tokens whose top-1 the draft gets right
    acceptance_after: float | None


def is_held_out(record: ReplayRecord) -> bool:
    ids = ",".join(map(str, record.token_ids[: record.num_prompt_tokens]))
    return zlib.crc32(ids.encode()) % HELD_OUT_EVERY == 0


class Trainer:
    """Updates the adapters of one home from its replay. Owns its copy of the draft base, in float32.

    Results go to `outlet`, by default into the home itself, which must be open for writing then.
    """

    def __init__(
        self,
        draft: LanguageModel,
        store: Store,
        *,
        outlet: Outlet | None = None,
        scope: str = "tail",
        rank: int = 64,
        shared_rank: int = 64,
        learning_rate: float = 3e-3,
        steps: int = 16,
        tokens_per_step: int = 2048,
        kind: Kind = "fkl",
    ) -> None:
        self.registry, self.adapters, self.replay = store.registry, store.adapters, store.replay
        self.outlet = outlet or HomeOutlet(store)
        self.base_hash = draft.weights_hash()
        self.scope, self.rank, self.shared_rank = scope, rank, shared_rank
        self.learning_rate, self.steps, self.tokens_per_step = learning_rate, steps, tokens_per_step
        self.kind = kind
        self.draft = draft
        self.modules = {kind: adaptable(draft, kind) for kind in ("tail", "full")}
        self.model: Any = None  # the PEFT model, once there is an adapter
        self.loaded: dict[str, int] = {}  # version whose weights the PEFT adapter holds
        self.configs: dict[str, LoraConfig] = {}  # rank and modules of what is loaded
        self.optimisers: dict[str, torch.optim.Optimizer] = {}
        self.seed = 0

    def update(
        self, expert: str, *, steps: int | None = None, on_step: OnStep | None = None
    ) -> Update | None:
        """Train `expert` (or SHARED) for `steps` optimiser steps and publish the result as its live version.

        `on_step` is called after every batch, one that only measures too, and while records are read: the
        sign that this lives. None when there is nothing to learn from. Raises StorageError when it cannot be
        stored, UnsupportedModel where PEFT covers other modules than the engine does, FloatingPointError
        where no step was finite; whatever is raised, the next update starts from the live version again.
        """
        steps, say = steps or self.steps, on_step or (lambda done, loss: None)
        train, held_out = self._records(expert, steps, lambda: say(0, None))
        if not train:
            return None
        try:
            self._activate(expert)
            before = self._acceptance(held_out, lambda: say(0, None))
            loss = self._train(expert, train, steps, say)
            after = self._acceptance(held_out, lambda: say(steps, loss))
            version = self._publish(expert, after)
        except BaseException:
            self._forget(expert)
            raise
        return Update(expert, version, len(train), steps, loss, before, after)

    # -- data ------------------------------------------------------------------------------------

    def _records(
        self, expert: str, steps: int, on_record: Callable[[], None]
    ) -> tuple[list[ReplayRecord], list[ReplayRecord]]:
        """Those to train on and those to measure by, each no more than `steps` batches take.

        The shared adapter learns from all domains in equal shares.
        """
        train: list[ReplayRecord] = []
        held_out: list[ReplayRecord] = []
        room = {False: steps * self.tokens_per_step, True: steps * self.tokens_per_step}  # tokens
        for record in self._sample(expert):
            on_record()
            measures = is_held_out(record)
            if record.topk_ids and room[measures] > 0:
                (held_out if measures else train).append(record)
                room[measures] -= self._length(record)
            if len(held_out) == MEASURED:
                room[True] = 0
            if max(room.values()) <= 0:
                break
        return train, held_out

    def _sample(self, expert: str) -> Iterator[ReplayRecord]:
        self.seed += 1
        target = self.registry.get_meta(TARGET_ID)  # another target's tokens teach nothing
        if expert == SHARED:
            return self.replay.sample_stratified(SAMPLE, self.seed, target)
        return self.replay.sample(expert, SAMPLE, self.seed, target)

    def _batches(self, records: list[ReplayRecord], steps: int) -> list[list[ReplayRecord]]:
        """`steps` batches, pass after pass in a new order."""
        generator = torch.Generator().manual_seed(self.seed)
        batches: list[list[ReplayRecord]] = []
        while len(batches) < steps:
            order = torch.randperm(len(records), generator=generator).tolist()
            batches += self._grouped([records[index] for index in order])
        return batches[:steps]

    def _grouped(self, records: list[ReplayRecord]) -> list[list[ReplayRecord]]:
        """In their order, in batches of at most `tokens_per_step` padded tokens."""
        batches: list[list[ReplayRecord]] = []
        longest = 0
        for record in records:
            longest = max(longest, self._length(record))
            if batches and longest * (len(batches[-1]) + 1) <= self.tokens_per_step:
                batches[-1].append(record)
            else:
                batches.append([record])
                longest = self._length(record)
        return batches

    def _length(self, record: ReplayRecord) -> int:
        context = min(record.num_prompt_tokens, MAX_CONTEXT)
        return min(context + len(record.topk_ids), self.tokens_per_step)

    # -- the model -------------------------------------------------------------------------------

    def _activate(self, expert: str) -> None:
        """Bring the PEFT model in line with storage; train `expert`, keep the shared adapter on below it."""
        wanted = [SHARED] if expert == SHARED else [SHARED, expert]
        for name in wanted:
            self._bring_up(name)
        self.model.base_model.set_adapter([_key(name) for name in wanted])
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(f".{_key(expert)}." in name)

    def _bring_up(self, name: str) -> None:
        key, found = _key(name), self.adapters.load_live(name, self.base_hash)
        version = found[0].version if found else 0
        if self.loaded.get(name) == version:
            return
        self._forget(name)
        config = self._config(name, found[1] if found else None)
        self.configs[name] = copy.deepcopy(config)  # PEFT may change its own
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT's advice about tied output layers; we merge into a copy
            if self.model is None:
                self.model = get_peft_model(self.draft.hf, config, adapter_name=key)
            else:
                self.model.add_adapter(key, config)
            self._state(name)  # refuses what could never be published
            if found:
                set_peft_model_state_dict(self.model, found[1].tensors, adapter_name=key)
        self.loaded[name] = version

    def _forget(self, name: str) -> None:
        """Nothing of `name` stays in memory; the next update takes it from storage."""
        for known in (self.loaded, self.configs, self.optimisers):
            known.pop(name, None)
        if self.model is not None and _key(name) in self.model.peft_config:
            self.model.delete_adapter(_key(name))

    def _config(self, name: str, stored: LoadedAdapter | None) -> LoraConfig:
        """Rank and modules of the stored version where there is one, else of the settings."""
        if stored is None:
            rank = self.shared_rank if name == SHARED else self.rank
            modules = self.modules["full" if name == SHARED else self.scope]
            options: dict[str, Any] = {"r": rank, "lora_alpha": rank}
        else:
            modules = sorted(_modules(stored.tensors))
            options = {key: stored.config[key] for key in KEPT if key in stored.config}
        pattern = "|".join(re.escape(module) for module in modules)  # PEFT matches it as a whole
        return LoraConfig(**options, target_modules=f"(?:{pattern})", bias="none")

    def _state(self, name: str) -> dict[str, torch.Tensor]:
        """The adapter's tensors, of exactly the modules wanted. Raises UnsupportedModel."""
        state: dict[str, torch.Tensor] = get_peft_model_state_dict(
            self.model, adapter_name=_key(name), save_embedding_layers=False
        )
        held = _modules(state)
        wanted = {m for m in self.modules["full"] if re.fullmatch(str(self.configs[name].target_modules), m)}
        if held != wanted or len(state) != 2 * len(held):
            other = ", ".join(sorted(held ^ wanted)[:3]) or "something else than lora_A and lora_B"
            raise UnsupportedModel(f"{self.draft.name}: PEFT and the engine do not agree on {other}.")
        return state

    def _train(self, expert: str, records: list[ReplayRecord], steps: int, on_step: OnStep) -> float:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        optimiser = self.optimisers.setdefault(
            expert, torch.optim.AdamW(parameters, lr=self.learning_rate, weight_decay=0.0)
        )
        total, done = 0.0, 0
        for number, chosen in enumerate(self._batches(records, steps), 1):
            # Falling within each update: the version that is published should be a settled one.
            for group in optimiser.param_groups:
                group["lr"] = self.learning_rate * (1 - 0.8 * (number - 1) / steps)
            batch = collate(chosen, self.draft.device, self.tokens_per_step, self.draft.vocab_size)
            loss = divergence(
                self._logits(batch), teacher_topk=(batch.topk_ids, batch.topk_logprobs), kind=self.kind
            )
            loss.backward()  # type: ignore[no-untyped-call]
            norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            if bool(loss.isfinite()) and bool(norm.isfinite()):  # one bad batch must not spoil the weights
                optimiser.step()
                total, done = total + loss.item(), done + 1
            optimiser.zero_grad(set_to_none=True)
            on_step(number, total / max(done, 1))
        if not done:
            raise FloatingPointError(f"no step of the update of {expert!r} had a finite loss.")
        return total / done

    def _logits(self, batch: Batch) -> torch.Tensor:
        """[N, V] at the supervised positions; the output layer, the largest of all, sees only those."""

        def choose(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            hidden, *rest = inputs
            return (hidden[:, -batch.keep :][batch.mask], *rest)

        with self.model.get_output_embeddings().register_forward_pre_hook(choose):
            out = self.model(input_ids=batch.token_ids, use_cache=False, logits_to_keep=batch.keep)
        logits: torch.Tensor = out.logits
        return logits

    @torch.no_grad()
    def _acceptance(self, records: list[ReplayRecord], on_batch: Callable[[], None]) -> float | None:
        """Share of held-out answer tokens where draft and target have the same most likely token."""
        hits = total = 0
        for chosen in self._grouped(sorted(records, key=self._length)):
            batch = collate(chosen, self.draft.device, self.tokens_per_step, self.draft.vocab_size)
            best = self._logits(batch).argmax(-1)
            hits += int((best == batch.topk_ids[:, 0]).sum())
            total += best.numel()
            on_batch()
        return hits / total if total else None

    def _publish(self, expert: str, acceptance: float | None) -> AdapterVersion:
        config = copy.deepcopy(self.configs[expert])
        config.base_model_name_or_path = self.draft.name
        config.inference_mode = True
        tensors = {
            name: value.detach().to("cpu", torch.float32).contiguous()
            for name, value in self._state(expert).items()
        }

        def write(folder: Path) -> None:
            config.save_pretrained(str(folder))
            save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})

        version = self.outlet.publish(
            expert,
            write,
            parent=self.loaded[expert],
            base_hash=self.base_hash,
            acceptance=acceptance,
            extra={"rank": config.r, "modules": sorted(_modules(tensors))},
        )
        self.loaded[expert] = version.version
        return version


def _modules(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    return {key.removeprefix(PREFIX).removesuffix(LORA_A) for key in tensors if key.endswith(LORA_A)}


def _key(name: str) -> str:
    """A PEFT adapter name that can be no attribute of PyTorch's ModuleDict."""
    return f"adapter_{name}"
