"""Builds answers in the form of OpenAI's API, with our own figures under `metrics.speculative_decoding`."""

from __future__ import annotations

import time
import uuid
from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from typing import Any, NotRequired

from typing_extensions import TypedDict  # pydantic requires this one before Python 3.12

from moedraft.core import RequestOutput, TokenLogprobs
from moedraft.serve.http.plan import GenerationPlan
from moedraft.serve.http.prompts import Piece
from moedraft.speculation import SpeculationStats

LOWEST = -9999.0  # OpenAI's value for a probability of zero


class Speculative(TypedDict):
    """Sums over all answers of the request. `expert` is null where they had several."""

    mean_acceptance_length: float | None
    draft_acceptance_rate: float | None
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_lookup_tokens: int
    num_accepted_lookup_tokens: int
    num_earlier_tokens: int
    num_accepted_earlier_tokens: int
    expert: str | None
    adapter_version: int | None


class AnswerMetrics(TypedDict):
    speculative_decoding: Speculative


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Answer(TypedDict):
    """A completion, or a piece of one. Pieces have `usage` and `metrics` only at the end."""

    id: str
    object: str
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: NotRequired[Usage]
    metrics: NotRequired[AnswerMetrics]


class Reply:
    """Builds the whole answer, or its pieces, for one plan. `piece` gives the text of a single token."""

    prefix, kind, piece_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, plan: GenerationPlan, piece: Callable[[int], Piece]) -> None:
        self.plan, self._piece = plan, piece
        self._id, self._created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        # for each answer, how many tokens' log-probabilities were sent
        self._told = [0] * (plan.n * len(plan.prompts))
        self._offsets = [0] * len(self._told)  # for each answer, the length in characters of those tokens
        self._letters = [getincrementaldecoder("utf-8")("replace") for _ in self._told]

    def whole(self, outputs: Sequence[RequestOutput]) -> Answer:
        choices = [self._choice(i, output) for i, output in enumerate(outputs)]
        return {
            **self._frame(self.kind, choices),
            "usage": usage_of(outputs, self.plan.n),
            "metrics": metrics_of(outputs),
        }

    def openings(self) -> list[Answer]:
        """The pieces to send before any text."""
        return []

    def piece(self, index: int, output: RequestOutput) -> Answer:
        """The new text in `output`, as a piece of answer `index`."""
        answer = self._frame(self.piece_kind, [self._choice_piece(index, output)])
        if output.finish_reason:
            answer["metrics"] = metrics_of([output])
        return answer

    def logprobs_due(self, index: int, output: RequestOutput) -> int:
        """How many log-probabilities the next piece of answer `index` has: many where its reader is slow."""
        asked = self.plan.params.logprobs
        return 0 if asked is None else (asked + 1) * (len(output.token_ids) - self._told[index])

    def closing(self, outputs: Sequence[RequestOutput]) -> Answer:
        """The last piece, with the counts of all answers."""
        answer = self._frame(self.piece_kind, [])
        answer["usage"], answer["metrics"] = usage_of(outputs, self.plan.n), metrics_of(outputs)
        return answer

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> Answer:
        frame = {"id": self._id, "object": kind, "created": self._created, "model": self.plan.model}
        return {**frame, "choices": choices}  # type: ignore[typeddict-item]

    def _choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        return {
            "index": index,
            "text": output.text,
            "logprobs": self._logprobs(index, output),
            "finish_reason": output.finish_reason,
        }

    def _choice_piece(self, index: int, output: RequestOutput) -> dict[str, Any]:
        return {**self._choice(index, output), "text": output.delta}

    def _fresh(self, index: int, output: RequestOutput) -> list[tuple[int, TokenLogprobs]]:
        """The tokens whose log-probabilities were not sent yet, with these."""
        start = self._told[index]
        fresh = list(zip(output.token_ids[start:], (output.logprobs or ())[start:], strict=False))
        self._told[index] += len(fresh)
        return fresh

    def _logprobs(self, index: int, output: RequestOutput) -> dict[str, Any] | None:
        if self.plan.params.logprobs is None:
            return None
        fresh, offsets = self._fresh(index, output), []
        for token, _ in fresh:
            offsets.append(self._offsets[index])
            piece = self._piece(token)
            if piece.shown:
                self._offsets[index] += len(self._letters[index].decode(piece.data))
        return {
            "tokens": [self._piece(token).text for token, _ in fresh],
            "token_logprobs": [finite(one.logprob) for _, one in fresh],
            "top_logprobs": [self._top(token, one) for token, one in fresh],
            "text_offset": offsets,
        }

    def _top(self, token: int, one: TokenLogprobs) -> dict[str, float]:
        """The most probable tokens, and `token` itself even if it is not one of them."""
        top: dict[str, float] = {}
        for other, logprob in one.top:
            top.setdefault(self._piece(other).text, finite(logprob))
        return {**top, self._piece(token).text: finite(one.logprob)}


class ChatReply(Reply):
    prefix, kind, piece_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def openings(self) -> list[Answer]:
        delta = {"role": "assistant", "content": ""}
        return [
            self._frame(self.piece_kind, [_chat_piece(i, delta, None, None)]) for i in range(len(self._told))
        ]

    def _choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": self._logprobs(index, output),
            "finish_reason": output.finish_reason,
        }

    def _choice_piece(self, index: int, output: RequestOutput) -> dict[str, Any]:
        delta = {"content": output.delta} if output.delta else {}
        return _chat_piece(index, delta, self._logprobs(index, output), output.finish_reason)

    def _logprobs(self, index: int, output: RequestOutput) -> dict[str, Any] | None:
        if self.plan.params.logprobs is None:
            return None
        content = [
            {
                **self._spelt(token, one.logprob),
                "top_logprobs": [self._spelt(i, p) for i, p in one.top],
            }
            for token, one in self._fresh(index, output)
        ]
        return {"content": content, "refusal": None}

    def _spelt(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self._piece(token)
        return {"token": piece.text, "logprob": finite(logprob), "bytes": list(piece.data)}


def _chat_piece(index: int, delta: dict[str, Any], logprobs: Any, reason: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def usage_of(outputs: Sequence[RequestOutput], n: int) -> Usage:
    """Token counts. The `n` answers to one prompt follow each other, and the prompt is counted once."""
    prompt = sum(output.num_prompt_tokens for output in outputs[::n])
    completion = sum(len(output.token_ids) for output in outputs)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def metrics_of(outputs: Sequence[RequestOutput]) -> AnswerMetrics:
    stats = sum((output.speculation for output in outputs), SpeculationStats())
    used = {(output.expert, output.adapter_version) for output in outputs}
    expert, version = used.pop() if len(used) == 1 else (None, None)
    return {
        "speculative_decoding": {
            "mean_acceptance_length": stats.mean_acceptance_length,
            "draft_acceptance_rate": stats.draft_acceptance_rate,
            "num_drafts": stats.num_drafts,
            "num_draft_tokens": stats.num_draft_tokens,
            "num_accepted_tokens": stats.num_accepted_tokens,
            "num_lookup_tokens": stats.num_lookup_tokens,
            "num_accepted_lookup_tokens": stats.num_accepted_lookup_tokens,
            "num_earlier_tokens": stats.num_earlier_tokens,
            "num_accepted_earlier_tokens": stats.num_accepted_earlier_tokens,
            "expert": expert,
            "adapter_version": version,
        }
    }


def finite(logprob: float) -> float:
    return max(logprob, LOWEST)
