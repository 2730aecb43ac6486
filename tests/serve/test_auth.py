"""Who gets in: nobody without a scope, to nothing that is not declared, from no other site."""

from __future__ import annotations

import asyncio
import errno
import html
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from server import check_error, unwatched
from starlette.requests import HTTPConnection
from starlette.routing import BaseRoute, Host, Mount, Route, WebSocketRoute
from starlette.types import Message

from moedraft.config import Settings, load_settings
from moedraft.core import InvalidRequest, StorageError
from moedraft.serve.app import create_app
from moedraft.serve.auth.access import ACCESS, FORWARDED, access_of, is_loopback
from moedraft.serve.auth.keyring import Keyring
from moedraft.serve.auth.sessions import COOKIE, MOST_SESSIONS, SESSION_SECONDS, Sessions
from moedraft.serve.http.errors import ApiError
from moedraft.serve.run import check_address
from moedraft.serve.worker.worker import Worker
from moedraft.storage.db import RESERVE
from moedraft.storage.keys import KEYS_FILE, SCOPES, KeyFile, digest_of, new_key

LOCAL = "http://127.0.0.1:8000"
PUBLIC = ("/health", "/ready", "/login", "/logout")


@pytest.fixture
def settings(worker: Worker) -> Settings:
    return load_settings(home=worker.system.settings.home, learning=False)


@pytest.fixture
def keys(settings: Settings) -> KeyFile:
    return KeyFile(settings.home)


@pytest.fixture
def app(worker: Worker, settings: Settings) -> FastAPI:
    """Not listening to anything; its dashboard is mounted and does not run."""
    return create_app(worker, unwatched(worker, settings), settings)


def ask(
    app: FastAPI, method: str, path: str, *, base: str = LOCAL, client: str = "127.0.0.1", **options: Any
) -> httpx.Response:
    """`client` is the address that the request comes from."""

    async def once() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=(client, 50000))
        async with httpx.AsyncClient(transport=transport, base_url=base) as asking:
            return await asking.request(method, path, **options)

    return asyncio.run(once())


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def websocket(app: FastAPI, path: str, headers: dict[str, str]) -> Message:
    """The server's first word to a websocket."""
    said: list[Message] = []

    async def send(message: Message) -> None:
        said.append(message)

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    raw = [(name.encode(), value.encode()) for name, value in ({"host": "127.0.0.1:8000"} | headers).items()]
    scope = {"type": "websocket", "path": path, "headers": raw, "query_string": b"", "subprotocols": []}
    scope["client"] = ("127.0.0.1", 50000)
    asyncio.run(app(scope, receive, send))
    return said[0]


# -- every route ---------------------------------------------------------------------------------


def every_path(routes: list[BaseRoute], prefix: str = "") -> Iterator[tuple[str, set[str]]]:
    """(path, methods) of all routes, those of mounted applications included; parameters filled in."""
    for route in routes:
        if isinstance(route, Mount):
            path = prefix + route.path
            yield f"{path}/", {"GET", "POST"}
            yield f"{path}/anything/below", {"GET", "POST"}
            yield from every_path(route.routes, path)
        elif isinstance(route, Route | APIRoute):
            yield prefix + filled(route.path), set(route.methods or ())
        elif isinstance(route, WebSocketRoute):
            yield prefix + filled(route.path), {"WEBSOCKET"}
        elif hasattr(route, "routes"):
            yield from every_path(list(route.routes), prefix)
        elif hasattr(route, "original_router"):  # FastAPI's included routers
            yield from every_path(list(route.original_router.routes), prefix)
        else:
            raise AssertionError(f"a route of an unknown kind: {route!r} ({isinstance(route, Host)})")


def filled(path: str) -> str:
    while "{" in path:
        start, end = path.index("{"), path.index("}")
        path = f"{path[:start]}x{path[end + 1 :]}"
    return path


