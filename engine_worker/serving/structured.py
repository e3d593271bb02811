"""What an answer must look like, from the request's fields to a grammar that the engine enforces token by token.

OpenAI's `response_format` and vLLM's `structured_outputs` (and its older `guided_*` fields) all become one grammar in
llguidance's language. A schema is enforced whole or refused: what llguidance can't enforce is a 400 that names the
keyword, never an answer that only looks checked.

Grammars come from clients, so they are compiled once here, in a thread of the API process and within llguidance's
limits, before the engine ever sees them.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

import msgspec

from engine_worker.config import GRAMMAR_LIMITS
from engine_worker.contract.errors import ApiError
from engine_worker.serving.requests import GenerationRequest
from engine_worker.serving.validation import invalid, unsupported

MAX_GRAMMAR_CHARS = 256 * 1024
MAX_CHOICES = 1000

# A model that is unsure writes blanks for ever where a schema allows it, so a run of them is limited.
_SOME_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,24}"

_UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*?\])")
_UNKNOWN_FORMAT = re.compile(r"Unknown format: (.*)")

Json = dict[str, Any]


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs` object: one of the first five."""

    json: str | Json | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None
    whitespace_pattern: str | None = None


class Format(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for.

    field  the request's field, for errors
    kind   json, regex, choice or lark; `text` is a schema's JSON, a pattern, a rule's alternatives, or a Lark grammar
    """

    field: str
    kind: str
    text: str

    def grammar(self) -> str:
        """Raises ApiError 400 where it can't be enforced."""
        if self.kind == "choice":
            return compiled(self.field, "lark", f"start: {self.text}")
        return compiled(self.field, self.kind, self.text)


def wanted_format(request: GenerationRequest) -> Format | None:
    """The one format that the request asks for. Raises ApiError 400 for none that is known, and for several."""
    found = [
        wanted
        for wanted in (_response_format(request.response_format), _structured(request), *_guided(request))
        if wanted is not None
    ]
    if len(found) > 1:
        fields = " and ".join(f"`{wanted.field}`" for wanted in found)
        raise invalid(found[1].field, f"Ask for one format of the output only, not for {fields}.")
    return found[0] if found else None


def schema_text(
    field: str,
    schema: Any,
    whitespace: str | None = _SOME_WHITESPACE,
    *,
    closed: bool = False,
    lenient: bool = False,
) -> str:
    """A schema (an object, true, or JSON text) as JSON with our options in it. Raises ApiError 400.

    closed   an object has no properties but those named
    lenient  keywords that can't be enforced are passed over
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise invalid(field, f"The schema in `{field}` is no JSON: {error}.") from error
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise invalid(field, f"The schema in `{field}` must be an object.")
    options: Json = {"lenient": lenient, "whitespace_flexible": whitespace is not None}
    if whitespace is not None:
        options["whitespace_pattern"] = whitespace
    if closed and schema.get("type") == "object":
        schema = {"additionalProperties": False, **schema}
    return json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


@lru_cache(maxsize=128)
def compiled(field: str, kind: str, text: str) -> str:
    """llguidance's grammar for a schema, pattern or Lark grammar that it can enforce. Raises ApiError 400."""
    if len(text) > MAX_GRAMMAR_CHARS:
        raise invalid(field, f"`{field}` is longer than the {MAX_GRAMMAR_CHARS} characters that are read.")
    try:
        from llguidance import LLMatcher, LLParserLimits
    except ImportError as error:
        raise unsupported(field, "llguidance is not installed on this worker") from error
    try:
        if kind == "json":
            grammar: str = LLMatcher.grammar_from_json_schema(text)
        elif kind == "regex":
            grammar = LLMatcher.grammar_from_regex(text)
        else:
            grammar = LLMatcher.grammar_from_lark(text)
        limits = LLParserLimits(**GRAMMAR_LIMITS)
        is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, None, limits=limits)
    except Exception as error:
        is_error, messages = True, [str(error)]
    if is_error:
        raise _refusal(field, kind, messages[0] if messages else "unknown reason")
    return grammar


