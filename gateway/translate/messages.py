"""Anthropic's Messages API: the answer half, and the translation of one request."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from engine_worker.contract.errors import ApiError
from gateway.observe.record import RequestRecord
from gateway.translate.chat import ChatAnswer, ChatUsage, Choice, Json, Message, ToolCall, encode, event
from gateway.translate.messages_in import chat_request, read_messages

_STOP = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class MessagesTranslation:
    """One request's. A stream has one open content block at a time; blocks are numbered as they open."""

    name = "messages"

    def __init__(self) -> None:
        self.stream = False
        self.owner = ""
        self._model = ""
        self._id = f"msg_{secrets.token_hex(12)}"
        self._stops: list[str] = []
        self._has_started = False
        self._open: str = ""  # the open block's kind, "" for none
        self._num_blocks = 0
        self._calls: dict[int, int] = {}  # a tool call's index -> its block's
        self._ending: Choice = Choice()
        self._usage: ChatUsage | None = None

    def request(self, body: bytes) -> bytes:
        data, fields = read_messages(body)
        self.stream = bool(fields.stream)
        self._model = fields.model
        self._stops = fields.stop_sequences or []
        return encode(chat_request(data, fields))

    def whole(self, answer: ChatAnswer) -> bytes:
        choice = answer.choices[0] if answer.choices else Choice()
        message = choice.message
        content: list[Json] = []
        if message.thought:
            content.append({"type": "thinking", "thinking": message.thought, "signature": ""})
        if message.text:
            content.append({"type": "text", "text": message.text})
        for call in message.tool_calls or ():
            content.append({**_tool_use(call), "input": _input(call.function.arguments or "")})
        return encode(self._message(answer.model, content, self._stop(choice), _usage(answer.usage or ChatUsage())))

    def chunk(self, chunk: ChatAnswer, record: RequestRecord) -> bytes:
        out: list[bytes] = []
        if not self._has_started:
            self._has_started = True
            out += self._start(chunk.model, record)
        if chunk.usage is not None:
            self._usage = chunk.usage
        for choice in chunk.choices[:1]:
            out += self._delta(choice.delta)
            if choice.finish_reason is not None:
                self._ending = choice
        return b"".join(out)

    def finished(self) -> bytes:
        usage = _usage(self._usage) if self._usage is not None else {"output_tokens": 0}
        delta = {"type": "message_delta", "delta": self._stop(self._ending), "usage": usage}
        return b"".join(
            [*self._close(), event("message_delta", delta), event("message_stop", {"type": "message_stop"})]
        )

    def failed(self, error: ApiError) -> bytes:
        return event("error", _error(error))

    def raw(self, body: bytes) -> bytes | None:
        return None

    def error(self, error: ApiError, request_id: str) -> bytes:
        return encode({**_error(error), "request_id": request_id})

    def _message(self, model: str, content: list[Json], stop: Json, usage: Json) -> Json:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": model or self._model}
        return {**head, "content": content, **stop, "usage": usage}

    def _start(self, model: str, record: RequestRecord) -> list[bytes]:
        """The prompt's size is the router's here (exact where it has the tokenizer); the end has the replica's."""
        cached = record.cached_tokens or 0
        prompt = ChatUsage(prompt_tokens=max(record.prompt_tokens or 0, cached))
        usage = {**_usage(prompt), "input_tokens": prompt.prompt_tokens - cached, "cache_read_input_tokens": cached}
        stop = {"stop_reason": None, "stop_sequence": None}
        start = {"type": "message_start", "message": self._message(model, [], stop, usage)}
        return [event("message_start", start), event("ping", {"type": "ping"})]

    def _delta(self, delta: Message) -> list[bytes]:
        out: list[bytes] = []
        if delta.thought:
            out += self._enter("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            out.append(self._block_delta(self._num_blocks - 1, {"type": "thinking_delta", "thinking": delta.thought}))
        if delta.text:
            out += self._enter("text", {"type": "text", "text": ""})
            out.append(self._block_delta(self._num_blocks - 1, {"type": "text_delta", "text": delta.text}))
        for call in delta.tool_calls or ():
            out += self._call(call)
        return out

    def _call(self, call: ToolCall) -> list[bytes]:
        out: list[bytes] = []
        index = call.index or 0
        if index not in self._calls:
            out += self._enter(f"tool {index}", {**_tool_use(call), "input": {}})
            self._calls[index] = self._num_blocks - 1
        if call.function.arguments:
            delta = {"type": "input_json_delta", "partial_json": call.function.arguments}
            out.append(self._block_delta(self._calls[index], delta))
        return out

    def _enter(self, kind: str, block: Json) -> list[bytes]:
        if self._open == kind:
            return []
        start = {"type": "content_block_start", "index": self._num_blocks, "content_block": block}
        out = [*self._close(), event("content_block_start", start)]
        self._open = kind
        self._num_blocks += 1
        return out

    def _close(self) -> list[bytes]:
        if not self._open:
            return []
        out: list[bytes] = []
        index = self._num_blocks - 1
        if self._open == "thinking":
            out.append(self._block_delta(index, {"type": "signature_delta", "signature": ""}))
        self._open = ""
        return [*out, event("content_block_stop", {"type": "content_block_stop", "index": index})]

    def _block_delta(self, index: int, delta: Json) -> bytes:
        return event("content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta})

    def _stop(self, choice: Choice) -> Json:
        if choice.finish_reason == "stop" and choice.stop_reason in self._stops:
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
        # Some engines say `stop` behind a call that the client forced.
        has_calls = bool(self._calls or choice.message.tool_calls)
        reason = "tool_calls" if has_calls and choice.finish_reason == "stop" else choice.finish_reason
        return {"stop_reason": _STOP.get(reason or "stop", "end_turn"), "stop_sequence": None}


def _usage(usage: ChatUsage) -> Json:
    """Anthropic counts what was read from the cache apart from the rest of the input."""
    return {
        "input_tokens": max(0, usage.prompt_tokens - usage.cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _tool_use(call: ToolCall) -> Json:
    name = call.function.name or ""
    return {"type": "tool_use", "id": call.id or f"toolu_{secrets.token_hex(12)}", "name": name}


def _input(arguments: str) -> Any:
    """The arguments as an object. What a model wrote wrongly is still shown."""
    try:
        value = msgspec.json.decode(arguments) if arguments.strip() else {}
    except (msgspec.DecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"invalid_arguments": arguments}


def _error(error: ApiError) -> Json:
    kind = _ERRORS.get(error.status) or ("invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}
