"""Whole answers from an engine: add, step until they are there, hand them over."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, KeysView
from typing import Any

from moedraft.core import InvalidRequest, RequestOutput, SamplingParams
from moedraft.engine.port import OnOutput


class WholeAnswers(ABC):
    """`generate` and `stream` for whoever can `add`, `step` and `abort`."""

    add: Callable[..., str]

    @property
    @abstractmethod
    def request_ids(self) -> KeysView[str]: ...
    @abstractmethod
    def step(self) -> list[RequestOutput]: ...
    @abstractmethod
    def abort(self, request_id: str) -> RequestOutput | None: ...

    def generate(
        self,
        prompts: str | list[str] | list[list[int]],
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        expert: str | None = None,
        draft: bool = True,
        learn: bool = False,
        counted: bool = True,
        chat: bool = False,
        on_finish: OnOutput | None = None,
    ) -> list[RequestOutput]:
        """Answer all prompts, batched; outputs in input order.

        learn keeps records for distillation; chat makes each prompt a user's message by the model's chat
        template, if it has one. Requests that were added before are stepped as well, but their outputs are
        not returned here. Raises InvalidRequest, and starts nothing, if a prompt cannot be accepted.
        """
        box: deque[RequestOutput] = deque()
        options = {"expert": expert, "draft": draft, "capture": learn, "counted": counted, "chat": chat}
        ids = self._add_all(prompts, params, options | {"on_output": box.append})
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
        box: deque[RequestOutput] = deque()
        request_id = self.add(prompt, params, expert=expert, draft=draft, chat=chat, on_output=box.append)
        try:
            while box or request_id in self.request_ids:
                if box:
                    yield box.popleft()
                else:
                    self.step()
        finally:
            self.abort(request_id)

    def _add_all(self, prompts: Any, params: Any, options: dict[str, Any]) -> list[str]:
        """Add all prompts and return their ids; if one is refused, none stays."""
        if not isinstance(prompts, Iterable):
            raise InvalidRequest("prompts must be a string or a list of prompts.")
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        per_prompt = params if isinstance(params, list) else [params] * len(prompts)
        if len(per_prompt) != len(prompts):
            raise InvalidRequest(f"{len(prompts)} prompts but {len(per_prompt)} sampling parameters.")
        ids: list[str] = []
        try:
            for prompt, each in zip(prompts, per_prompt, strict=True):
                ids.append(self.add(prompt, each, **options))
        except InvalidRequest:
            for request_id in ids:
                self.abort(request_id)
            raise
        return ids