def _refusal(field: str, kind: str, message: str) -> ApiError:
    what = {"json": "schema", "regex": "pattern"}.get(kind, "grammar")
    if found := _UNIMPLEMENTED.search(message):
        names = ", ".join(f"`{name}`" for name in json.loads(found[1]))
        return unsupported(field, f"the schema uses {names}, which can't be enforced here; leave it out")
    if found := _UNKNOWN_FORMAT.search(message):
        return unsupported(field, f"the schema's `format` {found[1]!r} can't be enforced here; leave it out")
    if "oneOf" in message:
        return unsupported(field, f"the schema's `oneOf` can't be enforced here ({_line(message)}); use `anyOf`")
    return invalid(field, f"The {what} in `{field}` can't be used: {_line(message)}.")


def _line(message: str) -> str:
    return re.sub(r"\s+", " ", message).strip().rstrip(".")[:400]


def _response_format(value: Json | None) -> Format | None:
    field = "response_format"
    if value is None:
        return None
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return Format(field=field, kind="json", text=schema_text(field, {"type": "object"}))
        case "json_schema":
            spec = value.get("json_schema")
            if not isinstance(spec, dict) or not isinstance(spec.get("schema"), dict):
                raise invalid(field, "`response_format.json_schema` must be an object with a `schema`.")
            return Format(field=field, kind="json", text=schema_text(field, spec["schema"]))
        case other:
            raise unsupported(field, f"its type {str(other)[:50]!r} is not text, json_object or json_schema")


def _structured(request: GenerationRequest) -> Format | None:
    field = "structured_outputs"
    if not request.structured_outputs:
        return None
    try:
        asked = msgspec.convert(request.structured_outputs, StructuredOutputs)
    except msgspec.ValidationError as error:
        raise invalid(field, f"`{field}`: {error}.") from error
    whitespace = None if asked.disable_any_whitespace else asked.whitespace_pattern or _SOME_WHITESPACE
    closed = bool(asked.disable_additional_properties)
    schema = {"type": "object"} if asked.json_object else None
    return _one_of(
        field,
        {"json": asked.json, "json_object": schema, "regex": asked.regex, "choice": asked.choice}
        | {"grammar": asked.grammar},
        whitespace,
        closed,
    )


def _guided(request: GenerationRequest) -> list[Format | None]:
    whitespace = request.guided_whitespace_pattern or _SOME_WHITESPACE
    return [
        _one_of("guided_json", {"json": request.guided_json}, whitespace),
        _one_of("guided_regex", {"regex": request.guided_regex}, whitespace),
        _one_of("guided_choice", {"choice": request.guided_choice or None}, whitespace),
        _one_of("guided_grammar", {"grammar": request.guided_grammar}, whitespace),
    ]


def _one_of(field: str, values: Json, whitespace: str | None, closed: bool = False) -> Format | None:
    given = {name: value for name, value in values.items() if value is not None and value != ""}
    if len(given) > 1:
        raise invalid(field, f"`{field}` takes one of {', '.join(values)}, not {' and '.join(given)}.")
    for name, value in given.items():
        match name:
            case "json" | "json_object":
                return Format(field=field, kind="json", text=schema_text(field, value, whitespace, closed=closed))
            case "regex":
                return Format(field=field, kind="regex", text=value)
            case "choice":
                return Format(field=field, kind="choice", text=_alternatives(field, value))
            case _:
                return Format(field=field, kind="lark", text=_as_lark(field, value))
    return None


def _alternatives(field: str, choices: list[str]) -> str:
    if not 0 < len(choices) <= MAX_CHOICES or not all(choices):
        raise invalid(field, f"`{field}` takes 1 to {MAX_CHOICES} choices, none of them empty.")
    return " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _as_lark(field: str, grammar: str) -> str:
    """A grammar in Lark's or GBNF's notation, in Lark's."""
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise invalid(field, f"`{field}` is longer than the {MAX_GRAMMAR_CHARS} characters that are read.")
    if "::=" not in grammar:
        return grammar
    try:
        from llguidance.gbnf_to_lark import any_to_lark

        lark: str = any_to_lark(grammar)
    except ImportError as error:
        raise unsupported(field, "llguidance is not installed on this worker") from error
    except Exception as error:
        raise invalid(field, f"The grammar in `{field}` can't be read: {_line(str(error))}.") from error
    return lark
