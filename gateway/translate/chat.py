"""What translations read of a chat answer, whole or streamed, and the checks that both request halves share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from engine_worker.contract.errors import ApiError
from gateway.openai.parse import decode_object, invalid_field
from gateway.openai.sse import SseError, events

Json = dict[str, Any]
_Fields = TypeVar("_Fields", bound=msgspec.Struct)


class Function(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct, frozen=True):
    """A call, or a part of one in a stream: `id` and `name` come with its first part."""

    index: int | None = None
    id: str | None = None
    function: Function = Function()


class Message(msgspec.Struct, frozen=True):
    """A message, or a stream's delta of one."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None

    @property
    def thought(self) -> str:
        return self.reasoning_content or self.reasoning or ""

    @property
    def text(self) -> str:
        return self.content or self.refusal or ""


class Logprobs(msgspec.Struct, frozen=True):
    content: list[Json] | None = None


class Choice(msgspec.Struct, frozen=True):
    """`stop_reason` is vLLM's: the stop string or token that ended the text."""

    message: Message = Message()
    delta: Message = Message()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: Logprobs | None = None


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class OutputDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int | None = None


class ChatUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: OutputDetails | None = None

    @property
    def cached_tokens(self) -> int:
        return (self.prompt_tokens_details.cached_tokens or 0) if self.prompt_tokens_details else 0

    @property
    def reasoning_tokens(self) -> int:
        return (self.completion_tokens_details.reasoning_tokens or 0) if self.completion_tokens_details else 0


class ChatAnswer(msgspec.Struct, frozen=True):
    """A whole answer, or a chunk of one."""

    model: str = ""
    choices: list[Choice] = []
    usage: ChatUsage | None = None
    error: Any = None

    def streamed(self) -> ChatAnswer:
        """A whole answer as if it were one chunk of a stream."""
        choices = [msgspec.structs.replace(choice, delta=choice.message) for choice in self.choices[:1]]
        return msgspec.structs.replace(self, choices=choices)


_ANSWER = msgspec.json.Decoder(ChatAnswer)
encode = msgspec.json.Encoder().encode


def read_answer(body: bytes) -> ChatAnswer:
    """Raises SseError for what is no chat answer."""
    try:
        return _ANSWER.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise SseError(f"the replica's answer is not a chat completion ({error})") from error


def read_chunks(data: bytes) -> Iterator[ChatAnswer | None]:
    """The chunks in whole events of a stream; None for [DONE]. Raises SseError."""
    for _, payload in events(data, 0):
        yield None if payload == b"[DONE]" else read_answer(payload)


def read_request(body: bytes, kind: type[_Fields]) -> tuple[Json, _Fields]:
    """The client's JSON, and the fields of it that are looked at. Raises ApiError(400)."""
    data = decode_object(body)
    try:
        return data, msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise invalid_field(error, data) from None


def wrong(param: str, message: str) -> ApiError:
    return ApiError(400, f"Invalid value for '{param}': {message}.", param=param)


def unsupported(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="unsupported_parameter")


def string(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise wrong(param, "expected a string")
    return value


def obj(value: Any, param: str) -> Json:
    if not isinstance(value, dict):
        raise wrong(param, "expected an object")
    return value


def parts_or_text(parts: list[Json]) -> str | list[Json]:
    """Text parts become one string, so that a prompt does not depend on how a client cut it; others stay parts."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def event(name: str, data: Json) -> bytes:
    """A named server-sent event."""
    return b"event: " + name.encode() + b"\ndata: " + encode(data) + b"\n\n"
