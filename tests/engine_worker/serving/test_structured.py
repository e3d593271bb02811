"""Formats of the output: what is asked for, what is refused, and with which words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine_worker.config import GRAMMAR_LIMITS
from engine_worker.contract.errors import ApiError
from engine_worker.serving.requests import CompletionRequest, convert
from engine_worker.serving.structured import wanted_format
from tests.engine_worker.serving.fake_engine import make_tokenizer

TOKENIZER = make_tokenizer()
EOS = TOKENIZER.token_to_id("<|eos|>")
LL_TOKENIZER = LLTokenizer(TOKENIZER.to_str(), eos_token=[EOS])
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}


def grammar_of(**fields: Any) -> str:
    wanted = wanted_format(convert({"model": "m", "prompt": "p", **fields}, CompletionRequest))
    return wanted.grammar() if wanted else ""


def allows(grammar: str, text: str) -> bool:
    """Whether `text` is a whole output under the grammar."""
    matcher = LLMatcher(LL_TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.consume_tokens(TOKENIZER.encode(text).ids)) and bool(matcher.is_accepting())


def json_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


ACCEPTED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"response_format": {"type": "json_object"}}, ['{"a": [1, null]}', "{}"], ["[1]", "1", '{"a"']),
    ({"response_format": json_schema(POINT)}, ['{"x": 1}', '{ "x":\n 1}'], ['{"x": 1.5}', "{}", '{"x": 1, "y": 2}']),
    ({"response_format": json_schema(POINT, strict=True)}, ['{"x":-7}'], ['{"x":}']),
    ({"guided_json": json.dumps(POINT)}, ['{"x": 1}'], ["{}"]),
    ({"guided_regex": "[a-c]{2}/\\d"}, ["ab/7"], ["ab", "abc/7"]),
    ({"guided_choice": ["yes", 'no "sir"', "é😀"]}, ["yes", 'no "sir"', "é😀"], ["no", "yes "]),
    ({"guided_grammar": 'start: "a" b\nb: /[0-9]+/'}, ["a12"], ["a", "12"]),
    ({"guided_grammar": 'root ::= "a" digits\ndigits ::= [0-9]+'}, ["a12"], ["a"]),
    ({"structured_outputs": {"json": POINT}}, ['{"x": 1}'], ["{}"]),
    ({"structured_outputs": {"json": POINT, "disable_any_whitespace": True}}, ['{"x":1}'], ['{"x": 1}']),
    ({"structured_outputs": {"json_object": True}}, ["{}"], ["1"]),
    ({"structured_outputs": {"regex": "a+"}}, ["aa"], ["b"]),
    ({"structured_outputs": {"choice": ["a", "b"]}}, ["b"], ["ab"]),
    ({"structured_outputs": {"grammar": 'start: "x"'}}, ["x"], ["y"]),
]


@pytest.mark.parametrize(("fields", "right", "wrong"), ACCEPTED, ids=str)
def test_what_a_format_allows(fields: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    grammar = grammar_of(**fields)
    assert all(allows(grammar, text) for text in right)
    assert not any(allows(grammar, text) for text in wrong)


def test_text_is_no_format() -> None:
    assert grammar_of() == grammar_of(response_format={"type": "text"}) == grammar_of(structured_outputs={}) == ""
    assert grammar_of(guided_json=None, guided_choice=[], guided_regex="") == ""


def test_blanks_come_to_an_end() -> None:
    grammar = grammar_of(response_format=json_schema(POINT))
    assert allows(grammar, '{"x":' + " " * 20 + "1}")
    assert not allows(grammar, '{"x":' + " " * 200 + "1}")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "not": ({"response_format": json_schema({"not": {"type": "string"}})}, "`not`"),
    "several": ({"response_format": json_schema({"if": {}, "then": {}})}, "`if`, `then`"),
    "deep inside": ({"response_format": json_schema({"properties": {"a": {"uniqueItems": True}}})}, "`uniqueItems`"),
    "format": ({"response_format": json_schema({"type": "string", "format": "poem"})}, "`format` 'poem'"),
    "a type": ({"response_format": json_schema({"type": "text"})}, "Invalid type"),
    "a reference": ({"response_format": json_schema({"$ref": "#/$defs/x"})}, "does not exist"),
    "a remote reference": ({"response_format": json_schema({"$ref": "http://127.0.0.1:1/x"})}, "not present"),
    "nothing fits": ({"response_format": json_schema({"allOf": [{"type": "string"}, {"type": "null"}]})}, "Unsatisf"),
    "no leniency": (
        {"response_format": json_schema({"not": {}, "x-guidance": {"lenient": True}})}, "`not`"
    ),
    "a pattern": ({"guided_regex": "[0-9"}, "unclosed"),
    "look-around": ({"guided_regex": "a(?=b)"}, "look-around"),
    "a grammar": ({"guided_grammar": "start: nowhere"}, "nowhere"),
    "gbnf": ({"guided_grammar": 'root ::= "a'}, "guided_grammar"),
    "no json": ({"guided_json": "{"}, "no JSON"),
    "no schema": ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "schema"),
    "an unknown type": ({"response_format": {"type": "xml"}}, "'xml'"),
    "an unknown field": ({"structured_outputs": {"yaml": 1}}, "yaml"),
    "two": ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    "two in one": ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "one of"),
    "an empty choice": ({"guided_choice": ["a", ""]}, "empty"),
    "large": ({"guided_regex": "a" * 300_000}, "longer than"),
    "many choices": ({"guided_choice": ["a"] * 1001}, "1000"),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError) as caught:
        grammar_of(**fields)
    error = caught.value
    assert error.status == 400
    assert words in error.message
    assert error.param in fields


BOMBS = [
    "(a{1,1000}){1,1000}", "((a|b)*c){1,5000}", "(.*a){50}", "(x+x+)+y", "[^a]{1,100000}b",
    "(a?){500}a{500}", "(((((a{9}){9}){9}){9}){9}){9}",
]  # fmt: skip


@pytest.mark.parametrize("pattern", BOMBS)
def test_a_costly_pattern_is_refused_or_bounded(pattern: str) -> None:
    """Either way the process lives, and a mask under the engine's limits comes or the matcher says that it failed."""
    try:
        grammar = grammar_of(guided_regex=pattern)
    except ApiError as error:
        assert error.status == 400  # noqa: PT017
        return
    matcher = LLMatcher(LL_TOKENIZER, grammar, log_level=0, limits=LLParserLimits(**GRAMMAR_LIMITS))
    if not matcher.is_error():
        matcher.compute_bitmask()
