"""Who may do what: every path needs a scope, and what has none declared here cannot be reached.

The guard stands before the routes, mounted applications and websockets alike, so that a route added
anywhere is closed until `ACCESS` names its scope.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import time
from collections.abc import Callable, Collection
from typing import Literal
from urllib.parse import SplitResult, quote, urlsplit

from fastapi.responses import RedirectResponse
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from moedraft.serve import keys
from moedraft.serve.errors import ApiError
from moedraft.serve.keys import Key, Keyring

Access = keys.Scope | Literal["public", "any"]  # public: no key; any: a key of whatever scope
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
# What a proxy adds for a server that it speaks to on behalf of others.
FORWARDED = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip")
COOKIE = "moedraft_session"
SESSION_SECONDS = 12 * 3600


def access_of(path: str) -> Access | None:
    """What `path` and everything below it needs; None: it is not there."""
    found = [access for prefix, access in ACCESS.items() if path == prefix or path.startswith(f"{prefix}/")]
    return found[0] if found else None


def is_loopback(host: str) -> bool:
    """Whether a server bound to `host` is reached from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Sessions:
    """Cookies of browsers: the id of a key and an end, signed by a secret of this process. No key is in them.

    They end with the process, with their key, where someone signs out, and after `SESSION_SECONDS`.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._secret = secrets.token_bytes(32)
        self._clock = clock
        self._ended: dict[str, int] = {}  # sessions that were signed out: when they would have ended

    def issue(self, key_id: str) -> str:
        content = f"{key_id}.{secrets.token_hex(8)}.{int(self._clock()) + SESSION_SECONDS}"
        return f"{content}.{self._sign(content)}"

    def key_id(self, cookie: str) -> str | None:
        """The id in a cookie that is ours and not over."""
        content, _, signature = cookie.rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._sign(content).encode()):
            return None
        key_id, session, end = content.split(".")
        return key_id if int(end) > self._clock() and session not in self._ended else None

    def end(self, cookie: str) -> None:
        """It is over for whoever has it. A cookie that is none of ours changes nothing."""
        if self.key_id(cookie) is None:
            return
        _, session, end, _ = cookie.split(".")
        now = self._clock()
        self._ended = {one: until for one, until in self._ended.items() if until > now} | {session: int(end)}

    def _sign(self, content: str) -> str:
        return hmac.new(self._secret, content.encode(), hashlib.sha256).hexdigest()


class Authority:
    """Says who a connection is, or raises ApiError 401 or 403."""

    def __init__(self, ring: Keyring, host: str, origins: Collection[str] = ()) -> None:
        self.ring, self.sessions = ring, Sessions()
        self._host, self._origins = host, frozenset(origin.rstrip("/").lower() for origin in origins)

    def __call__(self, connection: HTTPConnection, scope: Access) -> str:
        """The id of the connection's key, "" where none is needed."""
        if connection.scope["type"] == "websocket":
            self.check_origin(connection)
        if scope == "public":
            return ""
        if self.ring.is_open:
            self._check_local(connection)
            self.check_origin(connection)
            return ""
        key = self._key(connection, scope)
        if scope != "any" and scope not in key.scopes:
            raise ApiError(403, f"This key has no scope '{scope}'.", code="insufficient_scope")
        return key.id

    def check_origin(self, connection: HTTPConnection) -> None:
        """A browser says which site a request comes from: only ours may act with what the browser has."""
        origin = connection.headers.get("origin")
        if origin is None or origin.rstrip("/").lower() in self._origins:
            return
        host = connection.headers.get("host", "")
        if not host or _parts(origin).netloc.lower() != host.lower():
            raise ApiError(403, "Requests of other sites are refused.", code="foreign_origin")

    def _key(self, connection: HTTPConnection, scope: Access) -> Key:
        header = connection.headers.get("authorization", "")
        kind, _, secret = header.partition(" ")
        key = self.ring.find(secret.strip()) if kind.lower() == "bearer" else None
        if key is None and not header and scope == "dashboard":
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
        """Without keys only this machine is served: neither the clients of a proxy, whatever Host it passes
        on, nor a page that has its own name point to this machine.
        """
        client = connection.client
        if client is None or not is_loopback(client.host) or any(h in connection.headers for h in FORWARDED):
            sentence = "Without keys this server answers this machine only, and no proxy; make a key."
            raise ApiError(403, sentence, code="key_needed")
        host = _parts(f"//{connection.headers.get('host', '')}").hostname or ""
        if not is_loopback(host) and host != self._host.lower():
            raise ApiError(403, "Without keys this server is reached by its local name only.")


def _parts(url: str) -> SplitResult:
    """Of what a client sent; nothing where it is no address."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


class Guard:
    """ASGI: lets through what `authority` knows, answers the rest."""

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
            await error.response()(scope, receive, send)


def _is_browser(connection: HTTPConnection) -> bool:
    """A person who opens the dashboard, to be shown the form rather than an error."""
    wants_page = "text/html" in connection.headers.get("accept", "")
    return (
        wants_page and connection.scope["method"] == "GET" and access_of(connection.url.path) == "dashboard"
    )
