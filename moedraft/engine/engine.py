"""One step after another: schedule, draft, verify, move on. The whole life of a request is in `step`.

The engine knows no file. What a finished request leaves behind goes to `sinks`, new adapters come in
through `refresh`; both are put in by `build`.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from moedraft.core import SHARED, InvalidRequest, RequestOutput, SamplingParams, Sequence, Verdict
from moedraft.drafting.budget import Budget
from moedraft.drafting.drafter import CausalModel, Draft, Drafter, empty_draft
from moedraft.engine.detokenizer import Detokenizer
from moedraft.engine.scheduler import Scheduler
from moedraft.kernels import verify_chain
from moedraft.sampling import SamplingBatch, filter_logits

if TYPE_CHECKING:
    from moedraft.routing.selector import ExpertSelector


class Engine:
    """A target with its drafter. `add` and `abort` requests, call `step` until nothing is left.

    Not thread-safe: one thread owns it. `generate` and `stream` do the stepping themselves.
    """

    def __init__(
        self,
        target: CausalModel,
        tokenizer: Any,
        drafter: Drafter | None,
        selector: ExpertSelector,
        *,
        max_batch_size: int = 8,
        max_model_len: int | None = None,
        prefill_chunk: int = 512,
        truncate_prompts: bool = False,
        num_speculative_tokens: int = 4,
        max_speculative_tokens: int = 8,
        adaptive_budget: bool = True,
        topk: int = 16,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.target = target
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.selector = selector
        limits = [target.max_len, max_model_len or target.max_len]
        self.max_model_len = min([*limits, drafter.model.max_len] if drafter else limits)
        self.prefill_chunk = prefill_chunk
        self.truncate_prompts = truncate_prompts
        self.num_speculative_tokens = num_speculative_tokens
        self.adaptive_budget = adaptive_budget
        self.topk = topk
        self.eos_token_ids = eos_token_ids
        self.budget = Budget(max_speculative_tokens, num_speculative_tokens)
        self.cache = target.new_cache(max_batch_size)
        self.scheduler = Scheduler(max_batch_size, self._swap)
        self.sequences: dict[str, Sequence] = {}
        self.texts: dict[str, Detokenizer] = {}
        self.sinks: list[Callable[[Sequence], None]] = []
        self.refresh: Callable[[], None] = lambda: None
        self.closers: list[Callable[[], None]] = []
        self.verify_seconds = 0.0  # spent in filtering and verification, of step_seconds
        self.step_seconds = 0.0
        self._sampling: tuple[tuple[str, ...], SamplingBatch] | None = None

    # -- requests --------------------------------------------------------------------------------

    def add(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        expert: str | None = None,
        draft: bool = True,
        capture: bool = False,
    ) -> str:
        """Queue a prompt (text or token ids); returns the request's id.

        expert pins one; draft=False is plain decoding; capture keeps what learning needs. Raises
        InvalidRequest for an empty prompt, one longer than the context, or an id in use.
        """
        params = params or SamplingParams()
        request_id = request_id or uuid.uuid4().hex
        if request_id in self.sequences:
            raise InvalidRequest(f"request id {request_id!r} is in use.")
        token_ids = self._tokenise(prompt)
        seed = params.seed if params.seed is not None else secrets.randbits(62)
        sequence = Sequence(request_id, token_ids, len(token_ids), params, seed)
        sequence.prompt = prompt if isinstance(prompt, str) else ""
        sequence.expert, sequence.pinned = expert or SHARED, expert is not None
        sequence.draft, sequence.capture = draft and self.drafter is not None, capture
        self.sequences[request_id] = sequence
        self.texts[request_id] = Detokenizer(self.tokenizer, params.stop)
        self.scheduler.waiting.append(sequence)
        return request_id

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request at once and free its slot; None when there is no such request."""
        sequence = self.sequences.get(request_id)
        return self._finish(sequence, "abort") if sequence else None

    @property
    def has_work(self) -> bool:
        return bool(self.sequences)

    def _tokenise(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            if not prompt.strip():
                raise InvalidRequest("the prompt is empty.")
            ids = list(self.tokenizer(prompt)["input_ids"])
        else:
            ids = list(prompt)
        if not ids or not all(0 <= token < self.target.vocab_size for token in ids):
            raise InvalidRequest("the prompt is empty or has token ids outside the vocabulary.")
        room = self.max_model_len - 1
        if len(ids) > room and not self.truncate_prompts:
            raise InvalidRequest(
                f"the prompt has {len(ids)} tokens and the context takes {room}; "
                "shorten it or set long_prompts to 'truncate'."
            )
        return ids[-room:]

    # -- one step --------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Read prompts, draft, verify once. Returns an output for every sequence that got text or ended."""
        began = time.perf_counter()
        self.refresh()
        new = self.scheduler.admit()
        if new:
            self.selector.assign(new)
        self._read_prompts()
        outputs = self._decode() if self.scheduler.num_ready else []
        self.step_seconds += time.perf_counter() - began
        return outputs

    def _read_prompts(self) -> None:
        """One chunk of every prompt that is still being read, all in one padded forward."""
        reading = self.scheduler.reading
        rest = [s.num_prompt_tokens - 1 - s.target_cached for s in reading]
        width = min(max(rest, default=0), self.prefill_chunk)
        if width:
            pieces = [s.token_ids[s.target_cached : s.target_cached + width] for s in reading]
            pieces = [piece + [0] * (width - len(piece)) for piece in pieces]
            ids = torch.tensor(pieces, device=self.target.device)
            starts = [s.target_cached for s in reading]
            self.target.forward(self.cache, reading[0].slot, ids, starts, keep=1)
        for sequence, left in zip(reading, rest, strict=True):
            sequence.target_cached += min(left, width)
            if sequence.target_cached == sequence.num_prompt_tokens - 1:
                self.scheduler.mark_ready(sequence)

    def _decode(self) -> list[RequestOutput]:
        rows = self.scheduler.ready
        sampling = self._sampling_of(rows)
        draft = self._draft(rows, sampling)
        logits, began = self._verify_forward(rows, draft)
        filtered = filter_logits(logits, sampling)
        position = torch.tensor([len(row.token_ids) for row in rows], device=logits.device)
        checking = time.perf_counter()
        verdict = Verdict(
            *verify_chain(
                filtered,
                draft.proposal.token_ids,
                draft.proposal.logits,
                num_draft=draft.proposal.lengths,
                temperature=0.0 if sampling.greedy else sampling.temperature,
                seed=sampling.seed,
                position=position,
            )
        )
        emitted, accepted = verdict.tokens.tolist(), verdict.num_accepted.tolist()
        broken = verdict.status.tolist()
        now = time.perf_counter()
        self.verify_seconds += now - checking
        self.budget.verify_cost.observe(len(rows), logits.shape[1], (now - began) * 1e3)
        self.selector.observe(rows, verdict)
        self._capture(rows, logits, accepted)
        return [
            output
            for b, row in enumerate(rows)
            if (output := self._advance(row, emitted[b], accepted[b], draft.confidences[b], draft, broken[b]))
        ]

    def _sampling_of(self, rows: list[Sequence]) -> SamplingBatch:
        key = tuple(row.request_id for row in rows)
        if self._sampling is None or self._sampling[0] != key:
            params, seeds = [row.params for row in rows], [row.seed for row in rows]
            self._sampling = (key, SamplingBatch.of(params, seeds, self.target.device))
        return self._sampling[1]

    def _draft(self, rows: list[Sequence], sampling: SamplingBatch) -> Draft:
        """Guess for every row that wants it; nothing where drafting does not pay."""
        nothing = empty_draft(len(rows), self.target.device)
        if self.drafter is None:
            return nothing
        seeded = [row.params.seed is not None and row.params.temperature > 0 for row in rows]
        fixed = [not self.adaptive_budget or by_seed for by_seed in seeded]
        limits = [self._limit(row, is_fixed) for row, is_fixed in zip(rows, fixed, strict=True)]
        free = [row.expert for row, limit, f in zip(rows, limits, fixed, strict=True) if limit and not f]
        if free and not self.budget.start(free):
            limits = [limit if f else 0 for limit, f in zip(limits, fixed, strict=True)]
        if not any(limits):
            return nothing
        return self.drafter.propose(rows, sampling, limits, fixed, self.budget)

    def _limit(self, row: Sequence, fixed: bool) -> int:
        """The most tokens this row may draft: one less than it may still emit."""
        if not row.draft:
            return 0
        longest = self.num_speculative_tokens if fixed else self.budget.longest
        left = min(row.params.max_tokens - row.num_generated, self.max_model_len - len(row.token_ids))
        return max(0, min(longest, left - 1))

    def _verify_forward(self, rows: list[Sequence], draft: Draft) -> tuple[torch.Tensor, float]:
        """Target logits [B, K+1, V] after the last token and after each drafted one."""
        began = time.perf_counter()
        last = torch.tensor([row.token_ids[-1:] for row in rows], device=self.target.device)
        ids = torch.cat([last, draft.proposal.token_ids.clamp_min(0)], dim=1)
        starts = [len(row.token_ids) - 1 for row in rows]
        return self.target.forward(self.cache, 0, ids, starts), began

    def _capture(self, rows: list[Sequence], logits: torch.Tensor, accepted: list[int]) -> None:
        """Keep the target's top-k wherever a token was emitted, for rows that may be learned from."""
        wanted = [b for b, row in enumerate(rows) if row.capture]
        if not wanted:
            return
        chosen = logits[wanted].float()
        values, ids = chosen.topk(min(self.topk, chosen.shape[-1]), dim=-1)
        logprobs = values - chosen.logsumexp(-1, keepdim=True)
        for i, b in enumerate(wanted):
            count = accepted[b] + 1
            rows[b].captured.append((ids[i, :count].cpu(), logprobs[i, :count].cpu()))

    def _advance(
        self,
        row: Sequence,
        emitted: list[int],
        accepted: int,
        confidences: list[float],
        draft: Draft,
        broken: int,
    ) -> RequestOutput | None:
        """Take the verified tokens into the sequence; end it where it must end."""
        before = len(row.token_ids)
        row.num_steps += 1
        if confidences:
            row.num_drafts += 1
            row.drafted += len(confidences)
            row.accepted += accepted
            row.draft_cached = before + min(accepted, draft.steps - 1)
            if self.drafter is not None:
                row.adapter_version = self.drafter.bank.version(row.expert)
            if accepted < len(confidences):
                row.rejected.append(row.num_generated + accepted)
            self.budget.model(row.expert).observe(confidences, accepted)
        row.target_cached = before + accepted
        if broken:
            return self._finish(row, "error")
        tokens = emitted[: accepted + 1]
        reason: Any = None
        room = min(row.params.max_tokens - row.num_generated, self.max_model_len - before)
        for index, token in enumerate(tokens[:room]):
            if token in self.eos_token_ids and not row.params.ignore_eos:
                tokens, reason = tokens[: index + 1], "stop"
                break
        else:
            if len(tokens) >= room:
                tokens, reason = tokens[:room], "length"
        stopped = self.texts[row.request_id].add(tokens)
        if stopped is not None:
            tokens, reason = tokens[:stopped], "stop"
        row.token_ids += tokens
        row.first_token_at = row.first_token_at or time.monotonic()
        return self._finish(row, reason, stopped is not None) if reason else self._output(row)

    def _finish(self, row: Sequence, reason: Any, at_stop: bool = False) -> RequestOutput:
        row.finish_reason = reason
        row.finished_at = time.monotonic()
        if not at_stop:
            self.texts[row.request_id].flush()
        self.scheduler.remove(row)
        output = self._output(row)
        del self.sequences[row.request_id], self.texts[row.request_id]
        for sink in self.sinks:
            sink(row)
        return output

    def _output(self, row: Sequence) -> RequestOutput:
        text = self.texts[row.request_id]
        shown = len(text.text) if row.finish_reason else text.settled()
        delta, row.text = text.text[len(row.text) : shown], text.text[:shown]
        drafted = row.num_drafts
        return RequestOutput(
            request_id=row.request_id,
            prompt=row.prompt,
            text=row.text,
            token_ids=row.generated,
            finish_reason=row.finish_reason,
            expert=row.expert,
            adapter_version=row.adapter_version,
            num_drafts=drafted,
            num_draft_tokens=row.drafted,
            num_accepted_tokens=row.accepted,
            num_rejections=len(row.rejected),
            mean_acceptance_length=1 + row.accepted / drafted if drafted else None,
            seconds=(row.finished_at or time.monotonic()) - row.arrived_at,
            delta=delta,
        )

    def _swap(self, a: int, b: int) -> None:
        self.cache.swap(a, b)
        if self.drafter is not None:
            self.drafter.cache.swap(a, b)

    # -- whole answers ---------------------------------------------------------------------------

    def generate(
        self,
        prompts: str | list[str] | list[list[int]],
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        expert: str | None = None,
        draft: bool = True,
        learn: bool = False,
        on_finish: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer all prompts, batched; outputs in input order. `learn` keeps records for distillation.

        Raises InvalidRequest before anything is started when one of the prompts cannot be accepted.
        """
        ids = self._add_all(prompts, params, expert, draft, learn)
        done: dict[str, RequestOutput] = {}
        while len(done) < len(ids):
            for output in self.step():
                if output.finish_reason and output.request_id in ids:
                    done[output.request_id] = output
                    if on_finish:
                        on_finish(output)
        return [done[request_id] for request_id in ids]

    def stream(
        self,
        prompt: str,
        params: SamplingParams | None = None,
        *,
        expert: str | None = None,
        draft: bool = True,
    ) -> Iterator[RequestOutput]:
        """Outputs of one prompt as they grow (`delta` holds the new text). Closing it aborts the request."""
        request_id = self.add(prompt, params, expert=expert, draft=draft)
        try:
            while request_id in self.sequences:
                yield from (output for output in self.step() if output.request_id == request_id)
        finally:
            self.abort(request_id)

    def _add_all(
        self, prompts: Any, params: Any, expert: str | None, draft: bool, learn: bool
    ) -> dict[str, None]:
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        per_prompt = params if isinstance(params, list) else [params] * len(prompts)
        if len(per_prompt) != len(prompts):
            raise InvalidRequest(f"{len(prompts)} prompts but {len(per_prompt)} sampling parameters.")
        ids: dict[str, None] = {}
        try:
            for prompt, each in zip(prompts, per_prompt, strict=True):
                ids[self.add(prompt, each, expert=expert, draft=draft, capture=learn)] = None
        except InvalidRequest:
            for request_id in ids:
                self.abort(request_id)
            raise
        return ids

    def close(self) -> None:
        """Abort what runs and let go of the home."""
        for request_id in list(self.sequences):
            self.abort(request_id)
        for closer in self.closers:
            closer()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
