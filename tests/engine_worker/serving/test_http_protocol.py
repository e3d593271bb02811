"""What reaches the socket before any request is whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from engine_worker.serving.http_protocol import WorkerProtocol
from engine_worker.serving.server import bind

HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"


async def hello(scope: Any, receive: Any, send: Any) -> None:
    assert "warmgate.abort" in scope["extensions"]
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


@asynccontextmanager
async def connection() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    sock = bind("127.0.0.1", 0)
    config = uvicorn.Config(hello, http=WorkerProtocol, lifespan="off", log_config=None, timeout_graceful_shutdown=1)
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[sock])
    reader, writer = await asyncio.open_connection(*sock.getsockname())
    try:
        yield reader, writer
    finally:
        writer.close()
        await server.shutdown(sockets=[sock])


async def answer_to(request: bytes) -> tuple[bytes, dict[str, Any]]:
    """Status line and error of the answer; the connection must close after it."""
    async with connection() as (reader, writer):
        writer.write(request)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        return head.split(b"\r\n")[0], json.loads(body)["error"]


async def test_a_request() -> None:
    async with connection() as (reader, writer):
        for _ in range(2):
            writer.write(HEAD + b"content-length: 2\r\n\r\nab")
            assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize(
    "request_",
    [
        b"nonsense\r\n\r\n",
        HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\nab",
        HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"content-length: -1\r\n\r\n",
        HEAD + b"folded: a\r\n b\r\n\r\n",
        HEAD + b"bad name: a\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_what_is_no_http(request_: bytes) -> None:
    status, error = await answer_to(request_)
    assert status == b"HTTP/1.1 400 Bad Request"
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("field", [b"a: " + b"x" * 70_000, b"\r\n".join(b"a%d: b" % i for i in range(20_000))])
async def test_headers_that_are_too_large(field: bytes) -> None:
    status, error = await answer_to(HEAD + field + b"\r\n\r\n")
    assert status.startswith(b"HTTP/1.1 431 ")
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("sent", [b"", HEAD, b"PO"])
async def test_headers_that_are_too_slow(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(WorkerProtocol, "header_timeout_s", 0.05)
    status, _ = await answer_to(sent)
    assert status.startswith(b"HTTP/1.1 408 ")


async def test_an_idle_connection_is_not_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two requests only the keep-alive timeout counts."""
    monkeypatch.setattr(WorkerProtocol, "header_timeout_s", 0.05)
    async with connection() as (reader, writer):
        writer.write(HEAD + b"content-length: 0\r\n\r\n")
        await reader.readuntil(b"hello")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.2)
