"""The routes of an operator: domains, versions, learning, replay. One change at a time.

Whatever takes long (embedding the examples of a domain) runs beside the engine's thread; only the finished
router and adapters are taken in by it, between two steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Path, Query, Request
from pydantic import Field

from moedraft.engine.admin import check_examples, register_domain, remove_domain
from moedraft.engine.build import System, open_router
from moedraft.serve import manage
from moedraft.serve.body import StrictRoute
from moedraft.serve.context import ServerContext, context_of
from moedraft.serve.errors import ApiError
from moedraft.serve.schema import ErrorBody, Strict
from moedraft.serve.trainer import TrainerSupervisor

MOST_EXAMPLES = 10_000
MOST_TEXTS = 16  # routed in one request, since the engine waits meanwhile
T = TypeVar("T")
Name = Annotated[str, Path(max_length=256)]
Data = dict[str, Any]

router = APIRouter(prefix="/admin", route_class=StrictRoute, responses={"default": {"model": ErrorBody}})


class Registration(Strict):
    name: str = Field(max_length=256)
    examples: list[str] = Field(min_length=1, max_length=MOST_EXAMPLES)
    description: str = Field("", max_length=4000)


class Promotion(Strict):
    version: int = Field(ge=0, lt=2**31, description="0: the untrained expert")


class Purge(Strict):
    domain: str | None = Field(max_length=256, description="null: the records of all")


class Texts(Strict):
    texts: list[str] = Field(min_length=1, max_length=MOST_TEXTS)


@router.get("/domains")
def list_domains(request: Request) -> Data:
    return {"domains": manage.domains(context_of(request).store)}


@router.post("/domains", status_code=201)
async def register(request: Request, body: Registration) -> Data:
    """Register a domain by example prompts, and fit the router to it."""
    context = context_of(request)
    check_examples(body.name, body.examples)

    def work() -> Data:
        own = open_router(context.settings, context.store)  # the engine's goes on routing
        found = register_domain(context.store, own, body.name, body.examples, body.description)
        return manage.summary(found)

    return await _change(context, work)


@router.get("/domains/{name}")
def show_domain(request: Request, name: Name) -> Data:
    return manage.domain(context_of(request).store, name)


@router.delete("/domains/{name}")
async def delete_domain(request: Request, name: Name) -> Data:
    """Forget a domain: its examples, its replay and its adapters."""
    context = context_of(request)

    def work() -> Data:
        manage.find_domain(context.store, name)
        context.worker.system.recorder.flush()
        remove_domain(context.store, open_router(context.settings, context.store), name)
        return {"removed": name}

    return await _change(context, work)


@router.get("/adapters")
def list_adapters(request: Request, name: Annotated[str | None, Query(max_length=256)] = None) -> Data:
    return {"adapters": manage.adapters(context_of(request).store, name)}


@router.post("/adapters/{name}/promote")
async def promote(request: Request, name: Name, body: Promotion) -> Data:
    """Make a version the one that serves, after checking its files."""
    context = context_of(request)
    return await _change(context, lambda: manage.promote(context.store, name, body.version))


@router.post("/adapters/{name}/rollback")
async def rollback(request: Request, name: Name) -> Data:
    """Go back to the version that the live one was made from."""
    context = context_of(request)
    return await _change(context, lambda: manage.rollback(context.store, name))


@router.get("/learning")
def learning(request: Request) -> Data:
    context = context_of(request)
    if context.supervisor is None:
        return {"enabled": False}
    return {"enabled": True, **asdict(context.supervisor.state())}


@router.post("/learning/pause")
def pause(request: Request) -> Data:
    """No update is begun, and one that goes on waits, until `resume`."""
    _supervisor(request).pause()
    return learning(request)


@router.post("/learning/resume")
def resume(request: Request) -> Data:
    _supervisor(request).resume()
    return learning(request)


@router.get("/replay")
def replay(request: Request) -> Data:
    context = context_of(request)
    context.worker.system.recorder.flush()
    return {"records": manage.replay(context.store)}


@router.post("/replay/purge")
def purge(request: Request, body: Purge) -> Data:
    """Delete the records of a domain, or all. `overwritten`: their bytes too; else that is tried again."""
    context = context_of(request)
    context.worker.system.recorder.flush()  # of what has been answered nothing may come afterwards
    count = manage.purge(context.store, body.domain)
    return {"domain": body.domain, "purged": count, "overwritten": not context.store.home.erasing}


@router.post("/route")
async def route(request: Request, body: Texts) -> Data:
    """Which domain each text belongs to, and how sure the router is."""
    found = await context_of(request).worker.call(lambda system: system.router.route(body.texts))
    return {"routes": [asdict(one) for one in found]}


async def _change(context: ServerContext, work: Callable[[], T]) -> T:
    """Do `work` in a thread, no other change beside it, and have the engine take in what came of it."""
    async with context.changes:
        try:
            return await asyncio.to_thread(work)
        finally:
            await context.worker.call(_take_in)


def _take_in(system: System) -> None:
    system.router.load_or_empty()
    system.refresh()


def _supervisor(request: Request) -> TrainerSupervisor:
    supervisor = context_of(request).supervisor
    if supervisor is None:
        raise ApiError(409, "This server runs without learning.", code="learning_off")
    return supervisor
