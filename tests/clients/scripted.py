"""A scripted replica for client tests: chat completions, completions and embeddings whose answers follow the request.

    python -m tests.clients.scripted --port 8101

What the last user message asks for, it does:
    say X             answers X, a word a chunk
    think T | X       reasoning T, then X
    fail STATUS N     answers STATUS to this very text N times, then `fine`
    break             sends a word and, when that has long gone out, an error event
    hang              sends one word, then nothing until the client leaves (GET /left counts those)
Tools are called where there are any and no result has come yet: with `call A B`, those named; else the first one. Their
arguments, and structured output, are the smallest value that their schema allows. Strings are "x", numbers 7.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import struct
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

MODEL = "scripted"
BREAK_S = 0.3  # an error together with the first word would be a status, as nothing has gone out yet
Json = dict[str, Any]


def text_of(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part.get("text", "") for part in content)
    return content or ""


def smallest(schema: Json) -> Any:
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = kind[0]
    if kind == "object" or "properties" in schema:
        return {name: smallest(inner) for name, inner in schema.get("properties", {}).items()}
    if kind == "array":
        return [smallest(schema.get("items", {"type": "string"}))]
    return {"integer": 7, "number": 7, "boolean": True, "null": None}.get(kind, "x")


class Scripted:
    def __init__(self) -> None:
        self.failed: Counter[str] = Counter()
        self.bodies: list[Json] = []
        self.num_left = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/embeddings", self._embeddings)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/left", self._left)
        app.router.add_get("/last", self._last)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        entry = {"id": MODEL, "object": "model", "created": 1, "owned_by": "tests"}
        return web.json_response({"object": "list", "data": [entry]})

    async def _left(self, request: web.Request) -> web.Response:
        return web.json_response({"left": self.num_left})

    async def _last(self, request: web.Request) -> web.Response:
        return web.json_response(self.bodies[-1])

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        count = sum(len(text_of(message.get("content")).split()) for message in body.get("messages", []))
        return web.json_response({"count": count, "tokens": list(range(count)), "max_model_len": 1000})

    async def _embeddings(self, request: web.Request) -> web.Response:
        body = await request.json()
        given = body["input"]
        inputs = given if isinstance(given, list) and given and isinstance(given[0], str | list) else [given]
        data = []
        for i, one in enumerate(inputs):
            vector = [float(len(one)), float(i), 0.5]
            value: Any = vector
            if body.get("encoding_format") == "base64":
                value = base64.b64encode(struct.pack("<3f", *vector)).decode()
            data.append({"object": "embedding", "index": i, "embedding": value})
        usage = {"prompt_tokens": len(inputs), "total_tokens": len(inputs)}
        return web.json_response({"object": "list", "data": data, "model": body["model"], "usage": usage})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body["prompt"] if isinstance(body["prompt"], str) else text_of(body["prompt"])
        return await self._answer(request, body, prompt.strip().splitlines()[-1], "text_completion")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        asked = [text_of(message["content"]) for message in body["messages"] if message["role"] == "user"]
        return await self._answer(request, body, asked[-1] if asked else "", "chat.completion")

    async def _answer(self, request: web.Request, body: Json, asked: str, kind: str) -> web.StreamResponse:
        self.bodies.append(body)
        verb, _, rest = asked.partition(" ")
        if verb == "fail":
            status, _, times = rest.partition(" ")
            if self.failed[asked] < int(times.split()[0]):
                self.failed[asked] += 1
                error = {"message": "told to fail", "type": "server_error", "param": None, "code": None}
                return web.json_response({"error": error}, status=int(status), headers={"retry-after": "1"})
        pieces, finish = _pieces(body, verb, rest)
        if not body.get("stream"):
            if verb == "hang":
                await self._hang(request)
            return web.json_response(_whole(kind, pieces, finish, len(body["messages"]) if "messages" in body else 1))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        with_usage = (body.get("stream_options") or {}).get("include_usage")
        async for frame in _frames(kind, pieces, finish, verb, bool(with_usage)):
            await response.write(b"data: " + frame + b"\n\n")
        if verb == "hang":
            await self._hang(request)
        return response

    async def _hang(self, request: web.Request) -> None:
        try:
            while request.transport is not None and not request.transport.is_closing():  # noqa: ASYNC110  # no event tells
                await asyncio.sleep(0.01)
        finally:
            self.num_left += 1


def _pieces(body: Json, verb: str, rest: str) -> tuple[list[Json], str]:
    """Deltas of the answer, and its finish_reason."""
    messages = body.get("messages", [])
    wanted = body.get("response_format") or {}
    has_result = bool(messages) and messages[-1]["role"] == "tool"
    if body.get("tools") and not has_result and body.get("tool_choice") != "none" and verb != "say":
        tools = {tool["function"]["name"]: tool["function"] for tool in body["tools"]}
        choice = body.get("tool_choice")
        forced = [choice["function"]["name"]] if isinstance(choice, dict) else []
        names = rest.split() if verb == "call" else forced or [next(iter(tools))]
        pieces: list[Json] = []
        for i, name in enumerate(names):
            arguments = json.dumps(smallest(tools[name]["parameters"]))
            call = {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": ""}}
            pieces.append({"tool_calls": [{"index": i, **call}]})
            half = len(arguments) // 2
            for part in (arguments[:half], arguments[half:]):
                pieces.append({"tool_calls": [{"index": i, "function": {"arguments": part}}]})
        return pieces, "tool_calls"
    if wanted.get("type") == "json_schema":
        return _words(json.dumps(smallest(wanted["json_schema"]["schema"]))), "stop"
    if wanted.get("type") == "json_object":
        return _words('{"answer": "x"}'), "stop"
    if has_result:
        return _words("the result is " + text_of(messages[-1]["content"])), "stop"
    if verb == "think":
        thought, _, text = rest.partition(" | ")
        return [{"reasoning_content": word["content"]} for word in _words(thought)] + _words(text), "stop"
    if verb == "say":
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or 1000
        words = _words(rest)
        return words[:limit], "stop" if len(words) <= limit else "length"
    return _words("fine"), "stop"


def _words(text: str) -> list[Json]:
    return [{"content": (" " if i else "") + word} for i, word in enumerate(text.split(" "))]


def _usage(pieces: list[Json], num_messages: int) -> Json:
    prompt = 10 * num_messages
    total = prompt + len(pieces)
    details = {"cached_tokens": prompt // 2}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": len(pieces),
        "total_tokens": total,
        "prompt_tokens_details": details,
    }


def _whole(kind: str, pieces: list[Json], finish: str, num_messages: int) -> Json:
    text = "".join(piece.get("content", "") for piece in pieces)
    thought = "".join(piece.get("reasoning_content", "") for piece in pieces)
    head = {"id": "scripted-1", "object": kind, "created": 1, "model": MODEL, "usage": _usage(pieces, num_messages)}
    if kind == "text_completion":
        return {**head, "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": finish}]}
    message: Json = {"role": "assistant", "content": text or None}
    if thought:
        message["reasoning_content"] = thought
    calls: dict[int, Json] = {}
    for piece in pieces:
        for part in piece.get("tool_calls", []):
            if "id" in part:
                calls[part["index"]] = {"id": part["id"], "type": "function", "function": {**part["function"]}}
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    if calls:
        message["tool_calls"] = list(calls.values())
    return {**head, "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": finish}]}


async def _frames(kind: str, pieces: list[Json], finish: str, verb: str, with_usage: bool) -> AsyncIterator[bytes]:
    is_chat = kind == "chat.completion"
    head: Json = {"id": "scripted-1", "object": kind + ".chunk" if is_chat else kind, "created": 1, "model": MODEL}
    more = {"usage": None} if with_usage else {}

    def frame(delta: Json, finish_reason: str | None) -> bytes:
        body = {"delta": delta} if is_chat else {"text": delta.get("content", "")}
        choice = {"index": 0, **body, "logprobs": None, "finish_reason": finish_reason}
        return json.dumps({**head, "choices": [choice], **more}, separators=(",", ":")).encode()

    if is_chat:
        yield frame({"role": "assistant", "content": ""}, None)
    for piece in pieces:
        yield frame(piece, None)
        if verb == "hang":
            return
        await asyncio.sleep(0)
    if verb == "break":
        await asyncio.sleep(BREAK_S)
        yield json.dumps({"error": {"message": "told to break", "type": "server_error", "code": 500}}).encode()
        return
    yield frame({}, finish)
    if with_usage:
        yield json.dumps({**head, "choices": [], "usage": _usage(pieces, 1)}, separators=(",", ":")).encode()
    yield b"[DONE]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    web.run_app(Scripted().app(), host="127.0.0.1", port=parser.parse_args().port, print=None, handle_signals=True)


if __name__ == "__main__":
    main()
