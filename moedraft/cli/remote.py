"""The server that owns a home, or one elsewhere: how the commands that change something reach it.

Found by `--server URL` (with the key in MOEDRAFT_API_KEY), or through the file that a running server keeps in
its home, so that the same command works whether one runs or not.
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
LARGE = 1_000_000  # bytes; a server may close the door on more, before it says why
SECONDS = 600.0  # embedding the examples of a domain takes its time

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
    """No server answers there."""


class _NoRedirects(HTTPRedirectHandler):
    """A key is for the server it was given for."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


@dataclass(frozen=True)
class Remote:
    """The operator's routes of one server. All methods raise Unreachable or InvalidRequest."""

    url: str
    key: str | None
    local: bool = False  # found in a home on this machine: no proxy lies on the way

    def get(self, *path: str, **query: str | None) -> dict[str, Any]:
        given = {name: value for name, value in query.items() if value is not None}
        return self._ask("GET", f"{_joined(path)}?{urlencode(given)}" if given else _joined(path))

    def post(self, *path: str, data: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._ask("POST", _joined(path), data)

    def delete(self, *path: str) -> dict[str, Any]:
        return self._ask("DELETE", _joined(path))

    def answers(self) -> bool:
        """Whether somebody listens there. A server too busy to say so does."""
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
        request = Request(f"{self.url}{path}", body, {"accept": "application/json"}, method=method)
        if body is not None:
            request.add_header("content-type", "application/json")
        if self.key:
            request.add_header("authorization", f"Bearer {self.key}")
        try:
            with self._opener().open(request, timeout=seconds) as answer:
                found = json.load(answer)
        except HTTPError as error:
            with error:
                raise self._complaint(error) from error
        except (OSError, HTTPException, ValueError) as error:
            cause = error.reason if isinstance(error, URLError) else error
            size = len(body or b"")
            if size > LARGE and isinstance(cause, BrokenPipeError | ConnectionResetError):
                raise Unreachable(
                    f"The server at {self.url} closed the connection while {size} bytes were sent; "
                    "it refuses more than its max_body_bytes."
                ) from cause
            raise Unreachable(f"No moedraft server answers at {self.url}: {cause}.") from (
                cause if isinstance(cause, BaseException) else error
            )
        if not isinstance(found, dict):
            raise Unreachable(f"What answers at {self.url} is no moedraft server.")
        return found

    def _opener(self) -> OpenerDirector:
        """Without a proxy on the way to this machine."""
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
    """The one that `--server` names. Raises InvalidRequest for what is no URL of one."""
    if server is None:
        return None
    try:
        parts = urlsplit(server)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment or not server.isprintable() or not server.isascii():
        raise InvalidRequest(f"--server takes a URL such as http://127.0.0.1:8000, not {server!r}.")
    return Remote(server.rstrip("/"), os.environ.get(KEY_VARIABLE))


def owner_of(settings: Settings, server: str | None) -> Remote | None:
    """The server to change things through: the one named, or the one that owns the home; else None."""
    return given_server(server) or _running(settings.home)


def running_url(home: Path) -> str | None:
    """Where the server of this home is, if one runs."""
    remote = _running(home)
    return remote.url if remote else None


def _running(home: Path) -> Remote | None:
    """Read from the home; a file left behind by a server that was killed counts for nothing."""
    try:
        data = json.loads((home / SERVER_FILE).read_bytes())
        remote = Remote(str(data["url"]), str(data["key"]), local=True)
        os.kill(int(data["pid"]), 0)
    except PermissionError:
        return None  # another user's
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    return remote if remote.answers() else None


def _joined(path: tuple[str, ...]) -> str:
    return "".join(f"/{quote(part, safe='')}" for part in path)
