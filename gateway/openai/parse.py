"""Bytes to ParsedRequest: what routing and admission need of a request, and nothing else.

The body itself is forwarded as received, so this reads tolerantly: unknown fields pass, values that only the engine
uses are not looked at. What two parsers could read differently is refused with a 400 here, before anything is
allocated for it: invalid UTF-8, lone surrogates, NaN and Infinity, nesting too deep to decode, a key given twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import msgspec

from engine_worker.contract.errors import ApiError
from gateway.openai.fields import DECODERS, Chat, Completion, Endpoint, ModelOnly, ParsedRequest
from gateway.prefix.source import PromptSource

Spans = dict[str, tuple[int, int]]  # a top-level key -> where its value begins and ends in the body
_RAW: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ANY: Final = msgspec.json.Decoder()
_STREAM: Final = re.compile(rb'"stream"[ \t\r\n]*:[ \t\r\n]*true')
_KEY: Final = re.compile(rb'[ \t\r\n]*"((?:[^"\\]|\\.)*)"[ \t\r\n]*:[ \t\r\n]*', re.DOTALL)
_NEXT: Final = re.compile(rb"[ \t\r\n]*([,}])")
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_OPEN: Final = re.compile(rb"[ \t\r\n]*\{")


def parse_request(
    endpoint: Endpoint, body: bytes, salted: Callable[[str], str] | None = None
) -> ParsedRequest:  # fmt: skip
    """`salted` makes the salt that a replica gets from the client's own ("" for none). Raises ApiError(400)."""
    fields = _fields(endpoint, body)
    if isinstance(fields, ModelOnly):
        return ParsedRequest(endpoint=endpoint, body=body, model=fields.model)
    stream = bool(fields.stream)
    adds_usage = stream and not (fields.stream_options is not None and fields.stream_options.include_usage)
    if adds_usage:
        body = _with_usage(body)
    has_own, salt = (False, "") if fields.cache_salt is msgspec.UNSET else (True, fields.cache_salt or "")
    unsalted = None
    if salted is not None:
        salt, unsalted = salted(salt), body
        body = _with_salt(body, salt, has_own)
    num_choices = fields.n or 1
    source = None
    if isinstance(fields, Chat):
        source = PromptSource(
            messages=fields.messages,
            tools=fields.tools or None,
            chat_template_kwargs=fields.chat_template_kwargs,
            reasoning_effort=fields.reasoning_effort,
            add_generation_prompt=fields.add_generation_prompt is not False,
            continue_final_message=bool(fields.continue_final_message),
            salt=salt,
            add_special_tokens=fields.add_special_tokens,
            own_template=fields.chat_template is not None,
        )
    elif isinstance(fields, Completion):
        if fields.best_of is not None and fields.best_of < num_choices:
            raise ApiError(400, f"best_of is {fields.best_of} but n is {num_choices}; best_of must be at least n.")
        if isinstance(fields.prompt, list) and (num_prompts := _num_prompts(fields.prompt)) > 1:
            num_choices *= num_prompts
        source = PromptSource(prompt=fields.prompt, salt=salt, add_special_tokens=fields.add_special_tokens)
    return ParsedRequest(
        endpoint=endpoint,
        body=body,
        model=fields.model,
        stream=stream,
        adds_usage=adds_usage,
        max_output_tokens=fields.max_completion_tokens or fields.max_tokens,
        num_choices=num_choices,
        session=fields.prompt_cache_key or None,
        source=source,
        unsalted=unsalted,
    )


def with_model(parsed: ParsedRequest, model: str) -> ParsedRequest:
    """The same request for another model, all other bytes as they are."""
    body = _with_value(parsed.body, "model", model)
    unsalted = _with_value(parsed.unsalted, "model", model) if parsed.unsalted is not None else None
    return msgspec.structs.replace(parsed, model=model, body=body, unsalted=unsalted)


def _with_value(body: bytes, key: str, value: str) -> bytes:
    start, end = _walk(body)[key]
    return body[:start] + msgspec.json.encode(value) + body[end:]


def _with_salt(body: bytes, salt: str, has_own: bool) -> bytes:
    """The salt in place of the client's, or at the front; all other bytes as they are."""
    if has_own:
        return _with_value(body, "cache_salt", salt)
    opened = _OPEN.match(body)
    assert opened is not None, "it was checked to be an object"
    return b'{"cache_salt":"%b",' % salt.encode() + body[opened.end() :]


def _with_usage(body: bytes) -> bytes:
    """Ask for a stream's usage; nothing else moves, since the order of keys can matter to a prompt."""
    is_plain = body.count(b'"stream"') == 1 and b'"stream_options"' not in body and b"\\u" not in body
    if is_plain and (found := _STREAM.search(body)) is not None:
        end = found.end()
        return body[:end] + b',"stream_options":{"include_usage":true}' + body[end:]
    spans = _walk(body)
    if "stream_options" not in spans:
        _, end = spans["stream"]
        return body[:end] + b',"stream_options":{"include_usage":true}' + body[end:]
    start, end = spans["stream_options"]
    options = {**(_ANY.decode(body[start:end]) or {}), "include_usage": True}
    return body[:start] + msgspec.json.encode(options) + body[end:]