def test_every_route_is_closed_without_a_key(app: FastAPI, keys: KeyFile) -> None:
    keys.create(["infer"])
    walked = dict(every_path(app.router.routes))
    assert {"/v1/models", "/admin/domains", "/metrics", "/openapi.json", "/dashboard/", "/health"} <= set(
        walked
    )
    for path, methods in walked.items():
        assert access_of(path) is not None, f"{path} has no scope, so nobody reaches it"
        for method in methods - {"WEBSOCKET"}:
            status = ask(app, method, path).status_code
            if path in PUBLIC:
                assert status in (200, 303, 400, 401, 405), (method, path, status)
            else:
                assert status == 401, (method, path, status)
        if path not in PUBLIC:
            assert websocket(app, path, {}) == {"type": "websocket.close", "code": 1008}
    assert {path for path in ACCESS if ACCESS[path] == "public"} == set(PUBLIC)


def test_a_route_that_was_not_declared_cannot_be_reached(app: FastAPI) -> None:
    """The negative control of the test above: it would find such a route, and the guard stops it."""
    app.add_api_route("/backdoor", lambda: "in", methods=["GET"])
    app.mount("/files", FastAPI())
    undeclared = {path for path, _ in every_path(app.router.routes) if access_of(path) is None}
    assert "/backdoor" in undeclared
    assert "/files/" in undeclared
    for path in ("/backdoor", "/files/docs", "/files/openapi.json", "/docs", "/redoc", "//v1/models"):
        check_error(ask(app, "GET", path), 404)
    assert websocket(app, "/files/ws", {})["type"] == "websocket.close"


@pytest.mark.parametrize(
    "path", ["/healthy", "/v1x/models", "/v1/../admin/domains", "/%2e%2e/admin", "/V1/models"]
)
def test_paths_that_only_look_alike_open_nothing(app: FastAPI, keys: KeyFile, path: str) -> None:
    key = bearer(keys.create(["infer"])[1])
    assert ask(app, "GET", path, headers=key).status_code in (403, 404)


@pytest.mark.parametrize("scope", SCOPES)
def test_a_scope_opens_its_own_and_no_more(app: FastAPI, keys: KeyFile, scope: str) -> None:
    headers = bearer(keys.create([scope])[1])
    paths = {
        "infer": "/v1/models",
        "admin": "/admin/domains",
        "metrics": "/metrics",
        "dashboard": "/dashboard",
    }
    for needed, path in paths.items():
        response = ask(app, "GET", path, headers=headers)
        if needed == scope:
            assert response.status_code in (200, 307)
        else:
            assert scope not in check_error(response, 403)
    assert ask(app, "GET", "/version", headers=headers).status_code == 200


# -- keys ----------------------------------------------------------------------------------------


def test_a_wrong_key_opens_nothing(app: FastAPI, keys: KeyFile) -> None:
    key, secret = keys.create(["infer"])
    wrong = [secret[:-1], secret + "a", key.digest, key.id, "", "Bearer", "\x80", secret.upper()]
    for one in wrong:
        response = ask(
            app, "GET", "/v1/models", headers=[(b"authorization", b"Bearer " + one.encode("latin-1"))]
        )
        message = check_error(response, 401)
        assert response.headers["www-authenticate"] == "Bearer"
        assert not one.strip() or len(one) < 10 or one not in message
    assert ask(app, "GET", "/v1/models", headers={"authorization": secret}).status_code == 401
    assert ask(app, "GET", f"/v1/models?key={secret}").status_code == 401
    assert ask(app, "GET", "/v1/models", headers=bearer(secret)).status_code == 200


def test_no_key_is_stored_and_the_file_is_private(keys: KeyFile) -> None:
    key, secret = keys.create(["infer", "admin"], "team")
    text = keys.path.read_text()
    assert secret not in text
    assert secret.split("-", 2)[2] not in text
    assert key.digest == digest_of(secret)
    assert os.stat(keys.path).st_mode & 0o077 == 0
    assert keys.keys() == [key]
    assert len({keys.create(["infer"])[1] for _ in range(5)}) == 5


