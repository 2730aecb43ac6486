"""The engine: requests in, answers out, one step after another. It knows no file and no network.

Its port is small (`port.ServingEngine`): `add` and `abort` requests, `step` while `has_work`, `recover` after
a step that raised, and `figures`. Adapters come in through `adapters`, finished requests go out to those who
`subscribe`.
"""

from __future__ import annotations

import logging
import secrets
import uuid
from collections.abc import Callable, Iterable, KeysView
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch

from moedraft.chat import has_template
from moedraft.core import SHARED, FinishReason, InvalidRequest, RequestOutput, SamplingParams, Sequence
from moedraft.drafting.chooser import Chooser, DraftLimits, DraftSource
from moedraft.drafting.drafter import CausalModel, ExpertDrafter
from moedraft.drafting.lengths.budget import Budget
from moedraft.drafting.lookup.past_answers import PastAnswers
from moedraft.drafting.timer import RoundTimer
from moedraft.engine.answers import WholeAnswers
from moedraft.engine.capture import Capture
from moedraft.engine.commit import commit, output_of, stamp_first_tokens
from moedraft.engine.detokenizer import Detokenizer
from moedraft.engine.port import AdapterSource, EngineFigures, Learner, OnOutput, Sink, Sources
from moedraft.engine.prompts import Prompts
from moedraft.engine.round import Round
from moedraft.engine.scheduler import Scheduler
from moedraft.engine.target import TargetRunner
from moedraft.engine.tokenise import check_request, tokenise
from moedraft.engine.verification import Verification, Verifier
from moedraft.evidence import Evidence, Reading

if TYPE_CHECKING:
    from moedraft.routing.router import Route
    from moedraft.routing.selector import ExpertSelector

log = logging.getLogger(__name__)


