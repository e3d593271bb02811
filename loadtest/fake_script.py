"""What a scripted replica plays: the script, and one completion played by it, straight onto a socket.

As a bundled worker (FakeWorker.has_state) it marks a stream with its tokens where that is asked for, and goes on with
another's answer (contract/resume.py). Token n's id is n. So a continuation must be told the ids 0, 1, 2, ... as far as
the answer was relayed; anything else is refused with 400 and counted in Log.num_bad_resumes. `Script.after` counts all
tokens of an answer, so a fault that lies before a continuation's beginning does not happen there.
"""

from __future__ import annotations

import asyncio
import codecs
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from engine_worker.contract.resume import ResumeOrder, marked

Fault = Literal[
    "",
    "close",  # close the connection without a byte of an answer
    "status",  # answer `status`, with `retry_after` and an OpenAI error body
    "stall",  # send nothing more after `after` tokens, and keep the connection
    "die",  # cut the connection after `after` tokens
    "exit",  # end the process after `after` tokens
    "error",  # send an error event after `after` tokens
    "no_finish",  # [DONE] without a finish_reason
    "no_done",  # a finish_reason without [DONE]
    "malformed",  # an event that is not JSON after `after` tokens, then go on
    "endless",  # a line without end after `after` tokens
    "gzip",  # claim a content-encoding nobody asked for
    "html",  # 200 with a body that is not JSON
]


class Script(msgspec.Struct, kw_only=True):
    """How the next requests are answered. `times` limits `fault` to so many requests (-1: all of them).

    first_token_s, token_s  seconds before the first token and between tokens
    end_s                   seconds between a stream's last event and the end of its body
    chunk_bytes             cut what is written into pieces of so many bytes, each its own segment (0: don't)
    newline                 line ends of the stream: "\\n" or "\\r\\n"
    bom                     a byte order mark begins the stream
    cached_tokens           sent as x-warmgate-cached-tokens and in usage
    guesses                 tokens speculated for each token, one of them rightly: told in marks and usage
    poison                  a request with this text in it kills the worker (FakeWorker.on_poison)
    slots                   requests that it works on at once, the others waiting (0: all)
    status_name             the state of /internal/state
    """

    fault: Fault = ""
    times: int = -1
    after: int = 0
    status: int = 503
    retry_after: str = ""
    num_tokens: int = 8
    first_token_s: float = 0.0
    token_s: float = 0.0
    end_s: float = 0.0
    chunk_bytes: int = 0
    newline: str = "\n"
    comments: bool = False
    bom: bool = False
    cached_tokens: int = 0
    guesses: int = 0
    poison: str = ""
    slots: int = 0
    status_name: Literal["loading", "ready", "draining", "failed"] = "ready"


class End(NamedTuple):
    """One completion's end: `how` is finished, aborted (the peer left) or failed, `at` of the monotonic clock."""

    request_id: str
    how: str
    at: float


@dataclass(slots=True)
class Log:
    """What happened, for assertions: counts of completions, and the last request as it arrived.

    `num_resumed` of the completions that started were continuations.
    """

    num_started: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_in_flight: int = 0
    num_resumed: int = 0
    num_bad_resumes: int = 0
    num_embeddings: int = 0
    last_headers: dict[str, str] = field(default_factory=dict)
    last_body: str = ""
    last_path: str = ""


class Gone(Exception):
    """The connection ended, by the peer's doing or by the script's."""