def test_changes_count_at_once_and_the_last_revoked_key_leaves_nothing_open(
    app: FastAPI, keys: KeyFile
) -> None:
    assert ask(app, "GET", "/v1/models").status_code == 200
    key, secret = keys.create(["infer"])
    assert ask(app, "GET", "/v1/models").status_code == 401
    assert ask(app, "GET", "/v1/models", headers=bearer(secret)).status_code == 200
    keys.revoke(key.id)
    assert ask(app, "GET", "/v1/models", headers=bearer(secret)).status_code == 401
    keys.path.unlink()
    assert ask(app, "GET", "/v1/models").status_code == 401


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", '{"format": 2, "keys": []}', '{"format": 1, "keys": [{"id": 1}]}', '{"format": 1}',
     '{"format": 1, "keys": [{"id": "a", "digest": "b", "name": "", "scopes": [], "created_at": 1e300}]}'],
)  # fmt: skip
def test_a_damaged_file_of_keys_closes_the_server(app: FastAPI, keys: KeyFile, damage: str) -> None:
    secret = keys.create(["infer"])[1]
    keys.path.write_text(damage)
    with pytest.raises(StorageError):
        keys.keys()
    assert ask(app, "GET", "/v1/models").status_code == 401
    assert ask(app, "GET", "/v1/models", headers=bearer(secret)).status_code == 401


def test_bad_keys_are_refused(keys: KeyFile) -> None:
    for scopes, name in ((["root"], ""), ([], ""), (["infer"], "a\nb"), (["infer"], "n" * 100)):
        with pytest.raises(InvalidRequest):
            keys.create(scopes, name)
    with pytest.raises(InvalidRequest):
        keys.revoke("nobody")
    assert not keys.path.exists()


def test_a_key_of_the_process_is_in_no_file(worker: Worker, settings: Settings, keys: KeyFile) -> None:
    own, secret = new_key(["admin"])
    app = create_app(worker, unwatched(worker, settings), settings, own)
    keys.create(["infer"])
    assert ask(app, "GET", "/admin/domains", headers=bearer(secret)).status_code == 200
    assert ask(app, "GET", "/v1/models", headers=bearer(secret)).status_code == 403
    assert own.id not in keys.path.read_text()


# -- without keys --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.5", False),
        ("localhost.evil.example", False),
        ("example.com", False),
        ("127.0.0.1.nip.io", False),
        ("2130706433", False),
    ],
)
def test_a_public_address_needs_a_key(tmp_path: Path, host: str, local: bool) -> None:
    settings = load_settings(home=tmp_path, host=host)
    assert is_loopback(host) == local
    if not local:
        with pytest.raises(InvalidRequest, match="moedraft key create"):
            check_address(settings)
        assert not Keyring(KeyFile(tmp_path), open_without_keys=is_loopback(host)).is_open
    KeyFile(tmp_path).create(["infer"])
    check_address(settings)


