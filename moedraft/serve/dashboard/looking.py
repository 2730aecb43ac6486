"""What a page shows: the running server, and the time range and expert that the URL names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast
from urllib.parse import urlencode

from starlette.requests import HTTPConnection

from moedraft.core import InvalidRequest
from moedraft.insight.observe import Observer
from moedraft.insight.tables.spans import DEFAULT, SPANS, TimeSpan, find_span
from moedraft.serve.http.errors import ApiError

if TYPE_CHECKING:
    from moedraft.serve.http.context import Authorise
    from moedraft.serve.supervisor.follower import Trainer
    from moedraft.serve.worker.worker import Worker
    from moedraft.storage.keys import Scope

LOOKING = "moedraft.dashboard"  # key in the ASGI scope under which `Looking` is found


@dataclass(frozen=True)
class Looking:
    """The parts of the running server that pages read from."""

    worker: Worker
    trainer: Trainer
    observer: Observer
    model: str  # the target's name in the API
    authorise: Authorise  # checks who may look


@dataclass(frozen=True)
class Look:
    """One page as its URL names it. `base` is the path at which the dashboard is mounted."""

    at: Looking
    connection: HTTPConnection  # the request for the page
    base: str
    server: str  # the server's URL without a path
    page: str = ""
    span: TimeSpan = SPANS[DEFAULT]
    expert: str | None = None
    signed_in: bool = False  # whether the reader signed in with a key

    @classmethod
    def of(cls, connection: HTTPConnection, page: str, query: Mapping[str, str]) -> Look:
        """The look that a request asks for. An unknown time range becomes the default instead of an error."""
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
        """Whether the reader may still see the dashboard: the key may be revoked while a page is open."""
        return self.may("dashboard")

    def may(self, scope: Scope) -> bool:
        """Whether the reader's own key has the scope now; without keys everybody may everything."""
        try:
            self.at.authorise(self.connection, scope, in_page=True)
        except ApiError:
            return False
        return True

    def url(self, page: str | None = None, *, span: TimeSpan | None = None, expert: str | None = None) -> str:
        """The URL of this page with some of its parts changed."""
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
