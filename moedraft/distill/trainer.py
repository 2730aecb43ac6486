"""One update: replayed records in, a new immutable adapter version out. Meets the engine only in storage.

The draft base is a copy of its own. draft = base + shared + expert: while an expert learns, the shared
adapter is on and frozen; the shared adapter learns alone. The loss is the forward KL from the target's
stored top-k (with its tail as one bucket) to the draft, at every position of the answer.
"""

from __future__ import annotations

import re
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import save_file

from moedraft.core import SHARED, AdapterVersion, ReplayRecord
from moedraft.drafting.lora import adaptable
from moedraft.kernels import Kind, divergence
from moedraft.models import LanguageModel
from moedraft.storage.adapters import AdapterStore
from moedraft.storage.registry import Registry
from moedraft.storage.replay import ReplayBuffer
from moedraft.storage.store import TARGET_ID

HELD_OUT_EVERY = 8  # one record in so many is never trained on and measures the update
KEEP_VERSIONS = 5  # newest versions of an adapter that stay on disk, besides the live one and its parent
MAX_CONTEXT = 256  # tokens of the prompt that an update reads, from its end


@dataclass(frozen=True)
class Batch:
    """Padded records. The draft's logits at `position` are supervised by the target's top-k there."""

    token_ids: torch.Tensor  # int64 [B, L], right-padded with 0
    keep: int  # logits are needed for the last `keep` positions only
    mask: torch.Tensor  # bool [B, keep], where an answer token was predicted
    topk_ids: torch.Tensor  # int64 [N, k], N = mask.sum(), row-major
    topk_logprobs: torch.Tensor  # float32 [N, k]


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


