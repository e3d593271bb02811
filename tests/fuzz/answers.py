"""What any answer must be, whatever was asked."""

from __future__ import annotations

import http.client
import json

ERROR_KEYS = {"message", "type", "param", "code"}
MAY_FAIL = {501}  # of 5xx: with a healthy replica, nothing else has a reason


def post(port: int, path: str, body: bytes, timeout_s: float) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body. Raises TimeoutError where the server hangs, http.client's exceptions where it breaks
    off."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    finally:
        connection.close()


def check(path: str, status: int, headers: dict[str, str], body: bytes) -> None:
    assert status < 500 or status in MAY_FAIL, (status, body[:500])
    assert headers.get("x-request-id") or status in (400, 408, 431), headers
    if headers.get("content-type", "").startswith("text/event-stream"):
        assert status == 200
        if "/responses" not in path and "/messages" not in path:
            check_stream(body)
        return
    value = json.loads(body)
    if status >= 400:
        error = value["error"]
        assert isinstance(error["message"], str), body
        if "/messages" not in path:
            assert error.keys() == ERROR_KEYS, body
            assert error["code"] is None or isinstance(error["code"], str), body


def check_stream(body: bytes) -> None:
    """Whole frames, and one of the two ends."""
    frames = body.decode().split("\n\n")
    assert frames.pop() == ""
    values = [frame.removeprefix("data: ") for frame in frames if not frame.startswith(":")]
    last = values[-1]
    assert last == "[DONE]" or "error" in json.loads(last), last
    for value in values[:-1]:
        assert isinstance(json.loads(value)["choices"], list)