def _num_prompts(prompt: list[Any]) -> int:
    """A list is one prompt of ids, or several prompts (strings, or lists of ids)."""
    if not prompt:
        raise ApiError(400, "Invalid value for 'prompt': expected at least one prompt.", param="prompt")
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return 1
    if kinds == {str} or (kinds == {list} and all(set(map(type, ids)) == {int} for ids in prompt)):
        return len(prompt)
    raise ApiError(
        400,
        "Invalid value for 'prompt': expected a string, a list of strings, a list of token ids or a list of those.",
        param="prompt",
    )


def decode_object(body: bytes) -> dict[str, Any]:
    """A JSON object that every parser reads alike, or ApiError(400)."""
    data = _decoded(_ANY, body)
    if not isinstance(data, dict):
        raise ApiError(400, "The request body must be a JSON object.")
    _refuse_duplicates(body)
    return data


def _fields(endpoint: Endpoint, body: bytes) -> Any:
    """The fields that are looked at; decode_object's checks hold for the rest of the body, too."""
    try:
        fields = _decoded(DECODERS[endpoint], body)
    except msgspec.ValidationError as error:
        raise invalid_field(error, decode_object(body)) from None
    if b"\\" in body and b"\\u" in body:  # a single byte is found many times faster
        _decoded(_ANY, body)  # escapes in fields that were skipped
    _refuse_duplicates(body)
    return fields


def _decoded(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """Raises ApiError for what is no JSON, msgspec.ValidationError for JSON of another shape."""
    try:
        # msgspec checks the UTF-8 of strings but not of what lies between tokens; this is a pass at memory speed.
        str(body, "utf-8")
        return decoder.decode(body)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"The request body is not valid UTF-8 (byte {error.start}).") from None
    except RecursionError:
        raise ApiError(400, "The request body is nested too deeply.") from None
    except msgspec.ValidationError as error:
        if decoder is _ANY:  # a number beyond all bounds
            raise ApiError(400, f"The request body is not valid JSON: {error}.") from None
        raise
    except msgspec.DecodeError as error:
        raise ApiError(400, f"The request body is not valid JSON: {_reason(body, error)}.") from None


def _reason(body: bytes, error: msgspec.DecodeError) -> str:
    """Why it is no JSON; msgspec calls an empty body and half a surrogate pair "truncated", too."""
    if not body.strip():
        return "it is empty"
    if "truncated" in str(error) and _SURROGATE.search(body):
        return "it is cut off, or a string has half of a surrogate pair (\\ud800 to \\udfff) without the other"
    return str(error)


def _refuse_duplicates(body: bytes) -> None:
    """Raises ApiError(400) for a key that the top level has twice.

    Where the keys and values that a decoder sees fill the body to the last byte, there is no room for another one:
    most clients write no white space. A key that stands once in the whole body stands once at the top. One of the two
    settles nearly every body, as long as no key can be spelled in two ways, which takes an escape.
    """
    if b"\\" in body and (b"\\u" in body or b"\\/" in body):
        _walk(body)
        return
    raws = _RAW.decode(body)
    # {"key":value,...}: a key's quotes and colon, and a comma or brace
    if sum(map(len, raws)) + sum(map(len, raws.values())) + 4 * len(raws) + 1 == len(body):
        return
    for key in raws:
        if body.count(b'"%b"' % key.encode()) != 1:
            _walk(body)
            return


def _walk(body: bytes) -> Spans:
    """Where each value of the top level stands. Raises ApiError(400) for a key given twice.

    With every key unique, the raw value decoded for a key is the one that follows the key.

    A decoder keeps the last value of a repeated key, so at its first occurrence the bytes differ, or the key comes
    round again. Costs a regex match a key and a comparison at memory speed a value.
    """
    raws = _RAW.decode(body)
    seen: Spans = {}
    opened = _OPEN.match(body)
    assert opened is not None, "it was checked to be an object"
    position = opened.end()
    while len(seen) < len(raws):
        key_match = _KEY.match(body, position)
        assert key_match is not None, "it was checked to be JSON"
        key = _unquote(key_match.group(1))
        value = bytes(raws[key])
        end = key_match.end() + len(value)
        following = _NEXT.match(body, end) if body.startswith(value, key_match.end()) else None
        if key in seen or following is None:
            raise _duplicate(key)
        seen[key] = (key_match.end(), end)
        position = following.end()
    if seen and following is not None and following.group(1) == b",":
        again = _KEY.match(body, position)
        raise _duplicate(_unquote(again.group(1)) if again else "")
    return seen


def _unquote(raw: bytes) -> str:
    key = msgspec.json.decode(b'"' + raw + b'"') if b"\\" in raw else raw.decode()
    assert isinstance(key, str)
    return key


def _duplicate(key: str) -> ApiError:
    return ApiError(400, f"The request body has the key {key[:64]!r} twice; give it once.", param=key[:64])


def invalid_field(error: msgspec.ValidationError, data: dict[str, Any]) -> ApiError:
    """msgspec's sentence with the path as OpenAI's `param`."""
    sentence, _, path = str(error).partition(" - at `$")
    param = path.rstrip("`").lstrip(".") or None
    if param is None and "missing required field" in sentence:
        param = sentence.rsplit("`", 2)[1]
        return ApiError(400, f"You must provide the parameter '{param}'.", param=param)
    if param == "n" and isinstance(data.get("n"), int):
        return ApiError(400, f"n is {data['n']}; it must be from 1 to 128.", param="n")
    return ApiError(400, f"Invalid value for '{param}': {sentence[:1].lower()}{sentence[1:]}.", param=param)
