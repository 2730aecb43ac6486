"""Answers a planned request with the worker: as one JSON body, or as a stream of events.

However it ends (the client leaves, the time is up, an error), every ticket of the request is ended too.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from sse_starlette import EventSourceResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from moedraft.core import RequestOutput
from moedraft.serve.http.context import ServerContext
from moedraft.serve.http.errors import CLIENT_GONE, ApiError, api_error
from moedraft.serve.http.plan import Conversation, GenerationPlan, Prompt
from moedraft.serve.http.replies import Reply
from moedraft.serve.worker.ticket import Ticket

PING_SECONDS = 15
FEW_LOGPROBS = 1000  # a piece with more log-probabilities is built in a thread, not in the event loop
T = TypeVar("T")


async def answer(request: Request, context: ServerContext, reply: Reply) -> Response:
    """The response to `reply`'s plan.

    Raises ApiError, InvalidRequest, Overloaded, EngineFailed or Draining, always before anything was sent.
    """
    deadline = time.monotonic() + context.settings.request_timeout
    source = request.scope.get("state", {}).get("key_id", "")
    if reply.plan.stream:
        async with _until(deadline):
            tickets = await _while_connected(request, _submit(context, reply.plan, source))
        if tickets is None:
            return Response(status_code=CLIENT_GONE)
        return TicketStream(_events(reply, tickets, deadline), tickets, context.settings.send_timeout)
    outputs = await _while_connected(request, _whole(context, reply.plan, source, deadline))
    if not outputs:
        return Response(status_code=CLIENT_GONE)
    if reply.plan.params.logprobs is None:
        return JSONResponse(reply.whole(outputs))
    # Thousands of small objects are built in a thread, since other answers wait for the event loop.
    return await run_in_threadpool(lambda: _encoded(reply.whole(outputs)))


def _encoded(data: object) -> Response:
    """`data` as JSON, encoded in small steps between which other threads run: `json.dumps` lets none run."""
    steps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).iterencode(data)
    return Response("".join(steps).encode(), media_type="application/json")


async def _submit(context: ServerContext, plan: GenerationPlan, source: str) -> list[Ticket]:
    """Submit one ticket for each answer. If one of them fails, the others are cancelled."""
    tickets: list[Ticket] = []
    try:
        prompts = [await _prepared(context, plan, prompt) for prompt in plan.prompts]
        for prompt, options in prompts:
            for params in plan.choices():
                tickets.append(await context.worker.submit(prompt, params, source=source, **options))
    except BaseException:
        _cancel(tickets)
        raise
    return tickets


async def _prepared(
    context: ServerContext, plan: GenerationPlan, asked: Prompt | Conversation
) -> tuple[Prompt, dict[str, Any]]:
    """A prompt and its options for the worker, with all that need not be done in the engine's thread."""
    prompt = await context.prompts.chat(asked) if isinstance(asked, tuple) else asked
    ids = await context.prompts.ids(prompt)
    options: dict[str, Any] = {"expert": plan.expert, "draft": plan.draft, "capture": plan.capture}
    topic = plan.topic if isinstance(prompt, list) else None
    if plan.routed_first and context.settings.selector != "fixed":
        topic = topic or (prompt if isinstance(prompt, str) else await context.prompts.text(ids))
        options["routed"] = await context.worker.route(topic)
    return prompt if isinstance(prompt, str) else ids, {**options, "topic": topic, "ids": ids}


async def _whole(
    context: ServerContext, plan: GenerationPlan, source: str, deadline: float
) -> list[RequestOutput]:
    tickets: list[Ticket] = []
    try:
        async with _until(deadline):
            tickets = await _submit(context, plan, source)
            return [_checked(await ticket.result()) for ticket in tickets]
    finally:
        _cancel(tickets)


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; if the client disconnects first, `work` is cancelled and the result is None."""
    working, gone = asyncio.create_task(work), asyncio.create_task(_until_gone(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _checked(output: RequestOutput) -> RequestOutput:
    """`output` itself. Raises ApiError if the engine or the server ended the request."""
    if output.finish_reason == "error":
        raise ApiError(500, "The model gave no usable answer to this request.", code="engine_error")
    if output.finish_reason == "abort":
        raise ApiError(503, "The request was ended by the server.", code="aborted")
    return output


@asynccontextmanager
async def _until(deadline: float) -> AsyncIterator[None]:
    """A block that raises ApiError 504 if it is not done by `deadline` (monotonic seconds)."""
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            yield
    except TimeoutError:
        raise ApiError(504, "The answer took longer than this server allows.", code="timeout") from None


def _cancel(tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        ticket.cancel()


# -- streaming -----------------------------------------------------------------------------------


class TicketStream(EventSourceResponse):
    """Server-sent events that cancel their tickets at the end, even if sending never began."""

    def __init__(
        self, events: AsyncIterator[dict[str, str]], tickets: Sequence[Ticket], send_timeout: float
    ) -> None:
        super().__init__(events, ping=PING_SECONDS, sep="\n", send_timeout=send_timeout)
        self._tickets = tickets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            _cancel(self._tickets)


async def _events(reply: Reply, tickets: Sequence[Ticket], deadline: float) -> AsyncIterator[dict[str, str]]:
    """All pieces as events. After an error in the middle, the error is the last event."""
    last: dict[int, RequestOutput] = {}
    try:
        for opening in reply.openings():
            yield _event(opening)
        async with aclosing(_merged(tickets, deadline)) as outputs:
            async for index, output in outputs:
                yield await _piece(reply, index, _checked(output))
                last[index] = output
        if reply.plan.include_usage:
            yield _event(reply.closing([last[index] for index in range(len(tickets))]))
        yield {"data": "[DONE]"}
    except ApiError as error:
        yield _event(error.body)
    except Exception as error:
        yield _event(api_error(error).body)


async def _piece(reply: Reply, index: int, output: RequestOutput) -> dict[str, str]:
    if reply.logprobs_due(index, output) <= FEW_LOGPROBS:
        return _event(reply.piece(index, output))
    return await run_in_threadpool(lambda: _event(reply.piece(index, output)))


async def _merged(tickets: Sequence[Ticket], deadline: float) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """(index, output) of all tickets, in the order in which they come. Raises ApiError at the deadline."""
    if len(tickets) == 1:  # the usual case, which needs no tasks and no queue
        output = await _next(tickets[0], deadline)
        while output is not None:
            yield 0, output
            output = await _next(tickets[0], deadline)
        return
    box: asyncio.Queue[tuple[int, RequestOutput | None]] = asyncio.Queue(maxsize=len(tickets))

    async def pump(index: int, ticket: Ticket) -> None:
        async for output in ticket:
            await box.put((index, output))
        await box.put((index, None))

    pumps = [asyncio.create_task(pump(i, ticket)) for i, ticket in enumerate(tickets)]
    try:
        left = len(tickets)
        while left:
            async with _until(deadline):
                index, output = await box.get()
            if output is None:
                left -= 1
            else:
                yield index, output
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _next(ticket: Ticket, deadline: float) -> RequestOutput | None:
    async with _until(deadline):
        return await anext(ticket, None)


def _event(data: object) -> dict[str, str]:
    """The event for `data`, in ASCII only: some clients take U+2028 and the like for the end of a line."""
    return {"data": json.dumps(data, allow_nan=False)}
