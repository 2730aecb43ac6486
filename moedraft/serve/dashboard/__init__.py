"""The dashboard: read-only pages that update themselves. The browser loads nothing from other hosts.

`mount` adds NiceGUI to the server's own application. Access is checked before any page is reached: the
server's guard also covers `/dashboard` and its websocket.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from nicegui import core, ui
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moedraft.insight.observe import Observer
from moedraft.serve.dashboard import pages
from moedraft.serve.dashboard.files import csv_file
from moedraft.serve.dashboard.looking import LOOKING, Looking
from moedraft.serve.http.model_names import target_name

if TYPE_CHECKING:
    from moedraft.serve.http.context import ServerContext

PATH = "/dashboard"
ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="8" '
    'fill="#0f766e"/><path d="M8 21l5-9 4 6 3-4 4 7" fill="none" stroke="#fff" stroke-width="2.6" '
    'stroke-linecap="round" stroke-linejoin="round"/></svg>'
)
# NiceGUI compiles templates in the browser, which needs 'unsafe-eval'. Everything else must come from us.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self'; connect-src 'self'; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    # so that browsers send our forms with their origin, which is checked
    (b"referrer-policy", b"same-origin"),
)


def mount(app: FastAPI, context: ServerContext, *, clock: Callable[[], float] = time.time) -> None:
    """Serve the dashboard of `context` at PATH of `app`. The application must not have started yet."""
    looking = Looking(
        context.worker,
        context.trainer,
        Observer(context.store, clock),
        target_name(context.settings),
        context.authorise,
    )
    app.mount(PATH, Frame(_host(), looking))
    outer = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        async with _host_lifespan(), outer(app) as state:
            yield state

    app.router.lifespan_context = lifespan


class Frame:
    """ASGI layer: tells the pages what to show, and adds headers that limit what the browser may do."""

    def __init__(self, app: ASGIApp, looking: Looking) -> None:
        self.app, self.looking = app, looking

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def framed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        await self.app({**scope, LOOKING: self.looking}, receive, framed)


@cache
def _host() -> FastAPI:
    """The application that NiceGUI runs in. NiceGUI supports one per process, so all dashboards share it."""
    host = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    host.add_api_route("/csv/{table}", csv_file, methods=["GET"])
    pages.register()
    ui.run_with(
        host,
        title="moedraft",
        favicon=ICON,
        dark=None,
        language="en-US",
        tailwind=False,
        binding_refresh_interval=None,
        reconnect_timeout=10.0,
        show_welcome_message=False,
    )
    return host


@asynccontextmanager
async def _host_lifespan() -> AsyncIterator[None]:
    """NiceGUI's own start and stop. Those that `run_with` sets up search all objects in memory."""
    # for the current event loop, if NiceGUI has run in another one before
    core.sio.eio.start_service_task = True
    async with core.app.router.lifespan_context(core.app):
        yield
