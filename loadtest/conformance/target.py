"""The server under test, asked over HTTP and read without mercy."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from loadtest.conformance.checks import Failed, Skipped, expect, same

Json = dict[str, Any]
ERROR_KEYS = {"message", "type", "param", "code"}
DEFAULT_TOKENS = 12


class Target:
    """`root` is the URL without `/v1`. `model` is the first that the server lists unless one is named.

    abort_within_s   how soon a request must be given up after its client has left
    worker_urls      where the engines' `/metrics` are, to see that; asked for where they are not named
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        api_key: str = "unused",
        timeout_s: float = 60.0,
        abort_within_s: float = 0.5,
        worker_urls: list[str] | None = None,
        ready_s: float = 300.0,
    ) -> None:
        self.root = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self.abort_within_s = abort_within_s
        self.timeout_s = timeout_s
        self.api_key = api_key
        self.http = httpx.Client(
            base_url=self.root,
            timeout=timeout_s,
            trust_env=False,
            headers={"authorization": f"Bearer {api_key}"},
            limits=httpx.Limits(max_connections=64),
        )
        self.model = model or self._first_model()
        self._until_ready(ready_s)
        self.worker_urls = worker_urls if worker_urls is not None else self._workers()

    def close(self) -> None:
        self.http.close()

    def _first_model(self) -> str:
        listed = self.http.get("/v1/models").json()["data"]
        expect(listed, "the server lists no model; name one with --model")
        return str(listed[0]["id"])

    def _until_ready(self, limit_s: float) -> None:
        """A server may still be loading its model."""
        deadline = time.monotonic() + limit_s
        while self.post("/v1/chat/completions", self.chat_body(max_tokens=1)).status_code in (429, 503):
            if time.monotonic() > deadline:
                raise Failed(f"it still answered 503 after {limit_s:g} s")
            time.sleep(1)

    def _workers(self) -> list[str]:
        """The URL itself where it shows an engine's metrics, else the replicas that a Warmgate names."""
        if "vllm:num_requests_running" in self.http.get("/metrics").text:
            return [self.root]
        try:
            replicas = self.http.get("/health").json()["replicas"]
        except (ValueError, KeyError, TypeError):
            return []
        return [f"http://{replica['id']}" for replica in replicas]

    # --- requests that are to succeed

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.http.post(path, content=content, headers={"content-type": "application/json", **(headers or {})})

    def chat_body(self, text: str = "Say hello to the world.", **fields: Any) -> Json:
        body: Json = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": DEFAULT_TOKENS,
            "temperature": 0,
            **fields,
        }
        return {key: value for key, value in body.items() if value is not ...}  # ... leaves a field out

    def completion_body(self, prompt: Any = "Once upon a time", **fields: Any) -> Json:
        body: Json = {"model": self.model, "prompt": prompt, "max_tokens": DEFAULT_TOKENS, "temperature": 0, **fields}
        return {key: value for key, value in body.items() if value is not ...}

    def ok(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Json:
        answer = self.post(path, body, headers)
        expect(answer.status_code == 200, f"status {answer.status_code}: {answer.text[:200]}")
        value = answer.json()
        assert isinstance(value, dict)
        return value

    def chat(self, text: str = "Say hello to the world.", **fields: Any) -> Json:
        return self.ok("/v1/chat/completions", self.chat_body(text, **fields))

    def complete(self, prompt: Any = "Once upon a time", **fields: Any) -> Json:
        return self.ok("/v1/completions", self.completion_body(prompt, **fields))

    def text(self, prompt: Any = "Once upon a time", **fields: Any) -> str:
        """A completion's text."""
        return str(self.complete(prompt, **fields)["choices"][0]["text"])

    def chat_text(self, text: str = "Say hello to the world.", **fields: Any) -> str:
        return str(self.chat(text, **fields)["choices"][0]["message"]["content"])

    def chat_chunks(self, text: str = "Say hello to the world.", **fields: Any) -> list[Json]:
        return self.chunks("/v1/chat/completions", self.chat_body(text, stream=True, **fields))

    def completion_chunks(self, prompt: Any = "Once upon a time", **fields: Any) -> list[Json]:
        return self.chunks("/v1/completions", self.completion_body(prompt, stream=True, **fields))

    def chunks(self, path: str, body: Any) -> list[Json]:
        answer = self.post(path, body)
        expect(answer.status_code == 200, f"status {answer.status_code}: {answer.text[:200]}")
        kind = answer.headers.get("content-type", "")
        expect(kind.startswith("text/event-stream"), f"content-type is {kind!r}")
        return data_frames(answer.text)

    def token_ids(self, text: str) -> list[int]:
        """The model's ids for a text, without special tokens. Skips where the server doesn't tell."""
        answer = self.post("/tokenize", {"model": self.model, "prompt": text, "add_special_tokens": False})
        if answer.status_code != 200:
            raise Skipped("there is no /tokenize to learn token ids from")
        return list(answer.json()["tokens"])

    # --- requests that are to fail

    def refused(
        self, path: str, body: Any, statuses: tuple[int, ...] = (400,), headers: Mapping[str, str] | None = None
    ) -> Json:
        """The error object of a request that must be refused with one of `statuses`."""
        return error_of(self.post(path, body, headers), statuses)

    def raw(self, data: bytes, half_close: bool = False) -> bytes:
        """What the server says to these bytes until it closes; b"" where it only closes."""
        with self.connect() as sock:
            with contextlib.suppress(OSError):  # refused before all was sent
                sock.sendall(data)
                if half_close:
                    sock.shutdown(socket.SHUT_WR)
            received = b""
            while chunk := _receive(sock):
                received += chunk
            return received

    def connect(self) -> socket.socket:
        parts = urlsplit(self.root)
        if parts.scheme != "http":
            raise Skipped("raw connections are made to plain http only")
        return socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 80), timeout=self.timeout_s)

    def head(self, path: str, body: bytes, *more: str) -> bytes:
        """A POST request's head, for raw connections."""
        lines = [f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {self.api_key}", *more]
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join(lines).encode() + b"\r\n\r\n"


def _receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(65536)
    except ConnectionResetError:
        return b""
    except TimeoutError:
        raise Failed("neither an answer that ends nor an end of the connection") from None


def error_of(answer: httpx.Response, statuses: tuple[int, ...]) -> Json:
    """The error object in OpenAI's shape, or Failed."""
    wanted = " or ".join(map(str, statuses))
    expect(answer.status_code in statuses, f"status {answer.status_code} instead of {wanted}: {answer.text[:160]}")
    kind = answer.headers.get("content-type", "")
    expect(kind.startswith("application/json"), f"the error's content-type is {kind!r}")
    error = answer.json().get("error")
    expect(isinstance(error, dict), f"no error object: {answer.text[:160]}")
    assert isinstance(error, dict)
    expect(error.keys() >= ERROR_KEYS, f"the error lacks {sorted(ERROR_KEYS - error.keys())}")
    expect(isinstance(error["message"], str) and error["message"], "the error has no message")
    expect(isinstance(error["type"], str) and error["type"], "the error has no type")
    expect(error["param"] is None or isinstance(error["param"], str), f"`param` is {error['param']!r}")
    return error


def data_frames(text: str) -> list[Json]:
    """The chunks of a stream that ends as it should: frames of `data: ` or comments, `[DONE]` once and last."""
    frames = text.split("\n\n")
    same(frames.pop(), "", "what comes behind the last frame")
    expect(frames, "the stream is empty")
    same(frames.pop(), "data: [DONE]", "the last frame")
    chunks = []
    for frame in frames:
        if frame.startswith(":"):
            continue
        expect(frame.startswith("data: ") and "\n" not in frame, f"a frame that is no plain data: {frame[:80]!r}")
        chunks.append(json.loads(frame.removeprefix("data: ")))
    expect(all("error" not in chunk for chunk in chunks), f"an error event: {chunks[-1:]}")
    return chunks


def deltas(chunks: list[Json], index: int = 0) -> list[Json]:
    """The deltas of one choice, in order."""
    return [c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]


def joined(chunks: list[Json], index: int = 0) -> str:
    """The text of one choice, of a chat or of a plain completion."""
    parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join((c["delta"].get("content") if "delta" in c else c["text"]) or "" for c in parts)


def finishes(chunks: list[Json], index: int = 0) -> list[str]:
    """Every finish_reason of one choice that is not null."""
    parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return [c["finish_reason"] for c in parts if c.get("finish_reason") is not None]
