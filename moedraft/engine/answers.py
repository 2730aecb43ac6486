"""Whole answers from an engine: add, step until they are there, hand them over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, KeysView
from typing import Any, Protocol

from moedraft.core import InvalidRequest, RequestOutput, SamplingParams
from moedraft.engine.port import OnOutput


class Stepping(Protocol):
    """What is needed of an engine."""

    @property
    def request_ids(self) -> KeysView[str]: ...
    @property
    def add(self) -> Callable[..., str]: ...
    def abort(self, request_id: str) -> RequestOutput | None: ...
    def step(self) -> list[RequestOutput]: ...


def generate(
    engine: Stepping,
    prompts: Any,
    params: Any,
    options: dict[str, Any],
    on_finish: OnOutput | None,
) -> list[RequestOutput]:
    """`Engine.generate`; `options` are those of `Engine.add`."""
    box: deque[RequestOutput] = deque()
    ids = _add_all(engine, prompts, params, options, box)
    done: dict[str, RequestOutput] = {}
    try:
        while len(done) < len(ids):
            if not box:
                engine.step()
            output = box.popleft() if box else None
            if output and output.finish_reason:
                done[output.request_id] = output
                if on_finish:
                    on_finish(output)
    finally:
        for request_id in ids:
            engine.abort(request_id)
    return [done[request_id] for request_id in ids]


def stream(
    engine: Stepping, prompt: str, params: SamplingParams | None, options: dict[str, Any]
) -> Iterator[RequestOutput]:
    """`Engine.stream`."""
    box: deque[RequestOutput] = deque()
    request_id = engine.add(prompt, params, on_output=box.append, **options)
    try:
        while box or request_id in engine.request_ids:
            if box:
                yield box.popleft()
            else:
                engine.step()
    finally:
        engine.abort(request_id)


def _add_all(
    engine: Stepping, prompts: Any, params: Any, options: dict[str, Any], box: deque[RequestOutput]
) -> list[str]:
    if not isinstance(prompts, Iterable):
        raise InvalidRequest("prompts must be a string or a list of prompts.")
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    per_prompt = params if isinstance(params, list) else [params] * len(prompts)
    if len(per_prompt) != len(prompts):
        raise InvalidRequest(f"{len(prompts)} prompts but {len(per_prompt)} sampling parameters.")
    ids: list[str] = []
    try:
        for prompt, each in zip(prompts, per_prompt, strict=True):
            ids.append(engine.add(prompt, each, on_output=box.append, **options))
    except InvalidRequest:
        for request_id in ids:
            engine.abort(request_id)
        raise
    return ids
