"""Every error in the form of OpenAI's API: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import HTTPException, RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException as StarletteHTTPException

from moedraft.core import InvalidRequest, MoedraftError, PromptTooLong, StorageError, UnknownName
from moedraft.serve.worker.worker import Draining, EngineFailed, Overloaded

CLIENT_GONE = 499  # status for the log and the metrics when the client has disconnected; it is never sent
SHOWN = 80  # how many characters of a client's input an error message repeats

TYPE_NAMES = ("str", "int", "bool", "float")  # as pydantic calls them in the place of an error
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}


class ApiError(HTTPException):
    """An error response. `message` is one clear sentence, without any path, stack trace or prompt."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.param, self.code = param, code

    @property
    def body(self) -> dict[str, Any]:
        return error_body(self.status_code, self.detail, self.param, self.code)

    def response(self) -> Response:
        content = json.dumps(self.body)
        return Response(content, self.status_code, dict(self.headers or {}), "application/json")


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def shown(text: object) -> str:
    """The client's input, shortened and made safe to repeat in an error message."""
    return str(text)[:SHOWN].encode("utf-8", "backslashreplace").decode()


def api_error(error: Exception) -> ApiError:
    """`error` as a response; internal details are left out."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Overloaded):
        retry = {"retry-after": str(error.retry_after)}
        return ApiError(429, str(error), code="overloaded", headers=retry)
    if isinstance(error, Draining):
        return ApiError(503, str(error), code="shutting_down", headers={"retry-after": "5"})
    if isinstance(error, EngineFailed):
        return ApiError(503, str(error), code="engine_failed", headers={"retry-after": "5"})
    if isinstance(error, StorageError):  # the error's own message names the home, which clients must not see
        return ApiError(503, "The server's storage cannot be used now.", code="storage_unavailable")
    if isinstance(error, UnknownName):
        return ApiError(404, _sentence(str(error)), code="not_found")
    if isinstance(error, MoedraftError):
        return ApiError(400, _sentence(str(error)), code=_code(error))
    if isinstance(error, RequestValidationError):
        return _from_validation(error)
    if isinstance(error, StarletteHTTPException):
        message = f"{HTTPStatus(error.status_code).phrase}."
        return ApiError(error.status_code, message, headers=error.headers)
    return ApiError(500, "The server failed at this request.", code="internal_error")


def install(app: FastAPI) -> None:
    """Answer all errors of the routes in this form; unexpected ones are answered by `envelope.Envelope`."""

    async def answer(request: Request, error: Exception) -> Response:
        return api_error(error).response()

    for kind in (MoedraftError, RequestValidationError, StarletteHTTPException):
        app.add_exception_handler(kind, answer)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _code(error: MoedraftError) -> str | None:
    if isinstance(error, PromptTooLong):
        return "context_length_exceeded"
    return "invalid_value" if isinstance(error, InvalidRequest) else None


def _from_validation(error: RequestValidationError) -> ApiError:
    """The response for the first invalid field; if it may have several types, with the reason for each.

    Of a field with fields of its own the innermost one is named, such as `messages[0].content[0].type`.
    """
    complaints = error.errors()
    same = [one for one in complaints if one["loc"][1:2] == complaints[0]["loc"][1:2]]
    inner = max(same, key=_depth)
    if inner["type"] == "extra_forbidden":
        name = shown(inner["loc"][-1])
        sentence = f"The field '{name}' is not supported; leave it out."
        return ApiError(400, sentence, param=name, code="unsupported_parameter")
    path = _path(inner["loc"])
    if not path:
        return ApiError(400, "The body must be a JSON object, sent as application/json.", code="invalid_json")
    reasons = [shown(one["msg"]) for one in same if _path(one["loc"]) == path]
    code = "missing_required_parameter" if inner["type"] == "missing" else "invalid_value"
    place, said = shown(_dotted(path)), " or ".join(dict.fromkeys(reasons[:3]))
    return ApiError(400, f"'{place}': {said}.", param=shown(path[0]), code=code)


def _depth(complaint: Mapping[str, Any]) -> tuple[int, list[int], bool]:
    """How far pydantic came before it complained: of types that a field may have, one was nearly right."""
    path = _path(complaint["loc"])
    places = [one for one in path if isinstance(one, int)]
    return len(path), places, complaint["type"] != "extra_forbidden"


def _path(loc: Sequence[int | str]) -> list[int | str]:
    """Where it is in the body, without pydantic's names of the types that a field may have."""
    return [one for one in loc[1:] if isinstance(one, int) or (one.isidentifier() and one not in TYPE_NAMES)]


def _dotted(path: Sequence[int | str]) -> str:
    """`messages[0].content`"""
    return "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in path).lstrip(".")