def collate(records: list[ReplayRecord], device: torch.device, max_tokens: int | None = None) -> Batch:
    """Records → one batch. Answer token i is predicted by the logits one position before it.

    `max_tokens` cuts long answers from their end, so that a row never exceeds it.
    """
    context = MAX_CONTEXT if max_tokens is None else min(MAX_CONTEXT, max_tokens // 2)
    rows, starts, counts = [], [], []
    for record in records:
        first = max(0, record.num_prompt_tokens - context)
        last = None if max_tokens is None else first + max_tokens
        rows.append(record.token_ids[first:last])
        starts.append(record.num_prompt_tokens - first - 1)
        counts.append(len(rows[-1]) - starts[-1] - 1)
    length, width = max(map(len, rows)), max(len(r.topk_ids[0]) for r in records)
    keep = length - min(starts)
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    mask = torch.zeros(len(rows), length, dtype=torch.bool)
    for b, (row, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
        ids[b, : len(row)] = torch.tensor(row)
        mask[b, start : start + count] = True
    chosen = [
        (pad_to(top, width, -1), pad_to(logprobs, width, -torch.inf))
        for record, count in zip(records, counts, strict=True)
        for top, logprobs in zip(record.topk_ids[:count], record.topk_logprobs[:count], strict=True)
    ]
    return Batch(
        token_ids=ids.to(device),
        keep=keep,
        mask=mask[:, -keep:].to(device),
        topk_ids=torch.tensor([top for top, _ in chosen], device=device),
        topk_logprobs=torch.tensor([logprobs for _, logprobs in chosen], device=device),
    )


def pad_to(values: list[Any], width: int, fill: float) -> list[Any]:
    return [*values, *[fill] * (width - len(values))]


class Trainer:
    """Updates the adapters of one home from its replay. Owns its copy of the draft base, in float32."""

    def __init__(
        self,
        draft: LanguageModel,
        registry: Registry,
        adapters: AdapterStore,
        replay: ReplayBuffer,
        *,
        scope: str = "tail",
        rank: int = 64,
        shared_rank: int = 64,
        learning_rate: float = 3e-3,
        steps: int = 16,
        tokens_per_step: int = 2048,
        kind: Kind = "fkl",
    ) -> None:
        self.registry, self.adapters, self.replay = registry, adapters, replay
        self.base_hash = draft.weights_hash()
        self.scope, self.rank, self.shared_rank = scope, rank, shared_rank
        self.learning_rate, self.steps, self.tokens_per_step = learning_rate, steps, tokens_per_step
        self.kind = kind
        self.draft = draft
        self.modules = {kind: adaptable(draft, kind) for kind in ("tail", "full")}
        self.model: Any = None  # the PEFT model, once there is an adapter
        self.loaded: dict[str, int] = {}  # version whose weights the PEFT adapter holds
        self.optimisers: dict[str, torch.optim.Optimizer] = {}
        self.seed = 0

    def update(
        self, expert: str, *, steps: int | None = None, on_step: Callable[[int, float], None] | None = None
    ) -> Update | None:
        """Train `expert` (or SHARED) for `steps` optimiser steps and publish the result as its live version.

        None when there is nothing to learn from. Raises StorageError when it cannot be stored.
        """
        records = self._records(expert)
        train = [r for r in records if not is_held_out(r)]
        if not train:
            return None
        held_out = [r for r in records if is_held_out(r)]
        self._activate(expert)
        before = self._acceptance(held_out)
        steps = steps or self.steps
        loss = self._train(expert, train, steps, on_step)
        after = self._acceptance(held_out)
        version = self._publish(expert, after)
        return Update(expert, version, len(train), steps, loss, before, after)

    # -- data ------------------------------------------------------------------------------------

    def _records(self, expert: str) -> list[ReplayRecord]:
        """Enough for a few passes; the shared adapter learns from all domains in equal shares."""
        wanted = 512
        self.seed += 1
        if expert == SHARED:
            records = self.replay.sample_stratified(wanted, self.seed)
        else:
            records = self.replay.sample(expert, wanted, self.seed)
        target = self.registry.get_meta(TARGET_ID)  # another target's tokens teach nothing
        return [r for r in records if r.topk_ids and target in (None, r.target_id)]

    def _batches(self, records: list[ReplayRecord], steps: int) -> list[list[ReplayRecord]]:
        """`steps` batches of at most `tokens_per_step` padded tokens, pass after pass in a new order."""
        generator = torch.Generator().manual_seed(self.seed)
        batches: list[list[ReplayRecord]] = []
        current: list[ReplayRecord] = []
        longest = 0
        while len(batches) < steps:
            for index in torch.randperm(len(records), generator=generator).tolist():
                size = self._length(records[index])
                if current and max(longest, size) * (len(current) + 1) > self.tokens_per_step:
                    batches.append(current)
                    current, longest = [], 0
                current.append(records[index])
                longest = max(longest, size)
            batches.append(current)
            current, longest = [], 0
        return batches[:steps]

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
        if key in (self.model.peft_config if self.model is not None else {}):
            if self.loaded.get(name) == version:
                return
            self.model.delete_adapter(key)
        self.optimisers.pop(name, None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT's advice about tied output layers; we merge into a copy
            if self.model is None:
                self.model = get_peft_model(self.draft.hf, self._config(name), adapter_name=key)
            else:
                self.model.add_adapter(key, self._config(name))
            if found:
                set_peft_model_state_dict(self.model, found[1].tensors, adapter_name=key)
        self.loaded[name] = version

    def _config(self, name: str) -> LoraConfig:
        scope = "full" if name == SHARED else self.scope
        rank = self.shared_rank if name == SHARED else self.rank
        pattern = "|".join(re.escape(module) for module in self.modules[scope])
        return LoraConfig(r=rank, lora_alpha=rank, target_modules=pattern, bias="none")

    def _train(
        self,
        expert: str,
        records: list[ReplayRecord],
        steps: int,
        on_step: Callable[[int, float], None] | None,
    ) -> float:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        optimiser = self.optimisers.setdefault(
            expert, torch.optim.AdamW(parameters, lr=self.learning_rate, weight_decay=0.0)
        )
        total = 0.0
        for number, chosen in enumerate(self._batches(records, steps), 1):
            # Falling within each update: the version that is published should be a settled one.
            for group in optimiser.param_groups:
                group["lr"] = self.learning_rate * (1 - 0.8 * (number - 1) / steps)
            batch = collate(chosen, self.draft.device, self.tokens_per_step)
            loss = divergence(
                self._logits(batch), teacher_topk=(batch.topk_ids, batch.topk_logprobs), kind=self.kind
            )
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            total += loss.item()
            if on_step:
                on_step(number, total / number)
        return total / steps

    def _logits(self, batch: Batch) -> torch.Tensor:
        """[N, V] at the supervised positions."""
        logits = self.model(input_ids=batch.token_ids, use_cache=False, logits_to_keep=batch.keep).logits
        chosen: torch.Tensor = logits[batch.mask]
        return chosen

    @torch.no_grad()
    def _acceptance(self, records: list[ReplayRecord]) -> float | None:
        """Share of held-out answer tokens where draft and target have the same most likely token."""
        hits = total = 0
        for start in range(0, min(len(records), 32), 8):
            batch = collate(records[start : start + 8], self.draft.device, self.tokens_per_step)
            best = self._logits(batch).argmax(-1)
            hits += int((best == batch.topk_ids[:, 0]).sum())
            total += best.numel()
        return hits / total if total else None

    def _publish(self, expert: str, acceptance: float | None) -> AdapterVersion:
        key, config = _key(expert), self._config(expert)
        config.base_model_name_or_path = self.draft.name
        config.inference_mode = True
        state = get_peft_model_state_dict(self.model, adapter_name=key, save_embedding_layers=False)
        tensors = {
            name: value.detach().to("cpu", torch.float32).contiguous() for name, value in state.items()
        }

        def write(folder: Path) -> None:
            config.save_pretrained(str(folder))
            save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})

        version = self.adapters.publish(
            expert,
            write,
            parent=self.loaded[expert],
            base_hash=self.base_hash,
            acceptance=acceptance,
            extra={"rank": config.r, "modules": self.modules["full" if expert == SHARED else self.scope]},
        )
        self.loaded[expert] = version.version
        self.adapters.prune(expert, KEEP_VERSIONS)
        return version


def _key(name: str) -> str:
    """A PEFT adapter name that can be no attribute of PyTorch's ModuleDict."""
    return f"adapter_{name}"
