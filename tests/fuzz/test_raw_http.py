"""Bytes on the wire: fragments of HTTP in any order and any pieces, and bytes that never were any.

A server may answer, refuse or close; it may not crash, hang, or answer what came behind a request that it refused.
"""

from __future__ import annotations

import contextlib
import re
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.conftest import HANG_GUARD_S, Pair, effort

BODY = b'{"model":"fake","messages":[{"role":"user","content":"hi"}],"max_tokens":2}'
STREAM = BODY[:-1] + b',"stream":true}'
LINES = [
    b"POST /v1/chat/completions HTTP/1.1\r\n",
    b"GET /v1/models HTTP/1.1\r\n",
    b"GET /health HTTP/1.0\r\n",
    b"HEAD / HTTP/1.1\r\n",
    b"OPTIONS * HTTP/1.1\r\n",
    b"POST //v1/completions?x=%ff%00 HTTP/1.1\r\n",
    b"GET http://h/v1/models HTTP/1.1\r\n",
    b"CONNECT h:1 HTTP/1.1\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"get /\r\n",
    b"POST /v1/chat/completions HTTP/9.9\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\n",
    b"\x16\x03\x01\x02\x00",
]
HEADERS = [
    b"Host: x\r\n",
    b"Content-Length: %d\r\n" % len(BODY),
    b"Content-Length: 5\r\n",
    b"Content-Length: -1\r\n",
    b"Content-Length: 99999999999999999999\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n",
    b"Transfer-Encoding: chunked, identity\r\n",
    b"Connection: close\r\n",
    b"Connection: keep-alive\r\n",
    b"Connection: upgrade\r\nUpgrade: websocket\r\n",
    b"Upgrade: h2c\r\nHTTP2-Settings: AA\r\n",
    b"Expect: 100-continue\r\n",
    b"Expect: 200-maybe\r\n",
    b"X: " + b"y" * 9000 + b"\r\n",
    b" folded\r\n",
    b"No-Colon\r\n",
    b"X-\x00: a\r\n",
    b"X: a\nY: b\r\n",
    b"X-Request-Id: a\tb\r\n",
    b"Content-Type: text/plain\r\n",
    b": empty\r\n",
    b"X-Stainless-Read-Timeout: nan\r\n",
]
BODIES = [
    BODY,
    STREAM,
    b"5\r\nhello\r\n",
    b"0\r\n\r\n",
    b"ffffffffffffffffff\r\n",
    b"-1\r\n",
    b"5;ext=1\r\nhello\r\n0\r\nTrailer: x\r\n\r\n",
    b"zz\r\n",
    b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
    b"{",
    b"\x00" * 50,
    b"\r\n\r\n\r\n",
]
GOOD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
GET = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"


@st.composite
def conversations(draw: st.DrawFn) -> list[bytes]:
    """What one client sends, in pieces."""
    parts: list[bytes] = []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.integers(0, 5))
        if kind == 0:
            parts.append(draw(st.binary(max_size=200)))
        elif kind == 1:
            parts.append(draw(st.sampled_from([GOOD, GET, GOOD + GET, GET * 5])))
        else:
            parts.append(draw(st.sampled_from(LINES)))
            parts += draw(st.lists(st.sampled_from(HEADERS), max_size=4))
            parts.append(draw(st.sampled_from([b"\r\n", b"\r\n", b"\n", b""])))
            parts += draw(st.lists(st.sampled_from(BODIES), max_size=2))
    data = b"".join(parts)
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=4)))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    if draw(st.booleans()) and pieces:  # it leaves in the middle
        pieces = pieces[: draw(st.integers(1, len(pieces)))]
    return pieces


def talk(port: int, pieces: list[bytes]) -> bytes:
    """Send the pieces and the end; everything that comes back until the server closes, which it must."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=HANG_GUARD_S) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):
            for piece in pieces:
                sock.sendall(piece)
            sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while chunk := sock.recv(65536):
                received += chunk
    return received


@pytest.mark.parametrize("place", ["gateway", "worker"])
def test_any_bytes_are_answered_or_refused(pair: Pair, place: str) -> None:
    port = pair.ports[place]

    @effort(150)
    @given(conversations())
    def run(pieces: list[bytes]) -> None:
        answer = talk(port, pieces)
        assert answer == b"" or answer.startswith(b"HTTP/1."), answer[:200]
        statuses = [int(found) for found in re.findall(rb"^HTTP/1\.[01] (\d{3}) ", answer, re.MULTILINE)]
        assert all(status < 500 or status == 501 for status in statuses), (pieces, answer[:500])

    run()


@pytest.mark.parametrize("place", ["gateway", "worker"])
def test_every_split_of_pipelined_requests_gets_all_answers(pair: Pair, place: str) -> None:
    """The second request asks to close, so both answers have come when the server closes."""
    data = GET + GOOD.replace(b"Host: x", b"Host: x\r\nConnection: close")
    step = 1 if place == "gateway" else 7  # both take each split, the gateway's protocol is its own
    for at in range(1, len(data), step):
        with socket.create_connection(("127.0.0.1", pair.ports[place]), timeout=HANG_GUARD_S) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(data[:at])
            sock.sendall(data[at:])
            answer = b""
            while chunk := sock.recv(65536):
                answer += chunk
        assert answer.count(b"HTTP/1.1 200") == 2, (at, answer[:300])
