"""The routes that clients of OpenAI know: models, completions, chat; streamed or not."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from sse_starlette import EventSourceResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from moedraft.core import RequestOutput
from moedraft.serve.body import StrictRoute
from moedraft.serve.context import ServerContext, context_of
from moedraft.serve.errors import CLIENT_GONE, ApiError, api_error
from moedraft.serve.jobs import Job, chat_job, completion_job, expert_of, target_name
from moedraft.serve.replies import Answer, ChatReply, Reply
from moedraft.serve.schema import ChatRequest, CompletionRequest, ErrorBody, ModelCard, ModelList
from moedraft.serve.worker import Ticket

PING_SECONDS = 15
T = TypeVar("T")

router = APIRouter(prefix="/v1", route_class=StrictRoute, responses={"default": {"model": ErrorBody}})
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"model": Answer, "content": {"text/event-stream": {"schema": {"type": "string"}}}}
}


@router.get("/models")
def models(request: Request) -> ModelList:
    """The target, and each domain as a model whose parent it is."""
    return ModelList(data=_cards(context_of(request)))


@router.get("/models/{name:path}")
def model(request: Request, name: str) -> ModelCard:
    context = context_of(request)
    expert_of(name, target_name(context.settings), _domains(context))
    found = [card for card in _cards(context) if card.id == name]
    return found[0] if found else ModelCard(id=name, created=0, parent=target_name(context.settings))


@router.post("/completions", responses=ANSWERS)
async def completions(request: Request, body: CompletionRequest) -> Response:
    context = context_of(request)
    job = completion_job(body, context.settings, _domains(context))
    return await _answer(request, context, Reply(job, context.prompts.piece))


@router.post("/chat/completions", responses=ANSWERS)
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    context = context_of(request)
    prompt = await context.prompts.chat(body.messages)
    job = chat_job(body, prompt, context.settings, _domains(context))
    return await _answer(request, context, ChatReply(job, context.prompts.piece))


def _domains(context: ServerContext) -> tuple[str, ...]:
    return context.worker.system.router.domains


def _cards(context: ServerContext) -> list[ModelCard]:
    target = target_name(context.settings)
    served = set(_domains(context))
    rows = [
        ModelCard(id=f"{target}:{name}", created=int(created_at), parent=target)
        for name, created_at in context.store.registry.domain_names()
        if name in served
    ]
    return [ModelCard(id=target, created=0), *rows]


# -- answering -----------------------------------------------------------------------------------


async def _answer(request: Request, context: ServerContext, reply: Reply) -> Response:
    """Raises ApiError, InvalidRequest, Overloaded or Draining before anything was sent."""
    deadline = time.monotonic() + context.settings.request_timeout
    if reply.job.stream:
        async with _until(deadline):
            tickets = await _while_connected(request, _submit(context, reply.job))
        if tickets is None:
            return Response(status_code=CLIENT_GONE)
        return TicketStream(_events(reply, tickets, deadline), tickets, context.settings.send_timeout)
    outputs = await _while_connected(request, _whole(context, reply.job, deadline))
    if not outputs:
        return Response(status_code=CLIENT_GONE)
    if reply.job.params.logprobs is None:
        return JSONResponse(reply.whole(outputs))
    # Thousands of small objects: beside the event loop, where others wait for their pieces.
    return await run_in_threadpool(lambda: JSONResponse(reply.whole(outputs)))


async def _submit(context: ServerContext, job: Job) -> list[Ticket]:
    """A ticket per answer; all or none."""
    tickets: list[Ticket] = []
    options: dict[str, Any] = {"expert": job.expert, "draft": job.draft, "capture": job.capture}
    try:
        for prompt in job.prompts:
            await context.prompts.check(prompt)
        for prompt, params in job.choices():
            tickets.append(await context.worker.submit(prompt, params, **options))
    except BaseException:
        _cancel(tickets)
        raise
    return tickets


async def _whole(context: ServerContext, job: Job, deadline: float) -> list[RequestOutput]:
    tickets: list[Ticket] = []
    try:
        async with _until(deadline):
            tickets = await _submit(context, job)
            return [_checked(await ticket.result()) for ticket in tickets]
    finally:
        _cancel(tickets)


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns; None, the work cancelled, where the client goes away before."""
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
    """The output itself; ApiError where it ended for a reason that no client asked for."""
    if output.finish_reason == "error":
        raise ApiError(500, "The model gave no usable answer to this request.", code="engine_error")
    if output.finish_reason == "abort":
        raise ApiError(503, "The request was ended by the server.", code="aborted")
    return output


@asynccontextmanager
async def _until(deadline: float) -> AsyncIterator[None]:
    """The block ends by `deadline` (monotonic seconds), or with ApiError 504."""
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
    """Server-sent events that end their tickets however they end, begun or not."""

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
    """All pieces as events; an error that comes in the middle is the last one."""
    last: dict[int, RequestOutput] = {}
    try:
        for opening in reply.openings():
            yield _event(opening)
        async with aclosing(_merged(tickets, deadline)) as outputs:
            async for index, output in outputs:
                yield _event(reply.piece(index, _checked(output)))
                last[index] = output
        if reply.job.include_usage:
            yield _event(reply.closing([last[index] for index in range(len(tickets))]))
        yield {"data": "[DONE]"}
    except ApiError as error:
        yield _event(error.body)
    except Exception as error:
        yield _event(api_error(error).body)


async def _merged(tickets: Sequence[Ticket], deadline: float) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """(index, output) of all tickets as they come. Raises ApiError at the deadline."""
    if len(tickets) == 1:  # nearly always, and much cheaper
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
    """ASCII only: some readers take U+2028 and its like for the end of a line."""
    return {"data": json.dumps(data, allow_nan=False)}
