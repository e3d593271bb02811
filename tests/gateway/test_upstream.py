"""The data plane's client, against sockets that behave and misbehave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from gateway.upstream import Target, Upstream, UpstreamError, UpstreamFailure, request_headers
from tests.gateway.harness import HANG_GUARD_S, free_address, until

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter, int], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@contextlib.asynccontextmanager
async def served(handle: Handler) -> AsyncIterator[tuple[Upstream, Target, list[int]]]:
    """An Upstream, the URL of a server, and the list of connections made; `handle` gets each with its number."""
    connections: list[int] = []

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(len(connections))
        try:
            await handle(reader, writer, connections[-1])
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
    upstream = Upstream(connect_s=5.0, max_connections_per_replica=4)
    port = server.sockets[0].getsockname()[1]
    try:
        async with asyncio.timeout(HANG_GUARD_S):
            yield upstream, Target(f"http://127.0.0.1:{port}", "/v1/x"), connections
    finally:
        await upstream.close()
        server.close()


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return head + await reader.readexactly(length)


async def post(upstream: Upstream, url: Target) -> bytes:
    response = await upstream.post(url, b"", b"{}")
    try:
        return await response.read_all(1000)
    finally:
        response.close()


async def test_connections_are_kept_and_reused():
    async def handle(reader, writer, number):
        while True:
            await read_request(reader)
            writer.write(OK)

    async with served(handle) as (upstream, url, connections):
        for _ in range(5):
            assert await post(upstream, url) == b"ok"
        assert len(connections) == 1


async def test_a_reused_connection_that_resets_before_an_answer_is_replaced_once():
    async def handle(reader, writer, number):
        await read_request(reader)
        writer.write(OK)
        if number == 0:
            await read_request(reader)  # and hang up on it
        else:
            await read_request(reader)
            writer.write(OK)

    async with served(handle) as (upstream, url, connections):
        assert await post(upstream, url) == b"ok"
        assert await post(upstream, url) == b"ok"
        assert len(connections) == 2


async def test_a_new_connection_that_resets_is_the_replicas_failure():
    async def handle(reader, writer, number):
        await read_request(reader)

    async with served(handle) as (upstream, url, connections):
        with pytest.raises(UpstreamError) as caught:
            await post(upstream, url)
        assert caught.value.kind is UpstreamFailure.BROKEN
        assert len(connections) == 1


async def test_a_reset_after_the_first_byte_of_an_answer_is_never_tried_again():
    async def handle(reader, writer, number):
        await read_request(reader)
        writer.write(OK)
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf")
        await writer.drain()

    async with served(handle) as (upstream, url, connections):
        await post(upstream, url)
        with pytest.raises(UpstreamError) as caught:
            await post(upstream, url)
        assert caught.value.kind is UpstreamFailure.BROKEN
        assert len(connections) == 1


async def test_nothing_listening_is_a_failure_to_connect():
    upstream = Upstream(connect_s=5.0, max_connections_per_replica=4)
    host, port = free_address()
    with pytest.raises(UpstreamError) as caught:
        await post(upstream, Target(f"http://{host}:{port}", "/"))
    assert caught.value.kind is UpstreamFailure.CONNECT
    await upstream.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhel",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello",
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5000\r\n\r\n" + b"x" * 5000,
    ],
)
async def test_a_truncated_malformed_or_oversized_answer_is_broken(answer):
    """Row 6."""

    async def handle(reader, writer, number):
        await read_request(reader)
        writer.write(answer)
        await writer.drain()

    async with served(handle) as (upstream, url, _):
        with pytest.raises(UpstreamError) as caught:
            await post(upstream, url)
        assert caught.value.kind is UpstreamFailure.BROKEN


async def test_a_cancelled_request_closes_its_connection_and_gives_its_place_back():
    """Row 58; four places, eight cancelled requests, and the ninth is served."""
    hung_up = asyncio.Semaphore(0)

    async def handle(reader, writer, number):
        await read_request(reader)
        if number >= 8:
            writer.write(OK)
            await writer.drain()
        await reader.read()
        hung_up.release()

    async with served(handle) as (upstream, url, connections):
        for number in range(8):
            task = asyncio.create_task(post(upstream, url))
            await until(lambda count=number: len(connections) > count)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await hung_up.acquire()
        assert await post(upstream, url) == b"ok"


async def test_closing_an_answer_that_was_not_read_tells_the_replica_to_stop():
    hung_up = asyncio.Event()

    async def handle(reader, writer, number):
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n")
        await reader.read()
        hung_up.set()

    async with served(handle) as (upstream, url, _):
        response = await upstream.post(url, b"", b"{}")
        assert await response.read_some() == b"ab"
        response.close()
        await hung_up.wait()


async def test_headers_of_an_answer_are_cleaned_and_bodies_left_alone():
    async def handle(reader, writer, number):
        await read_request(reader)
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: x\r\nConnection: keep-alive\r\nSet-Cookie: a=b\r\nServer: s\r\n"
            b"X-Warmgate-Cached-Tokens: 12\r\nX-Request-Id: theirs\r\nContent-Encoding: gzip\r\nX-Own: 1\r\n"
            b"content-length: 3\r\n\r\n\x1f\x8b\x00"
        )
        await reader.read()

    async with served(handle) as (upstream, url, _):
        response = await upstream.post(url, b"", b"{}")
        assert response.cached_tokens == 12
        assert dict(response.headers()) == {b"content-type": b"x", b"content-encoding": b"gzip", b"x-own": b"1"}
        assert await response.read_all(10) == b"\x1f\x8b\x00"
        response.close()


def test_a_replicas_key_replaces_the_clients():
    client = [(b"authorization", b"Bearer client"), (b"authorization", b"Bearer twice"), (b"host", b"x")]
    headers = request_headers(client, "id-1", "own")
    assert headers == b"x-request-id: id-1\r\nauthorization: Bearer own\r\n"
