"""The data plane's client, against sockets that behave and misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

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


async def test_informational_answers_are_passed_over():
    async def handle(reader, writer, number):
        while True:
            await read_request(reader)
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK)

    async with served(handle) as (upstream, url, connections):
        for _ in range(2):
            response = await upstream.post(url, b"", b"{}")
            assert response.headers() == []
            assert await response.read_all(10) == b"ok"
            response.close()
        assert len(connections) == 1


async def test_a_body_without_a_length_ends_with_its_connection_and_only_by_a_proper_end():
    async def handle(reader, writer, number):
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nhel")
        await writer.drain()
        if number == 0:
            writer.write(b"lo")
            return
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async with served(handle) as (upstream, url, connections):
        assert await post(upstream, url) == b"hello"
        with pytest.raises(UpstreamError) as caught:
            await post(upstream, url)
        assert caught.value.kind is UpstreamFailure.BROKEN
        assert len(connections) == 2


@pytest.mark.parametrize(
    "flood",
    [
        (b"HTTP/1.1 200 OK\r\n", b"x-a: " + b"b" * 1000 + b"\r\n"),
        (b"HTTP/1.1 200 OK\r\nx-a: ", b"b" * 1000),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5;", b"a" * 1000),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", b"x-t: " + b"b" * 1000 + b"\r\n"),
        (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
    ],
    ids=["headers", "one header", "chunk extension", "trailers", "informational"],
)
async def test_what_never_becomes_a_body_is_bounded(flood):
    start, more = flood

    async def handle(reader, writer, number):
        await read_request(reader)
        writer.write(start)
        while True:
            writer.write(more)
            await writer.drain()

    async with served(handle) as (upstream, url, _):
        with pytest.raises(UpstreamError) as caught:
            await post(upstream, url)
        assert caught.value.kind is UpstreamFailure.BROKEN


async def test_bytes_that_nobody_asked_for_end_the_connection():
    """An idle connection that speaks can't be trusted with the next request."""

    async def handle(reader, writer, number):
        await read_request(reader)
        writer.write(OK)
        if number == 0:
            await said.wait()
            writer.write(OK)
        await reader.read()
        closed.set()

    said, closed = asyncio.Event(), asyncio.Event()
    async with served(handle) as (upstream, url, connections):
        assert await post(upstream, url) == b"ok"
        said.set()
        await closed.wait()
        assert await post(upstream, url) == b"ok"
        assert len(connections) == 2


async def test_an_answer_after_the_answer_is_not_taken_for_the_next_ones():
    async def handle(reader, writer, number):
        while True:
            await read_request(reader)
            writer.write(OK + (OK.replace(b"ok", b"no") if number == 0 else b""))

    async with served(handle) as (upstream, url, connections):
        with contextlib.suppress(UpstreamError):
            await post(upstream, url)
        assert await post(upstream, url) == b"ok"
        assert len(connections) == 2


async def test_connections_are_capped_and_those_above_wait_their_turn():
    at_once = most = 0

    async def handle(reader, writer, number):
        nonlocal at_once, most
        while True:
            await read_request(reader)
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(0.001)
            at_once -= 1
            writer.write(OK)

    async with served(handle) as (upstream, url, connections):
        assert await asyncio.gather(*(post(upstream, url) for _ in range(40))) == [b"ok"] * 40
        assert len(connections) == most == 4
        upstream.check_invariants()


async def test_one_that_stops_waiting_for_a_connection_lets_the_next_one_have_it():
    release = asyncio.Event()

    async def handle(reader, writer, number):
        while True:
            await read_request(reader)
            await release.wait()
            writer.write(OK)

    async with served(handle) as (upstream, url, connections):
        busy = [asyncio.create_task(post(upstream, url)) for _ in range(4)]
        await until(lambda: len(connections) == 4)
        waiting = [asyncio.create_task(post(upstream, url)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        release.set()
        assert await asyncio.gather(*busy, *waiting[1:]) == [b"ok"] * 6
        upstream.check_invariants()


@contextlib.contextmanager
def deaf_server() -> Iterator[socket.socket]:
    """Where the queue of connections to be taken up is full: the next one hears nothing."""
    with contextlib.ExitStack() as stack:
        deaf = stack.enter_context(socket.socket())
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect(deaf.getsockname())
        yield deaf


async def test_one_that_stops_while_it_connects_keeps_no_place():
    """Places of the cancelled are free at once: the one that waited for its turn connects, and is answered."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                await read_request(reader)
                writer.write(OK)

    with deaf_server() as deaf:
        upstream = Upstream(connect_s=HANG_GUARD_S, max_connections_per_replica=4)
        url = Target(f"http://127.0.0.1:{deaf.getsockname()[1]}", "/")
        connecting = [asyncio.create_task(post(upstream, url)) for _ in range(4)]
        waiting = asyncio.create_task(post(upstream, url))
        await until(lambda: upstream._pools)
        [pool] = upstream._pools.values()
        await until(lambda: pool.num_open == 4 and len(pool.waiters) == 1)
        for task in connecting:
            task.cancel()
        await until(lambda: pool.num_open == 1 and not pool.waiters)
        server = await asyncio.start_server(answer, sock=deaf)
        async with asyncio.timeout(HANG_GUARD_S):
            assert await waiting == b"ok"
        upstream.check_invariants()
        await upstream.close()
        server.close()


async def test_a_connection_that_is_not_taken_up_in_time_is_a_failure_to_connect():
    with deaf_server() as deaf:
        upstream = Upstream(connect_s=0.1, max_connections_per_replica=4)
        with pytest.raises(UpstreamError) as caught:
            await post(upstream, Target(f"http://127.0.0.1:{deaf.getsockname()[1]}", "/"))
        assert caught.value.kind is UpstreamFailure.CONNECT
        await upstream.close()


async def test_a_replica_that_answers_before_it_has_read_all_is_heard_and_its_connection_not_reused():
    async def handle(reader, writer, number):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\n\r\nbig")
        await writer.drain()
        await done.wait()

    done = asyncio.Event()
    async with served(handle) as (upstream, url, connections):
        for _ in range(2):
            response = await upstream.post(url, b"", b"x" * 30_000_000)
            assert response.status == 413
            assert await response.read_all(10) == b"big"
            response.close()
        assert len(connections) == 2
        done.set()


async def test_a_reader_that_pauses_stops_the_replica_and_loses_nothing():
    """Back-pressure: what a paused reader doesn't take stays with the replica, beyond a bounded buffer."""
    total = 0

    async def handle(reader, writer, number):
        nonlocal total
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 64000000\r\n\r\n")
        for _ in range(1000):
            writer.write(b"x" * 64_000)
            await writer.drain()
            total += 64_000

    async with served(handle) as (upstream, url, _):
        response = await upstream.post(url, b"", b"{}")
        size = len(await response.read_some())
        response.pause()
        seen = -1
        while seen != total:
            seen = total
            await asyncio.sleep(0.05)
        assert total < 64_000_000, "the sender stands still"
        response.resume()
        while data := await response.read_some():
            size += len(data)
        assert size == 64_000_000
        response.close()


@pytest.mark.parametrize("url", ["http://[::1]:8000/base", "http://host/a b", "https://host", "http://bücher.example"])
def test_targets_of_odd_urls(url):
    target = Target(url, "/v1/x")
    assert target.head.startswith(b"POST /")
    assert b"/v1/x HTTP/1.1\r\nhost: " in target.head
    assert target.head.isascii()
    assert b" " not in target.head.split(b" HTTP/1.1")[0].removeprefix(b"POST ")
