"""Reads JSON bodies strictly: UTF-8, declared as JSON, finite numbers only, limited nesting."""

from __future__ import annotations

import gc
import json
import math
import re
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from moedraft.serve.http.errors import ApiError

MOST_BRACKETS = 200_000  # in all, also in text: each of them may be an object that Python has to make
JSON_TYPE = "application/json"
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(body: bytes) -> Any:
    """The value that `body` holds. Raises ApiError 400 if it is not JSON of finite numbers and valid text."""
    if body.count(b"[") + body.count(b"{") > MOST_BRACKETS:
        raise _bad(f"The body holds more than {MOST_BRACKETS} opening brackets.")
    try:
        with _no_collection():
            data = json.loads(body.decode("utf-8"), parse_constant=_refuse, parse_float=_finite)
        # a surrogate pair is one character, but half a pair is none and cannot be encoded
        if SURROGATE.search(body):
            json.dumps(data, ensure_ascii=False).encode()
        return data
    except UnicodeDecodeError:
        raise _bad("The body is not valid UTF-8.") from None
    except UnicodeEncodeError:
        raise _bad("The body holds half a surrogate pair, which is no letter.") from None
    except json.JSONDecodeError as error:
        raise _bad(f"The body is not valid JSON: {error.msg} at letter {error.pos}.") from None
    except RecursionError:
        raise _bad("The body is not valid JSON: it is nested too deeply.") from None
    except ValueError:  # an integer with thousands of digits, which Python refuses to read
        raise _bad("The body holds a number that is too long.") from None


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from looking through all that was read so far again and again.

    Half a million empty lists took it a second, in which nobody else was served. JSON holds no cycles, so
    there is nothing to collect.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class StrictRequest(Request):
    async def json(self) -> Any:
        return parse_json(await self.body())


class StrictRoute(APIRoute):
    """A route whose bodies are read by `parse_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        takes_body = self.body_field is not None

        async def handle(request: Request) -> Response:
            if takes_body:
                _check_type(request)
            return await handler(StrictRequest(request.scope, request.receive))

        return handle


def _check_type(request: Request) -> None:
    """Require a JSON content type, which other sites' forms cannot send without the server's permission."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON_TYPE:
        raise ApiError(415, f"The body must be sent as {JSON_TYPE}.", code="unsupported_media_type")


def _refuse(constant: str) -> float:
    raise _bad(f"{constant} is no number of JSON.")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _bad("The body holds a number that is too large.")
    return number


def _bad(sentence: str) -> ApiError:
    return ApiError(400, sentence, code="invalid_json")