class Engine(WholeAnswers):
    """A target with its drafters. Not thread-safe: one thread owns it.

    `generate` and `stream`, of `WholeAnswers`, do the stepping themselves. closers: called at `close`, in
    their order. learners: besides the drafters and the budget, they are shown what every verification gave.
    glance: is shown each whole answer before its slot is given away. past: answers that lookup searches.
    """

    def __init__(
        self,
        target: CausalModel,
        tokenizer: Any,
        drafter: ExpertDrafter,
        selector: ExpertSelector,
        *,
        adapters: AdapterSource | None = None,
        sinks: Iterable[Sink] = (),
        learners: Iterable[Learner] = (),
        closers: Iterable[Callable[[], None]] = (),
        glance: Callable[[Sequence], None] = lambda row: None,
        max_batch_size: int = 8,
        max_model_len: int | None = None,
        prefill_chunk: int = 512,
        truncate_prompts: bool = False,
        num_speculative_tokens: int = 4,
        max_speculative_tokens: int = 8,
        adaptive_budget: bool = True,
        draft_source: DraftSource = "auto",
        past: PastAnswers | None = None,
        verification: Verification = "chain",
        topk: int = 16,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.target, self.tokenizer, self.selector = target, tokenizer, selector
        self.adapters, self._sinks = adapters or Sources(), list(sinks)
        self.max_model_len = min(target.max_len, max_model_len or target.max_len)
        self.vocab_size, self.eos_token_ids = target.vocab_size, eos_token_ids
        self.timer, budget = RoundTimer(), Budget(max_speculative_tokens, target.ragged)
        limits = DraftLimits(self.max_model_len, num_speculative_tokens, adaptive_budget)
        fill, self._glance = self.timer.apart()(drafter.catch_up), self.timer.apart()(glance)
        self.chooser = Chooser(drafter, budget, limits, draft_source, catch_up=fill, past=past)
        self.runner = TargetRunner(target, max_batch_size, drafter.needs)
        self.capture, self._closers, self.truncate_prompts = Capture(topk), [*closers], truncate_prompts
        self.round = self._round(Verifier(verification), learners)
        self.scheduler = Scheduler(max_batch_size, self._swap)
        self.prompts = Prompts(self.scheduler, self.runner, self.chooser, prefill_chunk)
        self._sequences: dict[str, Sequence] = {}
        self._texts, self._listeners = dict[str, Detokenizer](), dict[str, OnOutput]()

    def _round(self, verifier: Verifier, learners: Iterable[Learner]) -> Round:
        parts = self.runner, self.chooser, verifier, self.capture
        return Round(*parts, self.chooser, *learners, verify=self.timer.verifying(verifier.verify))

    def subscribe(self, sink: Sink) -> Callable[[], None]:
        """Have `sink` called with every request that finishes from now on, before its output leaves.

        Call what is returned to end that.
        """
        self._sinks.append(sink)
        return lambda: self._sinks.remove(sink)

    def work_beside(self) -> None:
        """Have a second thread prepare what is kept for learning. A server calls this once."""
        self.capture.work_beside()

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
        counted: bool = True,
        chat: bool = False,
        topic: str | None = None,
        ids: list[int] | None = None,
        routed: Route | None = None,
        source: str = "",
        on_output: OnOutput | None = None,
    ) -> str:
        """Queue a prompt (text or token ids); returns the request's id.

        expert pins one; draft=False is plain decoding; capture keeps what learning needs; counted=False
        leaves the request out of all statistics; chat puts a text through the tokenizer's chat template,
        where it has one; topic is what the router looks at instead of the prompt; ids are the prompt's tokens
        and routed is what the router says, where the caller has them already; source is who asks; on_output
        gets its outputs, whoever steps. Raises InvalidRequest for an empty prompt, one
        longer than the context, an unknown expert, or an id in use.
        """
        params = SamplingParams() if params is None else params
        request_id = uuid.uuid4().hex if request_id is None else request_id
        check_request(request_id, prompt, params, expert)
        self._check_names(request_id, expert)
        limits = {"vocab_size": self.vocab_size, "room": self.max_model_len - 1}
        ids = tokenise(self.tokenizer, prompt, ids, chat=chat, truncate=self.truncate_prompts, **limits)
        seed = params.seed if params.seed is not None else secrets.randbits(62)
        sequence = Sequence(request_id, ids, len(ids), params, seed, capture=capture, counted=counted)
        sequence.source, sequence.coupled = source, self.round.verifier.rule == "coupled"
        sequence.prompt = topic or (prompt if isinstance(prompt, str) else self.tokenizer.decode(ids))
        sequence.expert, sequence.pinned = expert or SHARED, expert is not None
        if routed is not None and self.selector.knows(routed.domain):  # it may have been removed meanwhile
            sequence.routed = sequence.expert = routed.domain
            sequence.confidence, sequence.prior = routed.confidence, routed.probabilities
        sequence.draft = draft and self.chooser.drafts
        goes_on = isinstance(prompt, str) and not (chat and has_template(self.tokenizer))
        self._texts[request_id] = Detokenizer(self.tokenizer, params.stop, ids if goes_on else ())
        self._sequences[request_id] = sequence
        if on_output is not None:
            self._listeners[request_id] = on_output
        self.scheduler.waiting.append(sequence)
        return request_id

    def _check_names(self, request_id: str, expert: str | None) -> None:
        if request_id in self._sequences:
            raise InvalidRequest(f"request id {request_id!r} is in use.")
        if expert is not None and not self.selector.knows(expert):
            raise InvalidRequest(f"there is no expert named {expert!r}.")

    @torch.inference_mode()  # the caches are tensors of `step`'s inference mode, and a slot may be swapped
    def abort(self, request_id: str, reason: FinishReason = "abort") -> RequestOutput | None:
        """End a request at once and free its slot; None when there is no such request.

        Never raises: a request that cannot be ended in order is forgotten, without an output.
        """
        if (sequence := self._sequences.get(request_id)) is None:
            self._listeners.pop(request_id, None)  # a step that raised may have ended it and left this behind
            return None
        try:
            output = self._finish(sequence, reason)
        except Exception:
            log.exception("A request could not be aborted; it is forgotten.")
            self._forget(sequence)
            self._listeners.pop(request_id, None)
            return None
        self._deliver([output])
        return output

    def recover(self) -> None:
        """After a step that raised: what is in a slot ends with "error", what waits for one goes on waiting.

        If no slot is taken, no running request caused the fault. Then the waiting ones end as well, because
        the engine would otherwise fail at every further step.
        """
        waiting = set(map(id, self.scheduler.waiting)) if self.scheduler.running else set()
        for sequence in list(self._sequences.values()):
            if id(sequence) not in waiting:
                self.abort(sequence.request_id, "error")
        self.scheduler.clear()
        self._listeners = {name: self._listeners[name] for name in self._sequences if name in self._listeners}

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def request_ids(self) -> KeysView[str]:
        """Ids of the requests that have not ended. A live view: it changes when requests come and end."""
        return self._sequences.keys()

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that have not ended. Callers read them and must not change them."""
        return list(self._sequences.values())

    @property
    def figures(self) -> EngineFigures:
        scheduler = self.scheduler
        return EngineFigures(
            scheduler.slots, len(scheduler.running), len(scheduler.waiting), self.chooser.budget.speedup
        )

    # -- one step --------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Read prompts, then one round. Returns an output for every sequence that got text or ended."""
        with self.timer.step():
            self.refresh()
            self._admit()
            reading = self.prompts.begin()
            self._settle()
            outputs = self._decode(reading) if self.scheduler.num_ready else []
            self._deliver(outputs)
        return outputs

    def refresh(self, *, now: bool = False) -> None:
        """Look for what has changed in the home. now: wait until the newest stored versions are loaded."""
        self.adapters.refresh(self._sequences.values(), now=now)

    def _admit(self) -> None:
        """Give free slots to waiting sequences; the router finds their experts now or in a later step."""
        new = self.scheduler.admit()
        if unknown := self.scheduler.to_ask_for(new):
            self.selector.assign(unknown)
        if new or self.scheduler.reading:
            self.timer.interrupted()

    def _settle(self, ending: Sequence | None = None) -> None:
        """Hand sequences to the experts that the selector has found for them since the last call."""
        with self.timer.selecting():
            changed = self.selector.settle(ending)
        if changed:
            self.chooser.experts_changed(changed)

    def _decode(self, reading: Reading | None) -> list[RequestOutput]:
        """One round for all rows that are ready; the budget learns what it cost and brought.

        reading: prompts to be read on the way. The time of such a round says nothing about others.
        """
        rows, outputs = self.scheduler.ready, []
        before = sum(len(row.token_ids) for row in rows)
        with self.timer.round():
            reasons: list[FinishReason | None] = []
            take = lambda evidence, b: reasons.append(self._commit(evidence, b))  # noqa: E731
            evidence = self.round(rows, take, reading)
            if reading:
                self.prompts.end(reading)  # before a row leaves, since then the slots of others change
            stamp_first_tokens(rows, monotonic())
            for row, reason in zip(rows, reasons, strict=True):
                outputs.append(self._finish(row, reason) if reason else self._output(row))
        tokens = sum(len(row.token_ids) for row in rows) - before
        if not reading:
            self.chooser.took(evidence, tokens, self.timer.ms)
        return outputs

    def _commit(self, evidence: Evidence, b: int) -> FinishReason | None:
        text = self._texts[evidence.rows[b].request_id]
        return commit(evidence, b, text, self.max_model_len, self.eos_token_ids)

    # -- the end of a request --------------------------------------------------------------------

    def _finish(self, row: Sequence, reason: FinishReason) -> RequestOutput:
        stopped = self._texts[row.request_id].flush()
        row.finish_reason = "stop" if stopped and reason == "length" else reason
        row.finished_at = monotonic()
        if reason in ("stop", "length"):
            self._settle(row)  # its record for learning is stored under its domain, so that must be known now
            self._glance(row)
        elif row.slot >= 0:
            self.runner.clear(row.slot)
            self.chooser.clear(row.slot)
        if len(row.token_ids) > self.chooser.model.max_len:
            row.captured = []  # the draft cannot read a text this long, so it cannot learn from it either
        self.scheduler.remove(row)
        output = self._output(row)
        self._forget(row)
        for sink in self._sinks:
            sink(row)
        return output

    def _forget(self, row: Sequence) -> None:
        """Remove every trace of the request, whatever state it is in."""
        self._sequences.pop(row.request_id, None)
        self._texts.pop(row.request_id, None)
        self.chooser.forget(row)
        with suppress(Exception):
            if row in self.scheduler:
                self.scheduler.remove(row)

    def _output(self, row: Sequence) -> RequestOutput:
        text = self._texts[row.request_id]
        shown = len(text.text) if row.finish_reason else text.settled()
        delta, row.text = text.text[len(row.text) : shown], text.text[:shown]
        return output_of(row, delta, monotonic())

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            listener = self._listeners.get(output.request_id)
            if output.finish_reason is not None:
                self._listeners.pop(output.request_id, None)
            if listener is not None:
                listener(output)

    def _swap(self, a: int, b: int, length: int) -> None:
        """Exchange two slots in all caches. The longer of their two texts has `length` tokens.

        Within a round the caches already hold tokens that the texts do not have yet, so more is exchanged.
        """
        length += 1 + self.chooser.longest
        self.runner.swap(a, b, length)
        self.chooser.swap(a, b, length)

    def close(self) -> None:
        """Abort what runs and let go of the home."""
        try:
            for request_id in list(self._sequences):
                self.abort(request_id)
        finally:
            for closer in (self.capture.close, *self._closers):
                closer()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
