"""Decides who may do what: every path needs a scope, and a path that is not listed here is not served.

The guard runs before routes, mounted applications and websockets. A route that is added elsewhere is
therefore closed until `ACCESS` names its scope.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from typing import Literal
from urllib.parse import SplitResult, quote, urlsplit

from fastapi.responses import RedirectResponse
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from moedraft.serve.auth.keyring import Keyring
from moedraft.serve.auth.sessions import COOKIE, Sessions
from moedraft.serve.http.errors import ApiError
from moedraft.storage import keys
from moedraft.storage.keys import Key

Access = keys.Scope | Literal["public", "any"]  # public: no key is needed; any: a key with any scope
ACCESS: dict[str, Access] = {
    "/v1": "infer",
    "/admin": "admin",
    "/metrics": "metrics",
    "/dashboard": "dashboard",
    "/version": "any",
    "/openapi.json": "any",
    "/health": "public",
    "/ready": "public",
    "/login": "public",
    "/logout": "public",
}
# Headers that a proxy adds when it passes on the request of another client.
FORWARDED = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip")


def access_of(path: str) -> Access | None:
    """The scope that `path` needs, which equals or lies below a listed path; None: it is not listed."""
    found = [access for prefix, access in ACCESS.items() if path == prefix or path.startswith(f"{prefix}/")]
    return found[0] if found else None


def is_loopback(host: str) -> bool:
    """Whether a server bound to `host` can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Authority:
    """Finds out who a connection belongs to; raises ApiError 401 or 403 if it may not have `scope`."""

    def __init__(self, ring: Keyring, host: str, origins: Collection[str] = ()) -> None:
        self.ring, self.sessions = ring, Sessions()
        self._host, self._origins = host, frozenset(origin.rstrip("/").lower() for origin in origins)

    def __call__(self, connection: HTTPConnection, scope: Access, *, in_page: bool = False) -> str:
        """The id of the connection's key, or "" if none is needed.

        A session opens the dashboard alone. in_page: the scope is for what the reader does on a page that was
        opened by this connection; a session then has the scopes of its key, and no others.
        """
        if connection.scope["type"] == "websocket":
            self.check_origin(connection)
        if scope == "public":
            return ""
        if self.ring.is_open:
            self._check_local(connection)
            self.check_origin(connection)
            return ""
        key = self._key(connection, session=in_page or scope == "dashboard")
        if scope != "any" and scope not in key.scopes:
            raise ApiError(403, f"This key has no scope '{scope}'.", code="insufficient_scope")
        return key.id

    def check_origin(self, connection: HTTPConnection) -> None:
        """Refuse a request that a browser sends for a page of another site.

        Browsers send cookies with such a request, and reach servers that only this machine can reach. They
        name the site in the header Origin, which has to be ours or one of the allowed origins.
        """
        origin = connection.headers.get("origin")
        if origin is None or origin.rstrip("/").lower() in self._origins:
            return
        host = connection.headers.get("host", "")
        if not host or _parts(origin).netloc.lower() != host.lower():
            raise ApiError(403, "Requests of other sites are refused.", code="foreign_origin")

    def _key(self, connection: HTTPConnection, *, session: bool) -> Key:
        """session: a session will do as well as a key."""
        header = connection.headers.get("authorization", "")
        kind, _, secret = header.partition(" ")
        key = self.ring.find(secret.strip()) if kind.lower() == "bearer" else None
        if key is None and not header and session:
            key = self._of_session(connection)
        if key is None:
            wrong = "This key is not valid." if header else "A key is needed: Authorization: Bearer <key>."
            raise ApiError(401, wrong, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return key

    def _of_session(self, connection: HTTPConnection) -> Key | None:
        cookie = connection.cookies.get(COOKIE, "")
        key_id = self.sessions.key_id(cookie) if cookie else None
        if key_id is None:
            return None
        self.check_origin(connection)
        return self.ring.get(key_id)

    def _check_local(self, connection: HTTPConnection) -> None:
        """Without keys, serve clients on this machine only.

        Requests passed on by a proxy are refused, whatever their Host header says, and so are pages of other
        sites whose host name was made to point to this machine.
        """
        client = connection.client
        if client is None or not is_loopback(client.host) or any(h in connection.headers for h in FORWARDED):
            sentence = "Without keys this server answers this machine only, and no proxy; make a key."
            raise ApiError(403, sentence, code="key_needed")
        host = _parts(f"//{connection.headers.get('host', '')}").hostname or ""
        if not is_loopback(host) and host != self._host.lower():
            raise ApiError(403, "Without keys this server is reached by its local name only.")


def _parts(url: str) -> SplitResult:
    """The parts of a URL that a client sent; empty parts if it is not a URL."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


class Guard:
    """ASGI layer that passes on what `authority` allows and answers everything else with an error."""

    def __init__(self, app: ASGIApp, authority: Authority) -> None:
        self.app, self.authority = app, authority

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        connection = HTTPConnection(scope)
        try:
            access = access_of(scope["path"])
            if access is None:
                raise ApiError(404, "There is nothing at this path.")
            scope.setdefault("state", {})["key_id"] = self.authority(connection, access)
        except ApiError as error:
            await self._refuse(error, connection, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _refuse(
        self, error: ApiError, connection: HTTPConnection, receive: Receive, send: Send
    ) -> None:
        scope = connection.scope
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif error.status_code == 401 and _is_browser(connection):
            query = scope["query_string"].decode("latin-1")
            asked = f"{scope['path']}?{query}" if query else scope["path"]
            await RedirectResponse(f"/login?next={quote(asked)}", 303)(scope, receive, send)
        else:
            response = error.response()
            if error.status_code == 401:  # hundreds of requests sent at once without a key cost one answer
                response.headers["connection"] = "close"
            await response(scope, receive, send)


def _is_browser(connection: HTTPConnection) -> bool:
    """Whether a person opens the dashboard in a browser, who is shown the sign-in form, not an error."""
    wants_page = "text/html" in connection.headers.get("accept", "")
    return (
        wants_page and connection.scope["method"] == "GET" and access_of(connection.url.path) == "dashboard"
    )
