"""The sign-in form: a browser sends a key and gets a cookie. Plain HTML without scripts or other files."""

from __future__ import annotations

import html
from urllib.parse import parse_qs

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from moedraft.serve.auth.access import Authority
from moedraft.serve.auth.sessions import COOKIE, SESSION_SECONDS
from moedraft.serve.http.errors import ApiError

HOME = "/dashboard/"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'none'"
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>moedraft</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root {{ color-scheme: light dark; font-family: system-ui, sans-serif }}
body {{ display: grid; place-content: center; min-height: 90vh; margin: 1rem }}
form {{ display: grid; gap: .75rem; width: min(24rem, 90vw) }}
input, button {{ font: inherit; padding: .6rem; border-radius: .4rem; border: 1px solid gray }}
p {{ margin: 0; min-height: 1.3em }}
</style></head>
<body><form method="post" action="/login">
<h1>moedraft</h1>
<label for="key">A key with the scope “dashboard”</label>
<input id="key" name="key" type="password" autocomplete="current-password" required autofocus>
<input name="next" type="hidden" value="{next}">
<button>Open the dashboard</button>
<p role="alert">{message}</p>
</form></body></html>
"""


def login_router(authority: Authority) -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.get(HOME.rstrip("/"))
    async def with_slash(request: Request) -> Response:
        query = request.url.query
        return RedirectResponse(f"{HOME}?{query}" if query else HOME, 307)

    @router.get("/login")
    async def form(next: str = HOME) -> Response:
        return _page(next) if not authority.ring.is_open else RedirectResponse(HOME, 303)

    @router.post("/login")
    async def enter(request: Request) -> Response:
        authority.check_origin(request)
        fields = _fields(await request.body())
        target = _inside(fields.get("next", HOME))
        key = authority.ring.find(fields.get("key", "").strip())
        if key is None or "dashboard" not in key.scopes:
            return _page(target, "This key is not valid for the dashboard.", 401)
        answer = RedirectResponse(target, 303)
        answer.set_cookie(
            COOKIE,
            authority.sessions.issue(key.id),
            max_age=SESSION_SECONDS,
            httponly=True,
            samesite="lax",  # links from other sites may open a page; any change needs our origin
            secure=request.url.scheme == "https",
        )
        return answer

    @router.post("/logout")
    async def leave(request: Request) -> Response:
        authority.check_origin(request)
        authority.sessions.end(request.cookies.get(COOKIE, ""))
        answer = RedirectResponse("/login", 303)
        answer.delete_cookie(COOKIE, httponly=True, samesite="lax")
        return answer

    return router


def _page(target: str, message: str = "", status: int = 200) -> Response:
    content = PAGE.format(next=html.escape(_inside(target)), message=html.escape(message))
    headers = {"content-security-policy": POLICY, "cache-control": "no-store"}
    return HTMLResponse(content, status, headers)


def _inside(target: str) -> str:
    """`target` if it is a page of the dashboard, else its first page: no link to the form leads elsewhere."""
    plain = target.isascii() and target.isprintable() and "\\" not in target
    return target if plain and target.startswith(HOME) else HOME


def _fields(body: bytes) -> dict[str, str]:
    try:
        parsed = parse_qs(body.decode("ascii"), max_num_fields=8)
    except ValueError as error:
        raise ApiError(400, "The form cannot be read.") from error
    return {name: values[0] for name, values in parsed.items()}
