"""The target's answers and states, each computed once and kept in a folder, a file for each prompt."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from feature_answers import TOPK, answered, digest_of
from safetensors.torch import load_file, save_file

from evidence.prompts import Query
from moedraft.core import ReplayRecord
from moedraft.distill.features.record_states import RecordStates
from moedraft.feature.training.corpus import asked
from moedraft.models import LanguageModel

TARGET = "target"  # its id in the records
TOGETHER = 48  # prompts that are answered in one batch


class Answers:
    """Records of queries by their prompt, and the states that a feature drafter reads of them.

    It stands in for `RecordStates` in a trainer: the target runs only for what no file holds.
    """

    def __init__(
        self,
        target: LanguageModel,
        states: RecordStates | None,
        folder: Path,
        max_tokens: int,
        temperature: float = 0.0,
        topk: int = TOPK,
        number: int = 0,
    ) -> None:
        """states: of a feature drafter; an independent draft model reads none. temperature: 0 is greedy.

        topk: of the target's probabilities, how many a record keeps per token. number: of several sampled
        answers to each prompt.
        """
        self.target, self.states, self.folder, self.max_tokens = target, states, folder, max_tokens
        self.temperature, self.topk, self.number = temperature, topk, number
        self.on_forward: Callable[[], None] = lambda: None
        self._known: dict[tuple[int, ...], torch.Tensor] = {}  # states by token ids
        self._drafted: dict[tuple[int, ...], ReplayRecord] = {}  # by prompt
        folder.mkdir(parents=True, exist_ok=True)

    def records(self, queries: Sequence[Query]) -> list[ReplayRecord]:
        """The records in the queries' order; `domain` and `expert` are the true domain."""
        found = self.to([asked(self.target.tokenizer, query.prompt) for query in queries])
        return [
            replace(one, domain=q.domain, expert=q.domain, source=q.source, pinned=bool(q.pinned))
            for one, q in zip(found, queries, strict=True)
        ]

    def drafted(self, draft: LanguageModel, records: Sequence[ReplayRecord]) -> list[ReplayRecord]:
        """As the records, but with the draft's own greedy answers, and what the target says of each token."""
        prompts = [one.token_ids[: one.num_prompt_tokens] for one in records]
        missing = [prompt for prompt in prompts if tuple(prompt) not in self._drafted]
        for prompt, one in zip(missing, answered(draft, missing, "", self.max_tokens), strict=True):
            self._drafted[tuple(prompt)] = self._labelled(one)
        return [
            replace(
                self._drafted[tuple(prompt)],
                domain=one.domain,
                expert=one.expert,
                source=one.source,
                weights=one.weights,
            )
            for prompt, one in zip(prompts, records, strict=True)
        ]

    @torch.no_grad()
    def _labelled(self, record: ReplayRecord) -> ReplayRecord:
        logits = self.target.hf(torch.tensor([record.token_ids], device=self.target.device)).logits[0]
        values, ids = logits[record.num_prompt_tokens - 1 : -1].log_softmax(-1).topk(self.topk)
        return replace(record, topk_ids=ids.tolist(), topk_logprobs=values.tolist())

    def of(self, records: Sequence[ReplayRecord]) -> list[torch.Tensor]:
        """As `RecordStates.of`."""
        if self.states is None:
            return []
        unknown = [one for one in records if tuple(one.token_ids) not in self._known]
        for one, states in zip(unknown, self.states.of(unknown), strict=True):
            self._known[tuple(one.token_ids)] = states
        return [self._known[tuple(one.token_ids)] for one in records]

    def know(self, other: Answers) -> None:
        """Have the states of answers that another one has read."""
        self._known.update(other._known)

    def forget(self) -> None:
        """Do nothing: no record of these homes is ever purged."""

    def to(self, prompts: Sequence[list[int]]) -> list[ReplayRecord]:
        """The records of prompts that are given as tokens, under no domain."""
        missing = list({tuple(p): p for p in prompts if not self._file(p).exists()}.values())
        for first in range(0, len(missing), TOGETHER):
            self._answer(missing[first : first + TOGETHER])
        return [self._load(prompt) for prompt in prompts]

    def keep(self, record: ReplayRecord) -> None:
        """Write the file of this answer, with its states."""
        begin = record.num_prompt_tokens
        tensors = {
            "prompt": torch.tensor(record.token_ids[:begin]),
            "answer": torch.tensor(record.token_ids[begin:]),
            "ids": torch.tensor(record.topk_ids),
            "logprobs": torch.tensor(record.topk_logprobs),
        }
        if self.states is not None:
            tensors["states"] = self.states.of([record])[0]
        file = self._file(record.token_ids[:begin])
        scratch = file.with_suffix(f".{os.getpid()}.tmp")
        save_file(tensors, scratch)
        scratch.rename(file)

    def _answer(self, prompts: list[list[int]]) -> None:
        print(f"the target answers {len(prompts)} prompts", flush=True)
        how = self.temperature, self.topk, self.number
        for record in answered(self.target, prompts, "", self.max_tokens, TOGETHER, *how):
            self.keep(record)

    def _load(self, prompt: list[int]) -> ReplayRecord:
        tensors = load_file(self._file(prompt))
        ids = [*tensors["prompt"].tolist(), *tensors["answer"].tolist()]
        if self.states is not None:
            self._known[tuple(ids)] = tensors["states"]
        return ReplayRecord(
            domain="",
            expert="",
            adapter_version=0,
            target_id=TARGET,
            token_ids=ids,
            num_prompt_tokens=len(prompt),
            topk_ids=tensors["ids"].tolist(),
            topk_logprobs=tensors["logprobs"].tolist(),
            rejected=[],
            drafted=0,
            accepted=0,
            created_at=0.0,
            temperature=self.temperature,
        )

    def _file(self, prompt: Sequence[int]) -> Path:
        name = digest_of(prompt)[:24]
        drawn = f"-t{self.temperature:g}" if self.temperature else ""
        kept = f"-k{self.topk}" if self.topk != TOPK else ""
        again = f"-n{self.number}" if self.number else ""
        return self.folder / f"{name}-{self.max_tokens}{drawn}{kept}{again}.safetensors"
