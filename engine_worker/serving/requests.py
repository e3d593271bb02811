"""The bodies that clients send, as msgspec structs: names and types. Ranges and combinations are checked in validation.

Fields not named here are ignored, as OpenAI's API ignores what it doesn't know yet. Fields whose meaning would change
the answer, and which this worker can't honour, are listed in `validation.REFUSED` instead. Null counts as absent
everywhere, as OpenAI's clients send it.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from engine_worker.contract.errors import ApiError


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What chat and plain completions share. See core.types.SamplingParams for the meaning of the sampling fields."""

    model: str
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """`prompt` is a string, a list of strings, token ids, or a list of lists of token ids."""

    prompt: str | list[Any]
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """vLLM's: either `prompt` or `messages`. `add_special_tokens` defaults to true for a prompt, false for a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


RequestType = TypeVar("RequestType", bound=msgspec.Struct)


def convert(value: dict[str, Any], kind: type[RequestType]) -> RequestType:
    """`value` as a request of that kind. Raises ApiError 400 that names the field."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, OverflowError) as error:
        message, _, path = str(error).partition(" - at `$")
        param = path.rstrip("`").lstrip(".") or _missing(message)
        where = f" in `{param}`" if path else ""
        raise ApiError(
            400, f"{message.replace('Object missing', 'The request misses the')}{where}.", param=param
        ) from (error)


def _missing(message: str) -> str | None:
    """The field that msgspec says is missing: "Object missing required field `model`"."""
    _, found, rest = message.partition("required field `")
    return rest.rstrip("`") if found else None
