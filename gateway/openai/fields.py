"""What is read of a request's body: its fields by endpoint, and what the gateway keeps of them.

Apart from parse.py, which fills them in and is compiled (gateway/compiled.py): these classes are msgspec's to make.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from gateway.prefix.source import PromptSource

Endpoint = Literal["chat", "completions", "embeddings", "tokenize", "detokenize"]

MAX_STOPS = 64
MAX_LOGIT_BIAS = 4096
_MAX_STOP_CHARS = 4096
Stops = Annotated[list[Annotated[str, msgspec.Meta(max_length=_MAX_STOP_CHARS)]], msgspec.Meta(max_length=MAX_STOPS)]

ShortText = Annotated[str, msgspec.Meta(max_length=4096)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=2**31)]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class Common(msgspec.Struct, frozen=True, kw_only=True):
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31)] | None = None
    max_completion_tokens: PositiveInt | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] | None = None
    prompt_cache_key: ShortText | None = None
    cache_salt: ShortText | msgspec.UnsetType | None = msgspec.UNSET
    add_special_tokens: bool | None = None
    stop: Annotated[str, msgspec.Meta(max_length=_MAX_STOP_CHARS)] | Stops | None = None
    logit_bias: Annotated[dict[str, Any], msgspec.Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    # Not looked at; read so that a number which is none (1e999) is refused here.
    temperature: Any = None
    top_p: Any = None
    min_p: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None


class Chat(Common, frozen=True, kw_only=True):
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None


class Completion(Common, frozen=True, kw_only=True):
    prompt: str | list[Any]
    suffix: str | None = None
    best_of: Annotated[int, msgspec.Meta(ge=1, le=128)] | None = None


class Embedding(Common, frozen=True, kw_only=True):
    input: Any


class ModelOnly(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None


class ParsedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the gateway knows of a request. `body` goes to a replica: what the client sent, byte for byte, but for what
    `adds_usage` (the usage of a stream is asked for, though the client didn't) and `with_model` put in.

    Where a salt was put in (`parse_request`), `unsalted` is the body without it, for replicas that don't know it.

    `max_output_tokens` is the client's own limit, if it gave one. `num_choices` is n (choices of a stream). `session`
    names a conversation that the client wants kept together. `source` is the prompt, for routes that have one.
    """

    endpoint: Endpoint
    body: bytes
    model: str | None
    stream: bool = False
    adds_usage: bool = False
    max_output_tokens: int | None = None
    num_choices: int = 1
    session: str | None = None
    source: PromptSource | None = None
    unsalted: bytes | None = None


_TYPES: dict[Endpoint, Any] = {
    "chat": Chat,
    "completions": Completion,
    "embeddings": Embedding,
    "tokenize": ModelOnly,
    "detokenize": ModelOnly,
}
DECODERS = {endpoint: msgspec.json.Decoder(kind) for endpoint, kind in _TYPES.items()}
