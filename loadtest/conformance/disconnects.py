"""Clients that leave: the engine gives their requests up at once, in every phase.

Seen in the engine's own metrics: either it says that nothing runs, or no more tokens come (an engine that goes idle
may not write its gauges again).
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import httpx

from loadtest.conformance.checks import Failed, Skipped, check, expect
from loadtest.conformance.target import Target

CHAT = "/v1/chat/completions"
_LONG_ANSWER = {"max_tokens": 1500, "ignore_eos": True}
_START_LIMIT_S = 60.0
_QUIET_S = 0.3


def _read(t: Target, names: tuple[str, ...]) -> float:
    total = 0.0
    for url in t.worker_urls:
        text = httpx.get(f"{url}/metrics", timeout=10, trust_env=False).text
        for name in names:
            total += sum(map(float, re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)))
    return total


def in_hand(t: Target) -> float:
    return _read(t, ("vllm:num_requests_running", "vllm:num_requests_waiting"))


def tokens(t: Target) -> float:
    return _read(t, ("vllm:generation_tokens_total", "vllm:prompt_tokens_total"))


def is_idle(t: Target) -> bool:
    if in_hand(t) == 0:
        return True
    before = tokens(t)
    time.sleep(_QUIET_S)
    return tokens(t) == before


def until(what: str, condition: Callable[[], object], limit_s: float) -> float:
    """Seconds until the condition held. Failed when it didn't within `limit_s`."""
    begun = time.monotonic()
    while True:
        took = time.monotonic() - begun
        if condition():
            return took
        if took > limit_s:
            raise Failed(f"{what}: not within {limit_s:g} s")
        time.sleep(0.01)


def _given_up(t: Target) -> None:
    """The check itself: from now on, the engine has `abort_within_s` (and what it takes to see it)."""
    until("the request was given up", lambda: is_idle(t), t.abort_within_s + _QUIET_S)
    until("idle", lambda: is_idle(t), _START_LIMIT_S)
    t.chat(max_tokens=1)


def _begun(t: Target) -> None:
    if not t.worker_urls:
        raise Skipped("no engine's metrics to look at; name them with --worker")
    until("idle before the check", lambda: is_idle(t), _START_LIMIT_S)


def _send(t: Target, path: str, body: dict[str, Any]) -> socket.socket:
    content = json.dumps(body).encode()
    sock = t.connect()
    sock.sendall(t.head(path, content) + content)
    return sock


def _reset(sock: socket.socket) -> None:
    """Close with RST, as a crashed client's machine does."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def _leaves(
    claim: str, leave: Callable[[socket.socket], None], path: str = CHAT, wait: str = "data", **fields: Any
) -> None:
    @check("disconnects", claim, alone=True)
    def _(t: Target) -> None:
        _begun(t)
        body = t.completion_body(**{**_LONG_ANSWER, **fields})
        if path == CHAT:
            body = t.chat_body(**{**_LONG_ANSWER, **fields})
        sock = _send(t, path, body)
        with contextlib.closing(sock):
            if wait == "data":
                expect(sock.recv(65536).startswith(b"HTTP/1.1 200"), "no stream")
            else:
                until("the request reached the engine", lambda: in_hand(t) > 0, _START_LIMIT_S)
            leave(sock)
            _given_up(t)


_leaves("in a stream", socket.socket.close, stream=True)
_leaves("in a stream, by a reset", _reset, stream=True)
_leaves("in a completion's stream", socket.socket.close, path="/v1/completions", stream=True)
_leaves("in a stream of several choices", socket.socket.close, stream=True, n=3, temperature=1)
_leaves("waiting for an answer that is not streamed", socket.socket.close, wait="running")
_leaves("waiting for several choices, by a reset", _reset, wait="running", n=3, temperature=1)
_leaves(
    "waiting for several prompts", socket.socket.close, path="/v1/completions", wait="running", prompt=["a", "b", "c"]
)


@check("disconnects", "in the prefill of a long prompt", alone=True)
def _(t: Target) -> None:
    _begun(t)
    before = in_hand(t)
    body = t.chat_body(f"{time.time_ns()} " + "word " * 1800, **_LONG_ANSWER, stream=True)
    sock = _send(t, CHAT, body)
    with contextlib.closing(sock):
        until("the request reached the engine", lambda: in_hand(t) > before, _START_LIMIT_S)
        sock.close()
        _given_up(t)


@check("disconnects", "behind others in a queue", alone=True)
def _(t: Target) -> None:
    _begun(t)
    with contextlib.ExitStack() as stack:
        busy = [
            stack.enter_context(contextlib.closing(_send(t, CHAT, t.chat_body(**_LONG_ANSWER, n=32, temperature=1))))
            for _ in range(8)
        ]
        until("the engine is busy", lambda: in_hand(t) > 0, _START_LIMIT_S)
        queued = stack.enter_context(contextlib.closing(_send(t, CHAT, t.chat_body("Last", **_LONG_ANSWER))))
        queued.close()
        for sock in busy:
            sock.close()
        # Hundreds of sequences take longer to give up than one; that they are is what counts here.
        until("all were given up", lambda: is_idle(t), max(10 * t.abort_within_s, 5.0))
    t.chat(max_tokens=1)


@check("disconnects", "before the request's body is whole", alone=True)
def _(t: Target) -> None:
    _begun(t)
    body = json.dumps(t.chat_body(**_LONG_ANSWER)).encode()
    with t.connect() as sock:
        sock.sendall(t.head(CHAT, body) + body[: len(body) // 2])
    _given_up(t)


@check("disconnects", "at once after the request", alone=True)
def _(t: Target) -> None:
    _begun(t)
    for _ in range(5):
        _send(t, CHAT, t.chat_body(**_LONG_ANSWER)).close()
    _given_up(t)


@check("disconnects", "by the client's own timeout, without work stacking up", alone=True)
def _(t: Target) -> None:
    _begun(t)
    for _ in range(3):
        with contextlib.suppress(httpx.TimeoutException):
            t.http.post(CHAT, json=t.chat_body(**_LONG_ANSWER), timeout=0.3)
    _given_up(t)


@check("disconnects", "the others' answers go on", alone=True)
def _(t: Target) -> None:
    _begun(t)
    expected = t.chat_text("Tell me about rivers.", max_tokens=40)
    with contextlib.closing(_send(t, CHAT, t.chat_body(**_LONG_ANSWER, stream=True))) as sock:
        sock.recv(1000)
        sock.close()
        got = t.chat_text("Tell me about rivers.", max_tokens=40)
    expect(got == expected, f"the answer is {got!r:.80}, not {expected!r:.80}")
