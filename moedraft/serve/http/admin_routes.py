"""The operator's routes: domains, versions, learning, replay. Only one change is made at a time.

Slow work (embedding the examples of a domain, reading the finished router) runs in another thread than the
engine's. The engine's thread only loads the finished adapters, between two steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Path, Query, Request
from pydantic import Field

from moedraft.core import StorageError
from moedraft.cpu.threads import compute_alone
from moedraft.insight import inventory
from moedraft.serve.http.body import StrictRoute
from moedraft.serve.http.context import ServerContext, context_of
from moedraft.serve.http.schema import ErrorBody, Strict
from moedraft.storage import changes
from moedraft.system.build import System, open_router
from moedraft.system.domains.registering import (
    LONGEST_DESCRIPTION,
    check_examples,
    register_domain,
    remove_domain,
)
from moedraft.system.domains.suggest import coinciding, suggestions_data

MOST_EXAMPLES = 10_000
MOST_TEXTS = 16  # texts in one request at most, since seeded requests wait while they are routed
# Registering embeds examples; in a thread with compute threads of its own that would slow down the engine.
CHANGES = ThreadPoolExecutor(1, "admin-changes", initializer=compute_alone)
T = TypeVar("T")
Name = Annotated[str, Path(max_length=256)]
Data = dict[str, Any]

router = APIRouter(prefix="/admin", route_class=StrictRoute, responses={"default": {"model": ErrorBody}})


class Registration(Strict):
    name: str = Field(max_length=256)
    examples: list[str] = Field(min_length=1, max_length=MOST_EXAMPLES)
    description: str = Field("", max_length=LONGEST_DESCRIPTION)


class Promotion(Strict):
    version: int = Field(ge=0, lt=2**31, description="0: the untrained expert")


class Purge(Strict):
    domain: str | None = Field(max_length=256, description="null: the records of all")


class Texts(Strict):
    texts: list[str] = Field(min_length=1, max_length=MOST_TEXTS)


@router.get("/domains")
def list_domains(request: Request) -> Data:
    return {"domains": inventory.domains(context_of(request).store)}


@router.post("/domains", status_code=201)
async def register(request: Request, body: Registration) -> Data:
    """Register a domain by example prompts, and fit the router to it."""
    context = context_of(request)
    check_examples(body.name, body.examples)

    def work() -> Data:
        # a router of this request's own; the engine's keeps routing meanwhile
        with context.worker.system.changing:
            own = open_router(context.settings, context.store, fit=False)
            found = register_domain(context.store, own, body.name, body.examples, body.description)
        return {**inventory.summary(found), "coincides_with": coinciding(context.store, own, body.name)}

    return await _change(context, work)


@router.get("/domains/{name}")
def show_domain(request: Request, name: Name) -> Data:
    return inventory.domain(context_of(request).store, name)


@router.delete("/domains/{name}")
async def delete_domain(request: Request, name: Name) -> Data:
    """Forget a domain: its examples, replay and adapters. What is left of them as of a purge."""
    context = context_of(request)

    def work() -> Data:
        changes.find_domain(context.store, name)
        context.worker.system.recorder.flush()
        with context.worker.system.changing:
            own = open_router(context.settings, context.store, fit=False)
            return {"removed": name, **remove_domain(context.store, own, name)}

    return await _change(context, work)


@router.get("/suggestions")
async def list_suggestions(request: Request, prompts: bool = False) -> Data:
    """Groups of prompts that no expert serves; with `prompts` all that are kept, for a file of examples."""
    found = await context_of(request).worker.search.suggestions()
    return suggestions_data(found, texts=found.capture, every_prompt=prompts)


@router.get("/overlaps")
async def list_overlaps(request: Request) -> Data:
    """Pairs of domains whose examples lie into one another."""
    return {"overlaps": await context_of(request).worker.search.overlaps()}


@router.get("/adapters")
def list_adapters(request: Request, name: Annotated[str | None, Query(max_length=256)] = None) -> Data:
    store = context_of(request).store
    return {"adapters": inventory.adapters(store, name), "updates": inventory.decisions(store, name)}


@router.post("/adapters/{name}/promote")
async def promote(request: Request, name: Name, body: Promotion) -> Data:
    """Make a version the one that serves, after checking its files."""
    context = context_of(request)

    base = context.worker.system.bank.base_hash

    def work() -> Data:
        return inventory.changed(name, changes.promote(context.store, name, body.version, base))

    return await _change(context, work)


@router.post("/adapters/{name}/rollback")
async def rollback(request: Request, name: Name) -> Data:
    """Go back to the version that the live one was made from."""
    context = context_of(request)

    def work() -> Data:
        return inventory.changed(name, changes.rollback(context.store, name))

    return await _change(context, work)


@router.post("/adapters/{name}/pin")
async def pin(request: Request, name: Name) -> Data:
    """Publish no update for it until it is unpinned, whatever the gate says."""
    return await _pin(context_of(request), name, True)


@router.post("/adapters/{name}/unpin")
async def unpin(request: Request, name: Name) -> Data:
    return await _pin(context_of(request), name, False)


@router.get("/learning")
def learning(request: Request) -> Data:
    """What the server's trainer does; of one that follows the server, its pid and whether it is paused."""
    return context_of(request).trainer.state().data()


@router.post("/learning/pause")
def pause(request: Request) -> Data:
    """No update is begun, and one that goes on waits, until `resume`."""
    context_of(request).trainer.pause()
    return learning(request)


@router.post("/learning/resume")
def resume(request: Request) -> Data:
    context_of(request).trainer.resume()
    return learning(request)


@router.get("/replay")
def replay(request: Request) -> Data:
    context = context_of(request)
    context.worker.system.recorder.flush()
    return inventory.replay(context.store)


@router.post("/replay/purge")
async def purge(request: Request, body: Purge) -> Data:
    """Delete the records of a domain, or all. `overwritten`: their bytes too; else that is tried again.

    `router`: the router is not fitted on any of their prompts; else it is fitted again at the next start.
    `copies` names the databases kept from before an upgrade, which no deletion reaches.
    """
    context = context_of(request)

    def work() -> Data:
        # Records of requests that were answered before must not be written after the purge.
        context.worker.system.recorder.flush()
        with context.worker.system.changing:  # no record is moved to another domain meanwhile
            count = changes.purge(context.store, body.domain)
        with suppress(StorageError), context.worker.system.changing:  # after a refit that goes on
            if changes.knows_deleted(context.store.registry):
                open_router(context.settings, context.store)
        return {"domain": body.domain, "purged": count, **changes.left_of_deleted(context.store)}

    return await _change(context, work)


@router.post("/route")
async def route(request: Request, body: Texts) -> Data:
    """Which domain each text belongs to, and how sure the router is."""
    found = await context_of(request).worker.routes(body.texts)
    return {"routes": [asdict(one) for one in found]}


async def _pin(context: ServerContext, name: str, pinned: bool) -> Data:
    def work() -> Data:
        changes.pin(context.store, name, pinned)
        return {"domain": name, "pinned": pinned}

    return await _change(context, work)


async def _change(context: ServerContext, work: Callable[[], T]) -> T:
    """Do `work` in a thread, one change at a time, and have the router and the engine load the result."""
    run = asyncio.get_running_loop().run_in_executor
    async with context.changes:
        try:
            return await run(CHANGES, work)
        finally:
            await run(CHANGES, _reload, context.worker.system)
            await context.worker.call(System.refresh)


def _reload(system: System) -> None:
    with system.changing:
        system.router.reload()
