"""The routes of OpenAI's API: models, completions and chat completions, whole or streamed."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from moedraft.serve.http.answering import answer
from moedraft.serve.http.body import StrictRoute
from moedraft.serve.http.context import ServerContext, context_of
from moedraft.serve.http.model_names import expert_of, target_name
from moedraft.serve.http.plan import plan_chat, plan_completion
from moedraft.serve.http.replies import Answer, ChatReply, Reply
from moedraft.serve.http.schema import ChatRequest, CompletionRequest, ErrorBody, ModelCard, ModelList

router = APIRouter(prefix="/v1", route_class=StrictRoute, responses={"default": {"model": ErrorBody}})
ANSWERS: dict[int | str, dict[str, Any]] = {200: {"model": Answer, "content": {"text/event-stream": {}}}}


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
    plan = plan_completion(body, context.settings, _domains(context))
    return await answer(request, context, Reply(plan, context.prompts.piece))


@router.post("/chat/completions", responses=ANSWERS)
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    context = context_of(request)
    plan = plan_chat(body, context.settings, _domains(context))
    return await answer(request, context, ChatReply(plan, context.prompts.piece))


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
