"""The page for people who would rather look than read. Read-only, live, and nothing of it from elsewhere.

`mount` puts NiceGUI into the server's own application. Who may look is decided before: the server's guard
stands in front of `/dashboard`, its websocket included.
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
# NiceGUI compiles templates in the browser, hence unsafe-eval; what it may load or reach is only us.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self'; connect-src 'self'; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),  # without one a form sends no origin, and is refused
)


def mount(app: FastAPI, context: ServerContext, *, clock: Callable[[], float] = time.time) -> None:
    """Serve the dashboard of `context` at PATH of `app`. The application must not have started yet."""
    looking = Looking(
        context.worker,
        context.supervisor,
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
    """ASGI: tells the pages what to look at, and the browser what it may do."""

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
    """The application NiceGUI lives in. It knows one per process, so all dashboards of a process share it."""
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
    """NiceGUI's own; the one that `run_with` gives searches the whole memory for a server."""
    core.sio.eio.start_service_task = True  # of this event loop, should there have been another before
    async with core.app.router.lifespan_context(core.app):
        yield
