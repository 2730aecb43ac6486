"""Builds the FastAPI application: its routes, and the middleware that every request passes through."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import FastAPI

from moedraft.config import Settings
from moedraft.serve import dashboard
from moedraft.serve.auth.access import ACCESS, Authority, Guard, access_of, is_loopback
from moedraft.serve.auth.keyring import Keyring
from moedraft.serve.auth.login import login_router
from moedraft.serve.http import admin_routes, errors, health_routes, openai_routes
from moedraft.serve.http.context import ServerContext
from moedraft.serve.http.envelope import Envelope
from moedraft.serve.http.limits import Admission, BodyLimit
from moedraft.serve.http.model_names import target_name
from moedraft.serve.http.prompts import PromptPreparer
from moedraft.serve.http.rest_of_body import RestOfBody
from moedraft.serve.metrics.counters import PrometheusMetrics
from moedraft.serve.supervisor.follower import Trainer
from moedraft.serve.worker.worker import Worker
from moedraft.storage.keys import Key, KeyFile

PUBLIC_BYTES = 4096  # of a body on a path that needs no key


def create_app(worker: Worker, trainer: Trainer, settings: Settings, own_key: Key | None = None) -> FastAPI:
    """The FastAPI application with everything that is served over HTTP.

    `worker` must be started before the first request. `own_key` exists in this process only; with it the
    command line reaches the server of its home. Every protected path needs a key, except when the server
    listens on a loopback address and no key file was ever written.
    """
    ring = Keyring(KeyFile(settings.home), open_without_keys=is_loopback(settings.host), own=own_key)
    authority = Authority(ring, settings.host, settings.allowed_origins)
    app = FastAPI(
        title="moedraft",
        version=version("moedraft"),
        description="An OpenAI-compatible server whose draft experts learn from the traffic.",
        docs_url=None,  # the standard pages load scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,
    )
    errors.install(app)
    for router in (health_routes.router, openai_routes.router, admin_routes.router, login_router(authority)):
        app.include_router(router)
    context = _context(worker, trainer, settings, authority)
    metrics = PrometheusMetrics(target_name(settings), worker, trainer)
    worker.system.engine.subscribe(metrics.finished)
    app.state.context, app.state.metrics = context, metrics
    if settings.dashboard:
        dashboard.mount(app, context)
    # Starlette runs the layer that was added last first.
    app.add_middleware(
        BodyLimit,
        max_bytes=lambda path: PUBLIC_BYTES if access_of(path) == "public" else settings.max_body_bytes,
        seconds=settings.body_timeout,
        room=settings.max_body_bytes * (settings.max_batch_size + worker.max_waiting),
    )
    app.add_middleware(Admission, check_room=lambda: worker.check_room(context.prompts.waiting))
    app.add_middleware(Guard, authority=authority)
    app.add_middleware(Envelope, observe=lambda path, status: metrics.answered(kind_of(path), status))
    app.add_middleware(RestOfBody, seconds=settings.body_timeout)
    return app


def kind_of(path: str) -> str:
    """The path's kind, one of a few, as a label for metrics: "v1", "admin", … or "unknown"."""
    found = [prefix for prefix in ACCESS if path == prefix or path.startswith(f"{prefix}/")]
    return found[0].strip("/") if found else "unknown"


def _context(worker: Worker, trainer: Trainer, settings: Settings, authority: Authority) -> ServerContext:
    engine = worker.system.engine
    room = engine.max_model_len - 1
    limit = settings.max_prompt_tokens
    if settings.long_prompts == "refuse":
        limit = room if limit is None else min(limit, room)
    prompts = PromptPreparer(
        engine.tokenizer,
        limit,
        room=room,
        vocab_size=engine.vocab_size,
        truncate=settings.long_prompts == "truncate",
    )
    return ServerContext(worker, trainer, settings, worker.system.store, prompts, authority)
