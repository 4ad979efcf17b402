"""The one error writer: every error body of the server is made here, from fixed or validated text."""

from __future__ import annotations

import json
import re
from http import HTTPStatus
from typing import Any

# What must never reach a client: memory addresses, file paths, Python's own representations of objects.
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
_PATH = re.compile(
    r"https?://[^\s\"'<>]+|#/[\w/.+$~%-]*"
    r"|(?<![\w.+-])(?:/[\w.+-]+(?: [\w.+-]+){0,3}(?=/[\w.+-]))+/[\w.+-]+/?"  # with blanks in the names of folders
    r"|(?:/[\w.+-]+){2,}/?|[A-Za-z]:\\[\w\\.+-]+"
)
_OBJECT = re.compile(r"<[\w.]+ object[^>]*>|Traceback \(most recent call last\)[\s\S]*")
_MAX_MESSAGE = 2000


class APIError(ValueError):
    """An error with its HTTP status. `type` is OpenAI's error type, `param` the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str = "BadRequestError",
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        body = error_body(self.message, self.type, self.status, self.param)
        return {"detail": self.message, **body} if self.status == 415 else body


def bad_request(message: str, param: str | None = None) -> APIError:
    """400: the request is at fault."""
    return APIError(400, message, "BadRequestError", param)


def not_found(message: str, param: str | None = None) -> APIError:
    """404: what the request names does not exist."""
    return APIError(404, message, "NotFoundError", param)


def overloaded(message: str, retry_after: int = 1) -> APIError:
    """503 with Retry-After: not now."""
    return APIError(503, message, "ServiceUnavailableError", headers={"retry-after": str(retry_after)})


def not_available(feature: str) -> APIError:
    """400: a route of the API that this version does not have. A 5xx would call on somebody to repair the server."""
    return APIError(400, f"{feature} is not available in this version of the server.", "NotImplementedError")


def safe_text(message: str) -> str:
    """`message` without addresses, paths, object representations and tracebacks, and of bounded length."""
    message = message[: 4 * _MAX_MESSAGE]  # no more is looked at: clients may make what is quoted as long as a body
    message = _OBJECT.sub("(an object)", message)
    message = _ADDRESS.sub("(address)", message)
    message = _PATH.sub(_hide_path, message)
    if len(message) > _MAX_MESSAGE:
        message = message[:_MAX_MESSAGE] + "..."
    return message


def _hide_path(found: re.Match[str]) -> str:
    """Routes of the API, URLs, and places in a schema, are no paths of this machine."""
    path = found.group()
    return path if path.startswith(("/v1/", "http", "#/")) else "(path)"


def error_body(message: str, type: str, code: int, param: str | None = None) -> dict[str, Any]:
    """One body for both generations of clients: the older read flat keys, the newer the nested object."""
    message = safe_text(message)
    nested = {"message": message, "type": type, "param": param, "code": code}
    return {"object": "error", **nested, "error": nested}


def stream_error(message: str, type: str = "BadRequestError", code: int = 400) -> bytes:
    """An error inside a stream whose status line is long gone, as one server-sent event."""
    inner = {"object": "error", "message": safe_text(message), "type": type, "param": None, "code": code}
    return b"data: " + json.dumps({"error": inner}).encode() + b"\n\n"


def status_phrase(status: int) -> str:
    """The standard phrase of an HTTP status."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"
