"""Routes about the server's state, for probes and for monitoring: health, readiness, version, metrics."""

from __future__ import annotations

from importlib.metadata import version as version_of
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from moedraft.serve.http.context import ServerContext, context_of
from moedraft.serve.http.model_names import target_name
from moedraft.serve.http.schema import Card, ErrorBody
from moedraft.serve.metrics.counters import CONTENT_TYPE

router = APIRouter(responses={"default": {"model": ErrorBody}})


class Health(Card):
    status: Literal["ok"] = "ok"


class Readiness(Card):
    status: Literal["ready", "failed", "stalled", "draining"]


class Version(Card):
    version: str
    target: str


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health() -> Health:
    """The process lives."""
    return Health()


@router.head("/ready", include_in_schema=False)
@router.get("/ready", response_model=Readiness, responses={503: {"model": Readiness}})
async def ready(request: Request) -> Response:
    """The engine takes requests and makes progress; 503 where it does not. Merely busy is ready."""
    status = readiness(context_of(request))
    return JSONResponse({"status": status}, 200 if status == "ready" else 503)


@router.get("/version")
async def version(request: Request) -> Version:
    return Version(version=version_of("moedraft"), target=target_name(context_of(request).settings))


@router.get("/metrics", response_class=PlainTextResponse)
def metrics(request: Request) -> Response:
    """Figures in the text format of Prometheus."""
    content: Any = request.app.state.metrics.text()
    return Response(content, media_type=CONTENT_TYPE)


def readiness(context: ServerContext) -> Literal["ready", "failed", "stalled", "draining"]:
    worker = context.worker
    now = worker.snapshot()
    if now.draining:
        return "draining"
    if now.failed is not None:
        return "failed"
    return "stalled" if worker.progress_stalled(context.settings.stall_seconds) else "ready"
