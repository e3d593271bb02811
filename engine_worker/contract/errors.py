"""The one error shape of the OpenAI API, shared by the worker and the gateway.

`{"error": {"message", "type", "param", "code"}}`: all four keys always, `param` and `code` a string or null.
"""

from __future__ import annotations

import msgspec


class ApiError(Exception):
    """An error with the status and body that the client gets. The message says what is wrong and how to mend it.

    `should_retry` overrules what clients would do by the status alone; None leaves it to them.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        should_retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or default_type(status)
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.should_retry = should_retry

    def body(self) -> bytes:
        return error_body(self.message, self.type, self.param, self.code)


def default_type(status: int) -> str:
    """OpenAI's error type for a status."""
    match status:
        case 401:
            return "authentication_error"
        case 403:
            return "permission_error"
        case 429:
            return "rate_limit_error"
        case _ if status >= 500:
            return "server_error"
        case _:
            return "invalid_request_error"


def error_body(message: str, type: str, param: str | None = None, code: str | None = None) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": type, "param": param, "code": code}})


def check_json_type(content_type: bytes | None) -> None:
    """Raises ApiError 415 for a body that says it is something else than JSON.

    OpenAI's API refuses it, too. It also keeps web pages from calling a server on their visitor's machine: a browser
    sends `text/plain` and forms to anyone without asking, and JSON only where the server allows it (CORS).
    """
    if content_type and b"json" not in content_type.lower():
        shown = content_type[:80].decode("latin-1")
        raise ApiError(
            415,
            f"The body is {shown!r}, but must be application/json (with curl: -H 'content-type: application/json').",
        )
