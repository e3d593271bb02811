"""A scripted replica: speaks OpenAI's API with numbered tokens, and fails exactly as it is told to.

    python -m loadtest.fake_worker --port 8101 --tokens 20 --token-s 0.01

Its n-th output token is the text ` tn`, so a stream that lost, doubled or reordered a token shows it. Every request
plays the current script; POST /fake/script replaces it (fields of `Script`), GET /fake/log tells what happened, and
GET /fake/ends how each completion ended that it was not asked about before. A request's `fake_tag` stands before the
`t` of each of its tokens, so that a token of another request's answer shows too. With --state it serves
/internal/state like a bundled worker, marks its streams for those who ask for that, and goes on with the answers of
others (fake_script.py says how). It is raw sockets on purpose: a real HTTP server would not let
it break the protocol.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import socket
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from engine_worker.contract.resume import RESUME_PATH, ResumeOrder
from engine_worker.contract.state import WorkerState
from loadtest.fake_script import End, Gone, Log, Play, Script, error_object, respond

SEND_BUFFER_BYTES = 128 * 1024
_MAX_ENDS = 20_000


class FakeWorker:
    def __init__(self, model: str, script: Script, has_state: bool, incarnation: str) -> None:
        self.model = model
        self.script = script
        self.next_scripts: list[Script] = []  # for a request each, before `script`; workers may share the list
        self.log = Log()
        self.has_state = has_state
        self.incarnation = incarnation
        self.embeddings_status = 404
        self.on_poison: Callable[[], Awaitable[None]] = _exit
        self._ends: deque[End] = deque(maxlen=_MAX_ENDS)
        self._writers: set[asyncio.StreamWriter] = set()
        self._places: asyncio.Semaphore | None = None

    async def listen(self, host: str, port: int) -> asyncio.Server:
        """Start serving on the running loop. Raises OSError."""
        server = await asyncio.start_server(self._connection, host, port, limit=64 * 1024 * 1024)
        for listener in server.sockets:  # connections inherit it; as the bundled worker's (serving/server.py)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        return server

    async def serve(self, host: str, port: int) -> None:
        """Serve until cancelled, saying where on standard output."""
        server = await self.listen(host, port)
        address = server.sockets[0].getsockname()
        print(f"fake worker on {address[0]}:{address[1]}", flush=True)
        async with server:
            await server.serve_forever()

    def cut_connections(self) -> None:
        """Reset every connection, as a killed process does."""
        for writer in self._writers:
            writer.transport.abort()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            early = b""
            while (request := await _read_request(reader, early)) is not None:
                early = await self._route(*request, reader, writer)
        except (Gone, ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _route(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bytes:
        """Answer one request; returns what was read of the next one."""
        if path == "/fake/script":
            self.script = msgspec.json.decode(body, type=Script)
            await respond(writer, 200, {})
        elif path == "/fake/log":
            await respond(writer, 200, self.log)
        elif path == "/fake/ends":
            ends, self._ends = list(self._ends), deque(maxlen=_MAX_ENDS)
            await respond(writer, 200, ends)
        elif path == "/v1/models":
            entry = {"id": self.model, "object": "model", "created": 1, "owned_by": "fake"}
            await respond(writer, 200, {"object": "list", "data": [entry]})
        elif path == "/health":
            await respond(writer, 200, {})
        elif path == "/internal/state" and self.has_state:
            await respond(writer, 200, self._state())
        elif path == "/tokenize":
            await respond(writer, 200, {"tokens": [1, 2, 3], "count": 3, "max_model_len": 1000})
        elif path == "/v1/embeddings":
            self.log.num_embeddings += 1
            status = self.embeddings_status
            answer = {"object": "list", "model": self.model, "data": []}
            await respond(writer, status, answer if status == 200 else error_object("no embeddings", status))
        elif method == "POST" and path in ("/v1/chat/completions", "/v1/completions"):
            self.log.last_headers, self.log.last_body, self.log.last_path = headers, body.decode("latin-1"), path
            return await self._completion(path, msgspec.json.decode(body), headers, reader, writer)
        elif method == "POST" and path == RESUME_PATH and self.has_state:
            self.log.last_headers, self.log.last_body, self.log.last_path = headers, body.decode("latin-1"), path
            order = msgspec.json.decode(body, type=ResumeOrder)
            if order.output_ids != list(range(len(order.output_ids))):
                self.log.num_bad_resumes += 1
                await respond(writer, 400, error_object("the ids are not 0, 1, 2, ...", 400))
                return b""
            self.log.num_resumed += 1
            return await self._completion(
                order.path, msgspec.json.decode(order.request), headers, reader, writer, order
            )
        else:
            await respond(writer, 404, error_object("not found", 404))
        return b""

    def _state(self) -> WorkerState:
        return WorkerState(
            status=self.script.status_name,
            incarnation=self.incarnation,
            model_fingerprint=f"fake {self.model}",
            version="fake",
            model=self.model,
            num_blocks=1000,
            num_free_blocks=1000,
            block_size=16,
            num_running=self.log.num_in_flight - self._num_waiting,
            num_waiting=self._num_waiting,
        )

    @property
    def _num_waiting(self) -> int:
        slots = self.script.slots
        return max(0, self.log.num_in_flight - slots) if slots else 0

    async def _in_turn(self, play: Play, slots: int) -> None:
        """First come first served, `slots` at once, as engines do (the first script that sets them stands)."""
        if not slots:
            return await play.run()
        if self._places is None:
            self._places = asyncio.Semaphore(slots)
        async with self._places:
            await play.run()

    async def _completion(
        self,
        path: str,
        request: dict[str, Any],
        headers: dict[str, str],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        order: ResumeOrder | None = None,
    ) -> bytes:
        """Play the script; a peer that leaves meanwhile counts as an abort."""
        script = self.next_scripts.pop(0) if self.next_scripts else self.script
        if script.poison and script.poison in self.log.last_body:
            await self.on_poison()
        request_id, how = self.log.last_headers.get("x-request-id", ""), "failed"
        fault = script.fault if script.times else ""
        if fault and script.times > 0:
            script.times -= 1
        self.log.num_started += 1
        self.log.num_in_flight += 1
        marks = self.has_state and _wants_marks(headers, request)
        part = Play(self.model, path, request, script, fault, writer, marks, order)
        play = asyncio.create_task(self._in_turn(part, script.slots))
        # A client that waits for its answer sends nothing: the next byte, or the end, means that it left.
        left = asyncio.create_task(reader.read(1))
        try:
            await asyncio.wait({play, left}, return_when=asyncio.FIRST_COMPLETED)
            if not play.done():
                self.log.num_aborted += 1
                how = "aborted"
                raise Gone
            play.result()
            self.log.num_finished += 1
            how = "finished"
            return left.result() if left.done() else b""
        except ConnectionError:
            self.log.num_aborted += 1
            how = "aborted"
            raise
        finally:
            self.log.num_in_flight -= 1
            self._ends.append(End(request_id, how, time.monotonic()))
            for task in (play, left):
                task.cancel()
            await asyncio.gather(play, left, return_exceptions=True)


def _wants_marks(headers: dict[str, str], request: dict[str, Any]) -> bool:
    """As a bundled worker decides it; a request without a temperature counts as greedy here."""
    wanted = headers.get("x-warmgate-marks", "")
    is_exact = not request.get("temperature") or request.get("seed") is not None
    is_single = (request.get("n") or 1) == 1
    return bool(request.get("stream")) and is_single and (wanted == "all" or (wanted == "exact" and is_exact))


async def _exit() -> None:
    os._exit(1)


async def _read_request(reader: asyncio.StreamReader, early: bytes) -> tuple[str, str, dict[str, str], bytes] | None:
    """One request with a content-length body, `early` being read of it already; None at a clean end."""
    try:
        head = early + await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if early + error.partial:
            raise
        return None
    first, *rest = head.decode("latin-1").split("\r\n")
    method, path, _ = first.split(" ", 2)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest if line)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return method, path.partition("?")[0], headers, body


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.fake_worker", description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one, which is printed")
    parser.add_argument("--model", default="fake")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--first-token-s", type=float, default=0.0)
    parser.add_argument("--token-s", type=float, default=0.0)
    parser.add_argument("--state", action="store_true", help="serve /internal/state as a bundled worker does")
    parser.add_argument("--incarnation", default="", help="default: a new one each start")
    args = parser.parse_args(argv)
    script = Script(num_tokens=args.tokens, first_token_s=args.first_token_s, token_s=args.token_s)
    worker = FakeWorker(args.model, script, args.state, args.incarnation or secrets.token_hex(8))
    try:
        asyncio.run(worker.serve(args.host, args.port))
    except KeyboardInterrupt:
        return 0
    except OSError as error:
        print(f"fake worker: {args.host}:{args.port} can't be listened on ({error.strerror})", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
