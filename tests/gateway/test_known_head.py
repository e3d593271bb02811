"""Heads that are known again: what is recalled is what a parser would say, whatever came before and whatever comes."""

from __future__ import annotations

import contextlib
import json

import httptools
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.known_head import HeadMemory
from tests.gateway.harness import CHAT, Replica, gateway
from tests.gateway.test_straight import HEAD, Ways, line, request, warmed

NAMES = [b"host", b"Content-Type", b"X-Id", b"content-length", b"Content-Length", b"transfer-encoding", b"x"]
VALUES = st.sampled_from(
    [b"a", b"application/json", b"3", b"03", b"4", b"", b" 3", b"3 ", b"chunked", b"x\tcontent-length: 3"]
)
ENDS = st.sampled_from([b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r\n ", b"\r"])
HEADERS = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from([b": ", b":", b" : "]), VALUES, ENDS), max_size=5)
BODIES = st.sampled_from([b"", b"abc", b"abcd", b"\r\n\r\n", b"\r\n\r\nabc", b"a" * 12])


class Parsed:
    """What httptools says of one message; None where it is not exactly one."""

    def __init__(self, data: bytes) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        self.num_begun = self.num_complete = 0
        httptools.HttpRequestParser(self).feed_data(data)

    def on_message_begin(self) -> None:
        self.num_begun += 1

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.num_complete += 1


def parsed(data: bytes) -> Parsed | None:
    with contextlib.suppress(httptools.HttpParserError, httptools.HttpParserUpgrade):
        found = Parsed(data)
        return found if found.num_begun == found.num_complete == 1 else None
    return None


def message(headers: list[tuple[bytes, bytes, bytes, bytes]], body: bytes) -> bytes:
    return b"POST / HTTP/1.1\r\n" + b"".join(b"".join(parts) for parts in headers) + b"\r\n" + body


def without_length(found: Parsed) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in found.headers if name.lower() != b"content-length"]


PLAIN = [(b"host", b": ", b"a", b"\r\n"), (b"content-length", b": ", b"3", b"\r\n")]


@settings(max_examples=500, deadline=None)
@given(HEADERS, BODIES, HEADERS, BODIES)
@example(PLAIN, b"abc", PLAIN, b"abc")
@example(PLAIN, b"abc", [PLAIN[0], (b"content-length", b": ", b"4", b"\r\n")], b"abcd")
def test_what_is_recalled_is_what_a_parser_says(headers, body, later_headers, later_body):
    first, later = message(headers, body), message(later_headers, later_body)
    told = parsed(first)
    if told is None:
        return
    memory: HeadMemory[Parsed] = HeadMemory()
    memory.learn(first, len(told.headers), len(told.body), told)
    for data in (first, later):
        begin = memory.recall(data)
        if begin and len(data) - begin == memory.length:
            again = parsed(data)
            assert again is not None
            assert data[begin:] == again.body
            assert without_length(again) == without_length(told)


def learnt(data: bytes) -> HeadMemory[str]:
    memory: HeadMemory[str] = HeadMemory()
    found = parsed(data)
    assert found is not None
    memory.learn(data, len(found.headers), len(found.body), "facts")
    return memory


def test_the_length_may_differ_and_nothing_else():
    data = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\nx: y\r\n\r\n"
    memory = learnt(data + b"abc")
    longer = data.replace(b"3", b"12")
    assert memory.recall(longer + b"abc") == len(longer)
    assert (memory.length, memory.facts) == (12, "facts")
    assert memory.recall(data) == len(data), "a head alone"
    for other in (b"x: z", b"X: y", b"x: y ", b"x: y\r\nz: 1"):
        assert not memory.recall(data.replace(b"x: y", other) + b"abc")
    for digits in (b"", b"-3", b"3a", b"+3", b" 3", b"1234567890", b"3, 3"):
        assert not memory.recall(data.replace(b"3", digits) + b"abc"), digits
    assert not memory.recall(data[:-1])
    assert not memory.recall(b"")


def test_what_is_never_recalled_is_learnt_ever_more_seldom():
    memory: HeadMemory[int] = HeadMemory()
    num_learnt = 0
    for number in range(300):
        data = b"POST / HTTP/1.1\r\nx: %d\r\ncontent-length: 1\r\n\r\na" % number
        assert not memory.recall(data)
        memory.learn(data, 2, 1, number)
        num_learnt += memory.facts == number
    assert 5 < num_learnt < 15
    assert memory.facts is not None
    assert memory.recall(b"POST / HTTP/1.1\r\nx: %d\r\ncontent-length: 1\r\n\r\na" % memory.facts)


async def test_requests_with_a_known_head_are_served_like_the_first():
    """Its body may follow it, wholly or in pieces; the next request may be in the same read."""
    replica = Replica()
    async with warmed(replica) as (running, ways), line(running) as client:
        bodies = [json.dumps({**CHAT, "seed": seed}).encode() for seed in (1, 22, 333)]
        for body in bodies:
            assert (await client.ask(request(body)))[0] == 200
            assert replica.log.last_body.encode() == body
        assert ways.were_straight
        client.send(request(bodies[0])[: -len(bodies[0])])
        assert (await client.ask(bodies[0]))[0] == 200
        assert ways.were_straight
        client.send(request(bodies[1])[:-5])
        assert (await client.ask(bodies[1][-5:]))[0] == 200
        client.send(request(bodies[2]) + request(bodies[0]))
        assert [(await client.answer())[0] for _ in range(2)] == [200, 200]
        assert (await client.ask(request(b"{}")))[0] == 400
        assert (await client.ask(HEAD + b"content-length: 0\r\n\r\n"))[0] == 400
        assert (await client.ask(request(bodies[1])))[0] == 200


async def test_a_known_head_without_its_body_is_given_to_the_general_way(monkeypatch):
    monkeypatch.setattr("gateway.plain_protocol.BODY_WAIT_S", 0.01)
    async with warmed(Replica(), body_s=0.1) as (running, ways), line(running) as client:
        for _ in range(2):
            assert (await client.ask(request()))[0] == 200
        client.send(request()[: -len(json.dumps(CHAT))])
        assert (await client.answer())[0] == 408
        assert ways.num_general == 1


async def test_bodies_are_bounded_behind_a_known_head_too():
    async with gateway(Replica(), max_body_bytes=2048) as running, line(running) as client:
        assert Ways(running).were_straight
        for _ in range(2):
            assert (await client.ask(request()))[0] == 200
        status, _, _ = await client.ask(request(json.dumps({**CHAT, "user": "x" * 2048}).encode()))
        assert status == 413
