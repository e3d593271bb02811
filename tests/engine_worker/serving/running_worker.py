"""A worker as it is run, with two processes and real sockets, over the fake model."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec

from engine_worker.contract.state import WorkerState
from tests.support.processes import Process, descendants, free_port, python


class RunningWorker:
    def __init__(self, process: Process, port: int) -> None:
        self.process = process
        self.port = port
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False)

    @property
    def engine_pid(self) -> int:
        [pid] = descendants(self.process.pid)
        return pid

    def state(self) -> WorkerState:
        return msgspec.json.decode(self.http.get("/internal/state").content, type=WorkerState)

    def until_state(self, what: str, **expected: Any) -> WorkerState:
        """Poll the state until all fields have the expected values (or satisfy the expected functions)."""

        def matches() -> WorkerState | None:
            state = self.state()
            for field, value in expected.items():
                actual = getattr(state, field)
                if not (value(actual) if callable(value) else actual == value):
                    return None
            return state

        return self.process.until(what, matches)

    def until_idle(self) -> None:
        self.until_state(
            "no request left and all blocks free", num_running=0, num_waiting=0, num_free_blocks=_all_of(self)
        )

    def until_ready(self) -> WorkerState:
        return self.until_state("ready", status="ready")

    def ended(self) -> dict[str, int]:
        """Sequences that have ended, by reason."""
        prefix = "vllm:request_success_total{"
        result: dict[str, int] = {}
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(prefix):
                labels, _, value = line.rpartition(" ")
                result[labels.partition('finished_reason="')[2].partition('"')[0]] = int(float(value))
        return result

    def chat(self, text: str, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json=chat_body(text, **fields))

    def complete(self, prompt: Any, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"model": "fake", "prompt": prompt, "max_tokens": 500, **fields})

    def connect(self, path: str, body: dict[str, Any], *, send_bytes: int | None = None) -> socket.socket:
        """A raw connection that has sent a request (or the first bytes of its body)."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n".encode()
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        sock.sendall(head + content[:send_bytes])
        return sock


def _all_of(worker: RunningWorker) -> int:
    return worker.until_state("a ready engine", num_blocks=lambda value: value > 0).num_blocks


def chat_body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": text}], **fields}


def read_until(sock: socket.socket, mark: bytes) -> bytes:
    """Everything up to and beyond `mark`. Fails where the connection ends before it."""
    data = b""
    while mark not in data:
        chunk = sock.recv(65536)
        assert chunk, f"the connection ended before {mark!r}: {data[-500:]!r}"
        data += chunk
        assert not data.startswith(b"HTTP/") or b" 200 OK" in data[:20], data[:1000]
    return data


def read_to_end(sock: socket.socket) -> bytes:
    data = b""
    while chunk := sock.recv(65536):
        data += chunk
    return data


def events(text: str) -> list[Any]:
    """The data of each event, "[DONE]" as a string. Fails on anything but data and comments."""
    result: list[Any] = []
    frames = text.split("\n\n")
    assert frames.pop() == "", "the stream ends inside a frame"
    for frame in frames:
        if frame == ": ping":
            continue
        assert frame.startswith("data: "), frame
        assert "\n" not in frame
        data = frame.removeprefix("data: ")
        result.append(data if data == "[DONE]" else json.loads(data))
    return result


@contextmanager
def running_worker(
    *arguments: str,
    model: str = "fake",
    module: str = "tests.engine_worker.serving.fake_worker",
    env: dict[str, str] | None = None,
) -> Iterator[RunningWorker]:
    """A worker that has been started, not one that is ready."""
    port = free_port()
    command = ["-m", module, "--model", model, "--port", str(port), *arguments]
    with python(*command, env=env) as process:
        worker = RunningWorker(process, port)
        try:
            yield worker
        finally:
            worker.http.close()
