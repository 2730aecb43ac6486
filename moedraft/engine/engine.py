"""One step after another: schedule, draft, verify, move on. The whole life of a request is in `step`.

The engine knows no file. What a finished request leaves behind goes to `sinks`, new adapters come in
through `refresh`; both are put in by `build`.
"""

from __future__ import annotations

import math
import secrets
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from moedraft.chat import has_template
from moedraft.core import (
    SHARED,
    FinishReason,
    InvalidRequest,
    RequestOutput,
    SamplingParams,
    Sequence,
    check_request,
)
from moedraft.drafting.drafter import CausalModel, Drafter
from moedraft.engine.decoder import Decoder, DraftSource, Round
from moedraft.engine.detokenizer import Detokenizer
from moedraft.engine.outputs import count_round, cut, output_of
from moedraft.engine.prompts import tokenise
from moedraft.engine.scheduler import Scheduler

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
        draft_source: DraftSource = "auto",
        topk: int = 16,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.target, self.tokenizer = target, tokenizer
        self.drafter, self.selector = drafter, selector
        self.max_model_len = min(target.max_len, max_model_len or target.max_len)
        self.prefill_chunk, self.truncate_prompts = prefill_chunk, truncate_prompts
        self.eos_token_ids = eos_token_ids
        self.decoder = Decoder(
            target,
            drafter,
            selector,
            slots=max_batch_size,
            max_model_len=self.max_model_len,
            num_speculative_tokens=num_speculative_tokens,
            max_speculative_tokens=max_speculative_tokens,
            adaptive_budget=adaptive_budget,
            draft_source=draft_source,
            topk=topk,
        )
        self.scheduler = Scheduler(max_batch_size, self.decoder.swap)
        self.sequences: dict[str, Sequence] = {}
        self.texts: dict[str, Detokenizer] = {}
        self.boxes: dict[str, deque[RequestOutput]] = {}  # outputs for `generate` and `stream`, whoever steps
        self.sinks: list[Callable[[Sequence], None]] = []
        self.refresh: Callable[[], None] = lambda: None
        self.knows: Callable[[str], bool] = lambda expert: True  # whether there is such an expert
        self.closers: list[Callable[[], None]] = [self.decoder.capture.close]
        self.step_seconds = 0.0  # spent in `step` since the start
        self._round_ended = math.inf  # when the last round did, unless a prompt was read since

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
        chat: bool = False,
        topic: str | None = None,
    ) -> str:
        """Queue a prompt (text or token ids); returns the request's id.

        expert pins one; draft=False is plain decoding; capture keeps what learning needs; chat puts a text
        through the tokenizer's chat template, where it has one; topic is what the router looks at instead
        of the prompt. Raises InvalidRequest for an empty prompt, one longer than the context, an unknown
        expert, or an id in use.
        """
        params = SamplingParams() if params is None else params
        request_id = uuid.uuid4().hex if request_id is None else request_id
        check_request(request_id, prompt, params, expert)
        if request_id in self.sequences:
            raise InvalidRequest(f"request id {request_id!r} is in use.")
        if expert is not None and not self.knows(expert):
            raise InvalidRequest(f"there is no expert named {expert!r}.")
        limits = {"vocab_size": self.target.vocab_size, "room": self.max_model_len - 1}
        token_ids = tokenise(self.tokenizer, prompt, chat=chat, truncate=self.truncate_prompts, **limits)
        seed = params.seed if params.seed is not None else secrets.randbits(62)
        sequence = Sequence(request_id, token_ids, len(token_ids), params, seed)
        sequence.prompt = topic or (prompt if isinstance(prompt, str) else self.tokenizer.decode(token_ids))
        sequence.expert, sequence.pinned = expert or SHARED, expert is not None
        sequence.draft, sequence.capture = draft and self.drafter is not None, capture
        goes_on = isinstance(prompt, str) and not (chat and has_template(self.tokenizer))
        text = Detokenizer(self.tokenizer, params.stop, token_ids if goes_on else ())
        self.sequences[request_id], self.texts[request_id] = sequence, text
        self.scheduler.waiting.append(sequence)
        return request_id

    @torch.inference_mode()  # the caches are tensors of `step`'s inference mode, and a slot may be swapped
    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request at once and free its slot; None when there is no such request."""
        if (sequence := self.sequences.get(request_id)) is None:
            return None
        output = self._finish(sequence, "abort")
        self._deliver([output])
        return output

    @property
    def has_work(self) -> bool:
        return bool(self.sequences)

    # -- one step --------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Read prompts, draft, verify once. Returns an output for every sequence that got text or ended."""
        began = time.perf_counter()
        self.refresh()
        new = self.scheduler.admit()
        if new:
            self.selector.assign(new)
        self._settle()
        if new or self.scheduler.reading:
            self._round_ended = math.inf
        self._read_prompts()
        outputs = self._decode() if self.scheduler.num_ready else []
        self._deliver(outputs)
        self.step_seconds += time.perf_counter() - began
        return outputs

    def _settle(self, ending: Sequence | None = None) -> None:
        """Experts that were found meanwhile take over."""
        for sequence in self.selector.settle(ending):
            if self.drafter is not None and not self.drafter.bank.shares_cache:
                sequence.draft_cached = 0

    def _read_prompts(self) -> None:
        """The next piece of the prompts that are still being read."""
        pieces = self.scheduler.pieces(self.prefill_chunk)
        if any(count for _, count in pieces):
            self.decoder.read(pieces)
        for sequence, count in pieces:
            sequence.target_cached += count
            if sequence.target_cached == sequence.num_prompt_tokens - 1:
                self.scheduler.mark_ready(sequence)

    def _decode(self) -> list[RequestOutput]:
        """One round for all rows that are ready; the budget learns what it cost and brought."""
        rows, began = self.scheduler.ready, time.perf_counter()
        before = sum(len(row.token_ids) for row in rows)
        rounds = self.decoder.round(rows)
        outputs = [self._advance(row, one) for row, one in zip(rows, rounds, strict=True)]
        tokens = sum(len(row.token_ids) for row in rows) - before
        spent = time.perf_counter() - began
        # What lies between two rounds is saved with every round that drafting saves, so it counts as well.
        ms = (spent + min(max(0.0, began - self._round_ended), spent)) * 1e3
        self._round_ended = began + spent
        if rounds[0].steps and self.drafter is not None:
            ms -= self.drafter.catch_up_ms  # paid once, not by every round
        self.decoder.budget.observe(len(rows), rounds[0].steps, rounds[0].verified, tokens, ms)
        return outputs

    def _advance(self, row: Sequence, one: Round) -> RequestOutput:
        """Take the verified tokens into the sequence; end it where it must end."""
        if one.broken:
            self._count(row, one, 0)
            return self._finish(row, "error")
        tokens, reason = cut(row, one.tokens, self.max_model_len, self.eos_token_ids)
        stopped = self.texts[row.request_id].add(tokens[:-1] if reason == "stop" else tokens)  # without EOS
        if stopped is not None:
            tokens, reason = tokens[:stopped], "stop"
        self._count(row, one, len(tokens))
        row.target_cached = len(row.token_ids) + one.accepted
        row.token_ids += tokens
        row.logprobs += one.logprobs[: len(tokens)]
        row.first_token_at = row.first_token_at or time.monotonic()
        return self._finish(row, reason, at_stop=stopped is not None) if reason else self._output(row)

    def _count(self, row: Sequence, one: Round, entered: int) -> None:
        """The sequence's statistics, its draft cache, and what the budget learns from the row."""
        count_round(row, one, entered)
        self.decoder.observe(row, one)
        if not one.confidences or self.drafter is None:
            return
        row.draft_cached += min(one.accepted, one.steps - 1) if row.draft_cached else 0  # 0: a new expert
        if one.expert == row.expert:
            row.adapter_version = self.drafter.bank.version(row.expert)
        if one.accepted < min(entered, len(one.confidences)):
            row.rejected.append(row.num_generated + one.accepted)

    def _finish(self, row: Sequence, reason: FinishReason, *, at_stop: bool = False) -> RequestOutput:
        held_stop = not at_stop and self.texts[row.request_id].flush()
        row.finish_reason = "stop" if held_stop and reason == "length" else reason
        row.finished_at = time.monotonic()
        if reason in ("stop", "length"):
            self._settle(row)  # what is learned from it must stand under its domain
        if self.drafter is not None and len(row.token_ids) > self.drafter.model.max_len:
            row.captured = []  # longer than the draft can read, so nothing it could learn from
        if reason in ("abort", "error") and row.slot >= 0:
            self.decoder.clear(row.slot)
        self.scheduler.remove(row)
        self.decoder.forget(row)
        output = self._output(row)
        del self.sequences[row.request_id], self.texts[row.request_id]
        for sink in self.sinks:
            sink(row)
        return output

    def _output(self, row: Sequence) -> RequestOutput:
        text = self.texts[row.request_id]
        shown = len(text.text) if row.finish_reason else text.settled()
        delta, row.text = text.text[len(row.text) : shown], text.text[:shown]
        return output_of(row, delta)

    # -- whole answers ---------------------------------------------------------------------------

    def generate(
        self,
        prompts: str | list[str] | list[list[int]],
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        expert: str | None = None,
        draft: bool = True,
        learn: bool = False,
        chat: bool = False,
        on_finish: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer all prompts, batched; outputs in input order. `learn` keeps records for distillation.

        chat: as a user's message each, through the chat template, where the model has one.

        Steps requests that were added before as well; their outputs are not returned here.
        Raises InvalidRequest, nothing started, when one of the prompts cannot be accepted.
        """
        ids = self._add_all(prompts, params, expert=expert, draft=draft, capture=learn, chat=chat)
        box: deque[RequestOutput] = deque()
        self.boxes.update(dict.fromkeys(ids, box))
        done: dict[str, RequestOutput] = {}
        try:
            while len(done) < len(ids):
                if not box:
                    self.step()
                output = box.popleft() if box else None
                if output and output.finish_reason:
                    done[output.request_id] = output
                    if on_finish:
                        on_finish(output)
        finally:
            for request_id in ids:
                del self.boxes[request_id]
                self.abort(request_id)
        return [done[request_id] for request_id in ids]

    def stream(
        self,
        prompt: str,
        params: SamplingParams | None = None,
        *,
        expert: str | None = None,
        draft: bool = True,
        chat: bool = False,
    ) -> Iterator[RequestOutput]:
        """Outputs of one prompt as they grow (`delta` holds the new text). Closing it aborts the request."""
        request_id = self.add(prompt, params, expert=expert, draft=draft, chat=chat)
        box = self.boxes[request_id] = deque()
        try:
            while box or request_id in self.sequences:
                if box:
                    yield box.popleft()
                else:
                    self.step()
        finally:
            del self.boxes[request_id]
            self.abort(request_id)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if (box := self.boxes.get(output.request_id)) is not None:
                box.append(output)

    def _add_all(self, prompts: Any, params: Any, **options: Any) -> dict[str, None]:
        if not isinstance(prompts, Iterable):
            raise InvalidRequest("prompts must be a string or a list of prompts.")
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        per_prompt = params if isinstance(params, list) else [params] * len(prompts)
        if len(per_prompt) != len(prompts):
            raise InvalidRequest(f"{len(prompts)} prompts but {len(per_prompt)} sampling parameters.")
        ids: dict[str, None] = {}
        try:
            for prompt, each in zip(prompts, per_prompt, strict=True):
                ids[self.add(prompt, each, **options)] = None
        except InvalidRequest:
            for request_id in ids:
                self.abort(request_id)
            raise
        return ids

    def close(self) -> None:
        """Abort what runs and let go of the home."""
        try:
            for request_id in list(self.sequences):
                self.abort(request_id)
        finally:
            for closer in self.closers:
                closer()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
