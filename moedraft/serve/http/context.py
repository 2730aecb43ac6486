"""What the parts of one server share; `create_app` stores it as `app.state.context`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from starlette.requests import HTTPConnection

from moedraft.config import Settings
from moedraft.serve.http.prompts import PromptPreparer
from moedraft.serve.supervisor.follower import Trainer
from moedraft.serve.worker.worker import Worker
from moedraft.storage.keys import Scope
from moedraft.storage.store import Store


class Authorise(Protocol):
    """Finds the id of a connection's key, or "" if the server needs none. Raises ApiError 401 or 403."""

    def __call__(self, connection: HTTPConnection, scope: Scope, *, in_page: bool = False) -> str: ...


@dataclass(frozen=True)
class ServerContext:
    worker: Worker
    trainer: Trainer
    settings: Settings
    store: Store
    prompts: PromptPreparer
    authorise: Authorise
    changes: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while an operator changes something


def context_of(connection: HTTPConnection) -> ServerContext:
    context = connection.app.state.context
    assert isinstance(context, ServerContext)
    return context