@pytest.mark.parametrize("path", ["/v1/models", "/admin/domains", "/metrics"])
def test_without_keys_a_foreign_page_gets_nothing(app: FastAPI, path: str) -> None:
    assert ask(app, "GET", path).status_code == 200
    assert ask(app, "GET", path, base="http://localhost:8000").status_code == 200
    assert ask(app, "GET", path, base="http://[::1]:8000").status_code == 200
    check_error(ask(app, "GET", path, base="http://rebound.example:8000"), 403)
    for origin in (
        "https://evil.example",
        "null",
        "http://127.0.0.1:9999",
        "http://127.0.0.1:8000.evil.example",
        "http://[",
        "//[::1",
    ):
        check_error(ask(app, "GET", path, headers={"origin": origin}), 403)
        check_error(ask(app, "GET", path, headers={"host": "[", "origin": origin}), 403)
    assert ask(app, "GET", path, headers={"origin": LOCAL}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/admin/domains", "/metrics", "/dashboard/"])
def test_without_keys_no_proxys_client_gets_anything(app: FastAPI, path: str) -> None:
    """The proxy passes on what its client says its Host is, and speaks from this machine itself."""
    for header in FORWARDED:
        refused = ask(app, "GET", path, base="http://localhost", headers={header: "127.0.0.1"})
        assert "make a key" in check_error(refused, 403)
        live = websocket(app, "/dashboard/live", {"host": "localhost", header: "127.0.0.1"})
        assert live == {"type": "websocket.close", "code": 1008}
    for client in ("203.0.113.7", "192.168.1.5", "testclient", ""):
        check_error(ask(app, "GET", path, base="http://localhost", client=client), 403)
    assert ask(app, "GET", "/health", headers={"x-forwarded-for": "203.0.113.7"}).status_code == 200


def test_with_a_key_a_proxys_client_is_served(app: FastAPI, keys: KeyFile) -> None:
    headers = {**bearer(keys.create(["infer"])[1]), "x-forwarded-for": "203.0.113.7"}
    assert ask(app, "GET", "/v1/models", base="http://moedraft.example", headers=headers).status_code == 200


def test_a_file_of_no_keys_keeps_a_new_server_closed(
    worker: Worker, settings: Settings, keys: KeyFile
) -> None:
    keys.revoke(keys.create(["infer"])[0].id)
    assert keys.keys() == []
    assert (
        ask(create_app(worker, unwatched(worker, settings), settings), "GET", "/v1/models").status_code == 401
    )


def test_a_change_is_on_the_disk_when_it_is_acknowledged(
    keys: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written, then, after the rename, the folder that holds its name."""
    key, done = keys.create(["infer"])[0], list[str]()
    replace, fsync = Path.replace, os.fsync

    def replaced(path: Path, target: Path) -> Path:
        done.append("rename")
        return replace(path, target)

    def synced(descriptor: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    monkeypatch.setattr(Path, "replace", replaced)
    monkeypatch.setattr(os, "fsync", synced)
    keys.revoke(key.id)
    assert done == ["file", "rename", "folder"]


def test_a_form_of_another_site_changes_nothing(app: FastAPI) -> None:
    headers = {"origin": "https://evil.example", "content-type": "text/plain"}
    content = json.dumps({"domain": None}).encode()
    assert ask(app, "POST", "/admin/replay/purge", headers=headers, content=content).status_code == 403
    headers.pop("origin")
    assert ask(app, "POST", "/admin/replay/purge", headers=headers, content=content).status_code == 415


# -- browsers ------------------------------------------------------------------------------------


def login(app: FastAPI, secret: str, **headers: str) -> httpx.Response:
    return ask(
        app, "POST", "/login", data={"key": secret, "next": "/dashboard/experts?range=1h"}, headers=headers
    )


def test_a_browser_is_shown_the_form_and_gets_a_cookie(app: FastAPI, keys: KeyFile) -> None:
    secret = keys.create(["dashboard"])[1]
    page = {"accept": "text/html"}
    sent = ask(app, "GET", "/dashboard/experts", headers=page)
    assert (sent.status_code, sent.headers["location"]) == (303, "/login?next=/dashboard/experts")
    form = ask(app, "GET", sent.headers["location"], headers=page)
    assert form.status_code == 200
    assert "default-src 'none'" in form.headers["content-security-policy"]
    assert 'value="/dashboard/experts"' in form.text
    entered = login(app, secret, origin=LOCAL)
    assert (entered.status_code, entered.headers["location"]) == (303, "/dashboard/experts?range=1h")
    cookie = entered.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=lax" in cookie.lower()
    assert secret not in cookie
    assert secret.split("-", 2)[2] not in cookie
    assert "Secure" not in cookie
    value = entered.cookies[COOKIE]
    ticket = {"cookie": f"{COOKIE}={value}"}
    assert ask(app, "GET", "/dashboard", headers=ticket).status_code == 307
    for path in ("/admin/domains", "/v1/models", "/metrics", "/version"):  # a cookie is for looking only
        assert ask(app, "GET", path, headers=ticket).status_code == 401
    check_error(ask(app, "GET", "/dashboard", headers={**ticket, "origin": "https://evil.example"}), 403)
    assert "Max-Age=0" in ask(app, "POST", "/logout", headers=ticket).headers["set-cookie"]


@pytest.mark.parametrize("query", ["range=24h&expert=sql", "expert=%3Cb%3E%26+%C3%A9%22"])
def test_the_whole_address_is_remembered(app: FastAPI, keys: KeyFile, query: str) -> None:
    secret = keys.create(["dashboard"])[1]
    sent = ask(app, "GET", f"/dashboard/experts?{query}", headers={"accept": "text/html"})
    form = ask(app, "GET", sent.headers["location"])
    target = html.unescape(re.findall('name="next" type="hidden" value="([^"]*)"', form.text)[0])
    entered = ask(app, "POST", "/login", data={"key": secret, "next": target})
    assert entered.headers["location"] == f"/dashboard/experts?{query}"


def test_who_signs_out_ends_the_session(app: FastAPI, keys: KeyFile) -> None:
    secret = keys.create(["dashboard"])[1]
    tickets = [{"cookie": f"{COOKIE}={login(app, secret).cookies[COOKIE]}"} for _ in range(2)]
    for wrong in ("x", "a.b.c.d"):
        assert ask(app, "POST", "/logout", headers={"cookie": f"{COOKIE}={wrong}"}).status_code == 303
    foreign = {**tickets[0], "origin": "https://evil.example"}
    assert ask(app, "POST", "/logout", headers=foreign).status_code == 403
    assert ask(app, "GET", "/dashboard", headers=tickets[0]).status_code == 307
    ask(app, "POST", "/logout", headers=tickets[0])
    assert ask(app, "GET", "/dashboard", headers=tickets[0]).status_code == 401
    assert ask(app, "GET", "/dashboard", headers=tickets[1]).status_code == 307


def test_the_form_takes_no_other_key_and_leads_nowhere_else(app: FastAPI, keys: KeyFile) -> None:
    wrong = keys.create(["infer", "admin"])[1]
    right = keys.create(["dashboard"])[1]
    for secret in (wrong, "", right[:-1]):
        refused = login(app, secret)
        assert refused.status_code == 401
        assert "set-cookie" not in refused.headers
    assert login(app, right, origin="https://evil.example").status_code == 403
    for target in (
        "https://evil.example",
        "//evil.example",
        "/dashboard.evil",
        "/dashboard/\\evil",
        "/dashboard/\nx",
    ):
        response = ask(app, "POST", "/login", data={"key": right, "next": target})
        assert response.headers["location"] == "/dashboard/"
    shown = ask(app, "GET", "/login?next=/dashboard/%22%3E%3Cscript%3E")
    assert "<script>" not in shown.text
    assert ask(app, "POST", "/login", content=b"\xff\xfe").status_code == 400
    assert ask(app, "POST", "/login", content=b"a=1&" * 100).status_code == 400


def test_over_tls_the_cookie_stays_there(app: FastAPI, keys: KeyFile) -> None:
    secret = keys.create(["dashboard"])[1]
    entered = ask(app, "POST", "/login", data={"key": secret}, base="https://moedraft.example")
    assert "Secure" in entered.headers["set-cookie"]


def test_without_keys_there_is_no_form(app: FastAPI) -> None:
    assert ask(app, "GET", "/login").headers["location"] == "/dashboard/"


def test_a_cookie_is_only_good_as_it_was_issued() -> None:
    now = 1000.0
    sessions = Sessions(lambda: now)
    cookie = sessions.issue("abcd")
    assert sessions.key_id(cookie) == "abcd"
    forged = [
        "",
        ".",
        "..",
        "abcd.99999999999.",
        cookie[:-1],
        f"x{cookie}",
        cookie.swapcase(),
        "a\x80.b",
    ]
    assert [sessions.key_id(one) for one in forged] == [None] * len(forged)
    assert Sessions(lambda: now).key_id(cookie) is None  # another process
    assert Sessions()._clock is time.monotonic  # nobody can set it back
    now += SESSION_SECONDS
    assert sessions.key_id(cookie) is None


def test_sessions_take_a_bounded_place() -> None:
    """Whoever has a key may sign in and out for ever; other keys' sessions are not touched by it."""
    now = 1000.0
    sessions = Sessions(lambda: now)
    other, first = sessions.issue("other"), sessions.issue("key")
    cookies = [sessions.issue("key") for _ in range(MOST_SESSIONS)]
    assert sessions.key_id(first) is None
    assert [sessions.key_id(cookie) for cookie in (other, cookies[0], cookies[-1])] == ["other", "key", "key"]
    for cookie in cookies[:-1]:
        sessions.end(cookie)
        sessions.end(cookie)
    assert (sessions.key_id(cookies[0]), sessions.key_id(cookies[-1])) == (None, "key")
    for _ in range(1000):
        sessions.end(sessions.issue("key"))
    assert len(sessions._open) == 2


def test_a_cookie_ends_with_its_key(app: FastAPI, keys: KeyFile) -> None:
    key, secret = keys.create(["dashboard"])
    ticket = {"cookie": f"{COOKIE}={login(app, secret).cookies[COOKIE]}"}
    keys.revoke(key.id)
    assert ask(app, "GET", "/dashboard", headers=ticket).status_code == 401


def page(cookie: str, **headers: str) -> HTTPConnection:
    """The request for a page, by which what is done on it is authorised."""
    raw = {"host": "127.0.0.1:8000", "cookie": f"{COOKIE}={cookie}", **headers}
    pairs = [(name.encode(), value.encode()) for name, value in raw.items()]
    client = ("127.0.0.1", 50000)
    return HTTPConnection({"type": "http", "path": "/dashboard/", "headers": pairs, "client": client})


@pytest.mark.parametrize("own", [("dashboard",), ("dashboard", "infer"), ("dashboard", "admin")])
def test_what_is_done_on_a_page_takes_the_scope_of_its_own_key(
    app: FastAPI, keys: KeyFile, own: tuple[Any, ...]
) -> None:
    """A session is worth neither more nor less than the key that began it, and no route takes its cookie."""
    key, secret = keys.create(own)
    cookie = login(app, secret).cookies[COOKIE]
    authorise, scopes = app.state.context.authorise, ("dashboard", "infer", "admin", "metrics")
    for scope in scopes:
        if scope in own:
            assert authorise(page(cookie), scope, in_page=True) == key.id
        else:
            with pytest.raises(ApiError) as refused:
                authorise(page(cookie), scope, in_page=True)
            assert refused.value.status_code == 403
        if scope != "dashboard":
            with pytest.raises(ApiError, match="A key is needed"):
                authorise(page(cookie), scope)
    for path in ("/admin/domains", "/v1/models", "/metrics"):
        assert ask(app, "GET", path, headers={"cookie": f"{COOKIE}={cookie}"}).status_code == 401
    keys.revoke(key.id)
    for scope in scopes:
        with pytest.raises(ApiError, match="A key is needed"):
            authorise(page(cookie), scope, in_page=True)


def test_what_another_site_has_done_on_a_page_is_refused(app: FastAPI, keys: KeyFile) -> None:
    secret = keys.create(["dashboard", "admin"])[1]
    cookie, authorise = login(app, secret).cookies[COOKIE], app.state.context.authorise
    assert authorise(page(cookie, origin=LOCAL), "admin", in_page=True)
    with pytest.raises(ApiError, match="other sites"):
        authorise(page(cookie, origin="https://evil.example"), "admin", in_page=True)
    for wrong in (cookie[:-1], "", f"x{cookie}"):
        with pytest.raises(ApiError, match="A key is needed"):
            authorise(page(wrong), "admin", in_page=True)
    assert authorise(page("", authorization=f"Bearer {secret}"), "admin", in_page=True)
    with pytest.raises(ApiError, match="not valid"):  # a wrong key is not made good by a session
        authorise(page(cookie, authorization="Bearer wrong"), "admin", in_page=True)


def test_websockets_of_other_sites_are_refused(app: FastAPI, keys: KeyFile, settings: Settings) -> None:
    path, closed = "/dashboard/_nicegui_ws/socket.io/", {"type": "websocket.close", "code": 1008}
    for origin in ("https://evil.example", "null", "http://["):
        assert websocket(app, path, {"origin": origin}) == closed
    secret = keys.create(["dashboard"])[1]
    cookie = f"{COOKIE}={login(app, secret).cookies[COOKIE]}"
    assert websocket(app, path, {"origin": LOCAL}) == closed
    for headers in ({"cookie": cookie}, bearer(secret)):
        assert websocket(app, path, {"origin": "https://evil.example", **headers}) == closed


def test_an_origin_may_be_allowed(worker: Worker, settings: Settings, keys: KeyFile) -> None:
    secret = keys.create(["dashboard"])[1]
    behind = settings.model_copy(update={"allowed_origins": ("https://Moedraft.example/",)})
    app = create_app(worker, unwatched(worker, behind), behind)
    assert login(app, secret, origin="https://moedraft.example").status_code == 303
    assert login(app, secret, origin="https://other.example").status_code == 403


def test_the_keys_file_is_where_the_manual_says(keys: KeyFile) -> None:
    assert keys.path.name == KEYS_FILE == "keys.json"


# -- whose request a record was ------------------------------------------------------------------


@pytest.mark.parametrize(("model", "pinned"), [("mini", False), ("mini:code", True)])
def test_a_record_says_whose_key_asked_and_whether_the_domain_was_chosen(
    app: FastAPI, keys: KeyFile, worker: Worker, model: str, pinned: bool
) -> None:
    """The shares in the replay rest on it."""
    key, secret = keys.create(["infer"])
    row = {"model": model, "prompt": "a b c", "max_tokens": 3}
    assert ask(app, "POST", "/v1/completions", json=row, headers=bearer(secret)).status_code == 200
    worker.system.recorder.flush()
    (record,) = worker.system.store.replay.records()
    assert (record.source, record.pinned) == (key.id, pinned)
    assert secret not in repr(record)


def test_without_keys_a_record_is_nobodys(app: FastAPI, worker: Worker) -> None:
    row = {"model": "mini", "prompt": "a b c", "max_tokens": 3}
    assert ask(app, "POST", "/v1/completions", json=row).status_code == 200
    worker.system.recorder.flush()
    assert [one.source for one in worker.system.store.replay.records()] == [""]


def test_a_key_is_revoked_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reserve makes room for it; without one the key stays, and the command says so."""
    file, reserve, sync = KeyFile(tmp_path), tmp_path / RESERVE, os.fsync
    first, second = (file.create(["infer"])[0] for _ in range(2))
    reserve.write_bytes(b"x" * 4096)

    def ids() -> list[str]:
        keys = file.keys()
        return [key.id for key in keys]

    def fails_while_reserved(descriptor: int) -> None:
        if reserve.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails_while_reserved)
        file.revoke(first.id)
    assert ids() == [second.id]
    assert not reserve.exists()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space"):
        file.revoke(second.id)
    assert ids() == [second.id]