class Play:
    """One completion, played by a script; with `order`, the rest of one. `marks`: the stream is marked."""

    def __init__(
        self, model: str, path: str, request: dict[str, Any], script: Script, fault: str,
        writer: asyncio.StreamWriter, marks: bool = False, order: ResumeOrder | None = None,
    ) -> None:  # fmt: skip
        self.model, self.request, self.script, self.fault, self.writer = model, request, script, fault, writer
        self.marks = marks
        self.start = len(order.output_ids) if order is not None else 0
        self._told = (order.draft_tokens, order.accepted_tokens) if order is not None else (0, 0)
        self.id, self.created = (order.id, order.created) if order is not None else ("fake-1", 1)
        self.is_chat = path.endswith("chat/completions")
        self.num_tokens = int(request.get("max_tokens") or script.num_tokens)
        self.tag = str(request.get("fake_tag", ""))
        self.usage: dict[str, Any] = {
            "prompt_tokens": 10,
            "completion_tokens": self.num_tokens,
            "total_tokens": 10 + self.num_tokens,
            "prompt_tokens_details": {"cached_tokens": script.cached_tokens},
        }
        if script.guesses:
            tried, right = self._drafts(self.num_tokens)
            self.usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": right,
                "rejected_prediction_tokens": tried - right,
            }

    def _drafts(self, num_tokens: int) -> tuple[int, int]:
        """Tokens speculated for the first so many of the answer, and those of them that were right."""
        own = num_tokens - self.start
        return self._told[0] + own * self.script.guesses, self._told[1] + own

    async def run(self) -> None:
        script, fault = self.script, self.fault
        if fault == "close":
            self._cut()
        if fault == "status":
            retry = {"retry-after": script.retry_after} if script.retry_after else {}
            await respond(self.writer, script.status, error_object("told to refuse", script.status), retry)
            return
        if fault == "html":
            await respond(self.writer, 200, b"<html>not JSON</html>")
            return
        if self.request.get("stream"):
            await self._stream()
        else:
            await self._whole()

    async def _whole(self) -> None:
        script, fault = self.script, self.fault
        await asyncio.sleep(script.first_token_s + script.token_s * self.num_tokens)
        if fault == "stall":
            await asyncio.Event().wait()
        if fault == "exit":
            os._exit(1)
        text = "".join(f" {self.tag}t{n}" for n in range(self.num_tokens))
        body: Any = {**self._frame(text, "stop", whole=True), "usage": self.usage}
        if fault == "error":
            body = error_object("told to fail", 500)
        encoded = msgspec.json.encode(body)
        head = _head(200, len(encoded), self._headers())
        if fault == "die":
            self.writer.write(head + encoded[: len(encoded) // 2])
            await self.writer.drain()
            self._cut()
        await self._write(head + encoded)

    async def _stream(self) -> None:
        script, fault = self.script, self.fault
        end = self.script.newline.encode()
        await asyncio.sleep(script.first_token_s)
        if fault == "stall" and script.after == 0:
            await asyncio.Event().wait()
        await self._write(_head(200, None, {**self._headers(), "content-type": "text/event-stream"}))
        if script.bom:
            await self._write(_chunk(codecs.BOM_UTF8))
        async for event in self._events():
            await self._write(_chunk(event.replace(b"\n", end)))
        await asyncio.sleep(script.end_s)
        await self._write(b"0\r\n\r\n")

    async def _events(self) -> AsyncIterator[bytes]:
        script, fault = self.script, self.fault
        include_usage = (self.request.get("stream_options") or {}).get("include_usage")
        if script.comments:
            yield b": ping\n\n"
        for n in range(self.start, self.num_tokens):
            if fault and n == script.after:
                async for event in self._misbehave():
                    yield event
                if fault == "error":
                    return
            if n > self.start:
                await asyncio.sleep(script.token_s)
            event = _event(self._frame(f" {self.tag}t{n}", None, first=n == 0))
            drafts = self._drafts(n + 1) if script.guesses else None
            yield marked(event, [n], drafts) if self.marks else event
        if fault and script.after >= self.num_tokens:
            async for event in self._misbehave():
                yield event
        if fault != "no_finish":
            yield _event(self._frame("", "stop"))
        if include_usage:
            yield _event({**self._frame("", None), "choices": [], "usage": self.usage})
        if fault != "no_done":
            yield b"data: [DONE]\n\n"

    async def _misbehave(self) -> AsyncIterator[bytes]:
        match self.fault:
            case "stall":
                await asyncio.Event().wait()
            case "die":
                await self.writer.drain()
                self._cut()
            case "exit":
                await self.writer.drain()
                os._exit(1)
            case "error":
                yield _event(error_object("told to fail", 500))
            case "malformed":
                yield b"data: {not json\n\n"
            case "endless":
                while True:
                    yield b"data: " + b"x" * 65536
                    await asyncio.sleep(0)

    def _cut(self) -> None:
        self.writer.transport.abort()
        raise Gone

    def _headers(self) -> dict[str, str]:
        headers = {"x-warmgate-cached-tokens": str(self.script.cached_tokens)}
        if self.marks:
            headers["x-warmgate-marks"] = "1"
        if self.fault == "gzip":
            headers["content-encoding"] = "gzip"
        return headers

    def _frame(self, text: str, finish: str | None, first: bool = False, whole: bool = False) -> dict[str, Any]:
        kind = "chat.completion" if self.is_chat else "text_completion"
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        if not self.is_chat:
            choice["text"] = text
        elif whole:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            role = {"role": "assistant"} if first else {}
            choice["delta"] = {**role, "content": text} if text else {}
            kind += ".chunk"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": [choice]}

    async def _write(self, data: bytes) -> None:
        size = self.script.chunk_bytes or len(data)
        for start in range(0, len(data), size):
            self.writer.write(data[start : start + size])
            await self.writer.drain()
            if size < len(data):
                await asyncio.sleep(0)


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def error_object(message: str, code: int) -> dict[str, Any]:
    return {"error": {"message": message, "type": "server_error", "param": None, "code": code}}


def _head(status: int, length: int | None, headers: dict[str, str]) -> bytes:
    framing = {"transfer-encoding": "chunked"} if length is None else {"content-length": str(length)}
    lines = {"content-type": "application/json", **headers, **framing, "server": "fake", "x-fake": "1"}
    return b"".join(
        [b"HTTP/1.1 %d X\r\n" % status, *(f"{name}: {value}\r\n".encode() for name, value in lines.items()), b"\r\n"]
    )


async def respond(writer: asyncio.StreamWriter, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
    body = value if isinstance(value, bytes) else msgspec.json.encode(value)
    writer.write(_head(status, len(body), headers or {}) + body)
    await writer.drain()
