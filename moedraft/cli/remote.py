"""Reaches a server for the commands that change something: the one that owns the home, or another one.

A server elsewhere is given by `--server URL`, with the key in MOEDRAFT_API_KEY. The server that owns the home
is found by a file that it keeps there, so the same command works whether it runs or not.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode, urlsplit
from urllib.request import HTTPRedirectHandler, OpenerDirector, ProxyHandler, Request, build_opener

import typer

from moedraft.core import KEY_VARIABLE, InvalidRequest, MoedraftError

if TYPE_CHECKING:
    from moedraft.config import Settings

SERVER_FILE = "server.json"
PROBE_SECONDS = 5.0
LARGE = 1_000_000  # bytes; a server may close the connection on a larger body before its answer can be read
SECONDS = 600.0  # embedding the examples of a domain can take minutes

ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        rich_help_panel="Where and with what",
        help=f"A server elsewhere, its key in {KEY_VARIABLE}; one that owns the home is found by itself.",
    ),
]


class Unreachable(MoedraftError):
    """No moedraft server answers at the URL, or none in time."""


class _NoRedirects(HTTPRedirectHandler):
    """Follows no redirects, because the key must be sent only to the server for which it was given."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


@dataclass(frozen=True)
class Remote:
    """The operator's routes of one server. All methods raise Unreachable or InvalidRequest."""

    url: str
    key: str | None
    local: bool = False  # the URL was read from a home on this machine, so no proxy must be used

    def get(self, *path: str, **query: str | None) -> dict[str, Any]:
        given = {name: value for name, value in query.items() if value is not None}
        return self._ask("GET", f"{_joined(path)}?{urlencode(given)}" if given else _joined(path))

    def post(self, *path: str, data: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._ask("POST", _joined(path), data)

    def delete(self, *path: str) -> dict[str, Any]:
        return self._ask("DELETE", _joined(path))

    def answers(self) -> bool:
        """Whether a server listens at the URL. One that is too busy to answer in time counts as listening."""
        try:
            self._ask("GET", "/health", seconds=PROBE_SECONDS)
        except Unreachable as error:
            return isinstance(error.__cause__, TimeoutError)
        except MoedraftError:
            pass
        return True

    def _ask(
        self, method: str, path: str, data: dict[str, Any] | None = None, seconds: float = SECONDS
    ) -> dict[str, Any]:
        body = None if data is None else json.dumps(data, ensure_ascii=False).encode(errors="replace")
        headers = {"accept": "application/json"} | ({"content-type": "application/json"} if body else {})
        headers |= {"authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            request = Request(f"{self.url}{path}", body, headers, method=method)
            with self.opener().open(request, timeout=seconds) as answer:
                found, ours = json.load(answer), answer.headers.get("x-application") == "moedraft"
        except HTTPError as error:
            with error:
                raise self._complaint(error) from error
        except (OSError, HTTPException, ValueError, RecursionError) as error:
            cause = error.reason if isinstance(error, URLError) else error
            size = len(body or b"")
            if size > LARGE and isinstance(cause, BrokenPipeError | ConnectionResetError):
                raise Unreachable(
                    f"The server at {self.url} closed the connection while {size} bytes were sent; "
                    "it refuses more than its max_body_bytes."
                ) from cause
            if isinstance(error, TimeoutError):  # raised only after the request was sent
                raise Unreachable(
                    f"The server at {self.url} has not answered for {seconds:.0f} seconds and may still be "
                    "working; `moedraft domain list` shows what it has done."
                ) from error
            raise Unreachable(f"No moedraft server answers at {self.url}: {cause}.") from (
                cause if isinstance(cause, BaseException) else error
            )
        if not (ours and isinstance(found, dict)):
            raise Unreachable(f"What answers at {self.url} is no moedraft server.")
        return found

    def opener(self) -> OpenerDirector:
        """An opener for requests. For a server on this machine it ignores proxy settings."""
        local = self.local or urlsplit(self.url).hostname in ("localhost", "127.0.0.1", "::1")
        return build_opener(_NoRedirects, *([ProxyHandler({})] if local else []))

    def _complaint(self, error: HTTPError) -> MoedraftError:
        try:
            sentence = str(json.load(error)["error"]["message"])
        except (OSError, HTTPException, ValueError, KeyError, TypeError):
            return Unreachable(f"What answers at {self.url} is no moedraft server (HTTP {error.code}).")
        if error.code in (401, 403):
            return InvalidRequest(f"{sentence} Put a key with the scope 'admin' into {KEY_VARIABLE}.")
        return InvalidRequest(sentence)


def given_server(server: str | None) -> Remote | None:
    """The server that `--server` names; None if it names none. Raises InvalidRequest if it is not a URL."""
    if server is None:
        return None
    try:
        parts = urlsplit(server)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment or not server.isprintable() or not server.isascii():
        raise InvalidRequest(f"--server takes a URL such as http://127.0.0.1:8000, not {server!r}.")
    key = (os.environ.get(KEY_VARIABLE) or "").strip()  # a file of variables may end its lines in \r
    if not (key.isascii() and key.isprintable()):
        raise InvalidRequest(f"{KEY_VARIABLE} holds something that is no key.")
    return Remote(server.rstrip("/"), key or None)


def owner_of(settings: Settings, server: str | None) -> Remote | None:
    """The server that is named, or else the one that owns the home; None if no server is in use."""
    return given_server(server) or _running(settings.home)


def running_url(home: Path) -> str | None:
    """The URL of the server that owns this home, if one runs."""
    remote = _running(home)
    return remote.url if remote else None


def _running(home: Path) -> Remote | None:
    """The server that the file in the home names; None if it no longer runs, for example after a crash."""
    try:
        data = json.loads((home / SERVER_FILE).read_bytes())
        remote = Remote(str(data["url"]), str(data["key"]), local=True)
        os.kill(int(data["pid"]), 0)
    except PermissionError:
        return None  # the process belongs to another user
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return remote if remote.answers() else None


def _joined(path: tuple[str, ...]) -> str:
    return "".join(f"/{quote(part, safe='')}" for part in path)
