"""The server's log: JSON lines on stderr, or coloured text on a terminal.

Prompts and answers are never logged: events name a request by its id. Of an exception only the type and the
places in the code are logged, since its message may quote what a client sent; so may the texts of some
libraries, which are left out, and the query of a URL.
"""

from __future__ import annotations

import logging
import re
import sys
import traceback
from typing import Any

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, WrappedLogger

# Loggers of libraries whose texts may quote what a client sent.
QUOTING = ("asyncio", "engineio", "nicegui", "socketio")
FRAMES = 12  # how many frames of a stack trace are logged, counted from where the error was raised


def get_logger(name: str) -> FilteringBoundLogger:
    """A logger for structured events. Nothing is printed before `configure` is called."""
    logger: FilteringBoundLogger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=[*_shared(), structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    return logger


def configure(level: int = logging.INFO) -> None:
    """Print structured events and all other log records to stderr, in the same format."""
    human = sys.stderr.isatty()
    renderer: Any = structlog.dev.ConsoleRenderer() if human else structlog.processors.JSONRenderer()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*_shared(), without_quotes],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    for own in ("engineio.server", "socketio.server"):  # print by themselves where no level is set
        logging.getLogger(own).handlers = []
        logging.getLogger(own).setLevel(logging.ERROR)
    for noisy in ("httpx", "alembic", "sentence_transformers", "transformers", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _shared() -> list[Any]:
    return [
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        without_messages,
    ]


def log_failure(log: FilteringBoundLogger, error: BaseException, **about: object) -> None:
    log.error("failed", error=type(error).__name__, at=places(error), **about)


def places(error: BaseException) -> list[str]:
    """`file:line function` for the last frames of the stack trace, outermost first."""
    frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
    return [f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in frames]


def without_messages(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Replace an event's stack trace by the exception's type and places, without its message."""
    trace = event.pop("exc_info", None)
    if trace is True:
        trace = sys.exc_info()
    error = trace[1] if isinstance(trace, tuple) else trace
    if isinstance(error, BaseException):
        event["error"], event["at"] = type(error).__name__, places(error)
    return event


def without_quotes(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Leave out what a client may have said: some libraries' texts, and the queries of URLs."""
    name = str(event.get("logger", ""))
    if name.partition(".")[0] in QUOTING:
        event["event"] = "a message whose text may quote a client was left out"
    elif name.startswith("uvicorn"):
        event["event"] = re.sub(r"\?\S*", "?…", str(event["event"]))
    return event
