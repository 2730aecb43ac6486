"""What one look at the dashboard is at: the running parts, the time range and the expert, as in the URL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast
from urllib.parse import urlencode

from starlette.requests import HTTPConnection

from moedraft.core import InvalidRequest
from moedraft.insight.observe import Observer
from moedraft.insight.spans import DEFAULT, SPANS, Span, find_span
from moedraft.serve.http.errors import ApiError

if TYPE_CHECKING:
    from moedraft.serve.http.context import Authorise
    from moedraft.serve.supervisor.supervisor import TrainerSupervisor
    from moedraft.serve.worker.worker import Worker

LOOKING = "moedraft.dashboard"  # key in the ASGI scope


@dataclass(frozen=True)
class Looking:
    """What there is to look at."""

    worker: Worker
    supervisor: TrainerSupervisor | None  # None: learning is off
    observer: Observer
    model: str  # the target's name in the API
    authorise: Authorise  # who may look


@dataclass(frozen=True)
class Look:
    """One page as the URL names it. `base` is where the dashboard is mounted."""

    at: Looking
    connection: HTTPConnection  # that asked for the page
    base: str
    server: str  # its URL without a path
    page: str = ""
    span: Span = SPANS[DEFAULT]
    expert: str | None = None
    signed_in: bool = False  # by a key

    @classmethod
    def of(cls, connection: HTTPConnection, page: str, query: Mapping[str, str]) -> Look:
        """A range that is unknown is taken for the default: a page is shown rather than an error."""
        try:
            span = find_span(query.get("range"))
        except InvalidRequest:
            span = SPANS[DEFAULT]
        looking = cast(Looking, connection.scope[LOOKING])
        url, expert = connection.url, query.get("expert") or None
        server = f"{url.scheme}://{url.netloc}"
        base, known = connection.scope.get("root_path", ""), connection.scope.get("state", {})
        return cls(looking, connection, base, server, page, span, expert, bool(known.get("key_id")))

    @property
    def allowed(self) -> bool:
        """Whether whoever asked for the page may still look: an open page can outlive its key."""
        try:
            self.at.authorise(self.connection, "dashboard")
        except ApiError:
            return False
        return True

    def url(self, page: str | None = None, *, span: Span | None = None, expert: str | None = None) -> str:
        """The same look, changed in one thing."""
        other = replace(
            self,
            page=self.page if page is None else page,
            span=span or self.span,
            expert=expert or self.expert,
        )
        return f"{self.base}/{other.page}?{other._query()}"

    def csv(self, table: str) -> str:
        return f"{self.base}/csv/{table}?{self._query()}"

    def _query(self) -> str:
        query = {"range": self.span.key} | ({"expert": self.expert} if self.expert else {})
        return urlencode(query)
