"""Structured output and tool calls: what must parse, does, and what can't be enforced is refused."""

from __future__ import annotations

import json
import re
from typing import Any

from loadtest.conformance.checks import check, expect, same
from loadtest.conformance.target import Json, Target, deltas, finishes, joined

PERSON: Json = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mood": {"enum": ["good", "bad"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "mood", "tags"],
    "additionalProperties": False,
}
PLACE: Json = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}


def tool(name: str, parameters: Json = PLACE, **more: Any) -> Json:
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters, **more}}


TOOLS = [tool("get_weather"), tool("get_time")]
NAMED = {"type": "function", "function": {"name": "get_time"}}


def schema(value: Any, strict: bool = True) -> Json:
    return {"type": "json_schema", "json_schema": {"name": "thing", "strict": strict, "schema": value}}


def is_person(value: Any) -> None:
    same(set(value), {"name", "age", "mood", "tags"}, "the keys")
    expect(isinstance(value["name"], str) and len(value["name"]) <= 12, f"name is {value['name']!r}")
    expect(type(value["age"]) is int and 0 <= value["age"] <= 150, f"age is {value['age']!r}")
    expect(value["mood"] in ("good", "bad"), f"mood is {value['mood']!r}")
    expect(1 <= len(value["tags"]) <= 2 and all(type(tag) is bool for tag in value["tags"]), f"tags: {value['tags']}")


def is_place(text: Any) -> None:
    expect(isinstance(text, str), f"arguments are {type(text).__name__}, not a string")
    value = json.loads(text)
    expect(set(value) == {"city", "unit"} and value["unit"] in ("C", "F"), f"arguments are {text}")


def calls_of(answer: Json) -> list[Json]:
    message = answer["choices"][0]["message"]
    found = message.get("tool_calls")
    expect(found, f"no tool calls: {message}")
    assert isinstance(found, list)
    for call in found:
        same(call["type"], "function", "a call's type")
        expect(isinstance(call["id"], str) and call["id"], "a call without id")
        is_place(call["function"]["arguments"])
    expect(len({call["id"] for call in found}) == len(found), "calls share an id")
    return found


GROUP = "structure and tools"


@check(GROUP, "json_object gives an object")
def _(t: Target) -> None:
    text = t.chat_text("Give me JSON: {}", response_format={"type": "json_object"}, max_tokens=60)
    try:
        expect(isinstance(json.loads(text), dict), "it is no object")
    except ValueError:  # cut by the limit: what there is must still be JSON's beginning
        expect(text.lstrip().startswith("{"), f"{text[:80]!r}")


@check(GROUP, "a strict schema is kept")
def _(t: Target) -> None:
    answer = t.chat("Describe a person.", response_format=schema(PERSON), max_tokens=120)
    is_person(json.loads(answer["choices"][0]["message"]["content"]))
    same(answer["choices"][0]["finish_reason"], "stop", "finish_reason")


@check(GROUP, "a schema is kept at a high temperature")
def _(t: Target) -> None:
    is_person(json.loads(t.chat_text("Hi", response_format=schema(PERSON), max_tokens=300, temperature=1.2, seed=1)))


@check(GROUP, "a schema that is not strict is kept, too")
def _(t: Target) -> None:
    is_person(json.loads(t.chat_text("Hi", response_format=schema(PERSON, strict=False), max_tokens=120)))


@check(GROUP, "a stream under a schema joins to valid JSON")
def _(t: Target) -> None:
    is_person(json.loads(joined(t.chat_chunks("Hi", response_format=schema(PERSON), max_tokens=120))))


@check(GROUP, "n choices under a schema all keep it")
def _(t: Target) -> None:
    answer = t.chat("Hi", response_format=schema(PERSON), max_tokens=160, n=2, temperature=1, seed=5)
    for choice in answer["choices"]:
        is_person(json.loads(choice["message"]["content"]))


@check(GROUP, "schemas may refer, nest and choose")
def _(t: Target) -> None:
    node = {
        "type": "object",
        "properties": {"value": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "next": {"$ref": "#/$defs/leaf"}},
        "required": ["value", "next"],
        "additionalProperties": False,
        "$defs": {"leaf": {"type": "object", "properties": {}, "additionalProperties": False}},
    }
    value = json.loads(t.chat_text("Hi", response_format=schema(node), max_tokens=120))
    expect(value["next"] == {}, f"{value}")


@check(GROUP, "response_format text changes nothing")
def _(t: Target) -> None:
    same(t.chat_text(response_format={"type": "text"}), t.chat_text(), "the text")


def _constraint(claim: str, pattern: str, **fields: Any) -> None:
    @check(GROUP, claim)
    def _(t: Target) -> None:
        text = t.chat_text("Hi", max_tokens=40, **fields)
        expect(re.fullmatch(pattern, text), f"the text is {text!r}")
        text = t.text("Hi", max_tokens=40, **fields)
        expect(re.fullmatch(pattern, text), f"a completion's text is {text!r}")


_GRAMMAR = 'root ::= "yes" | "no"'
_constraint("structured_outputs: choice", "left|right", structured_outputs={"choice": ["left", "right"]})
_constraint("structured_outputs: regex", "[a-f]{3}-[0-9]{2}", structured_outputs={"regex": "[a-f]{3}-[0-9]{2}"})
_constraint("structured_outputs: json", r"\{\s*\}", structured_outputs={"json": {
    "type": "object", "properties": {}, "additionalProperties": False}})  # fmt: skip
_constraint("structured_outputs: grammar", "yes|no", structured_outputs={"grammar": _GRAMMAR})
_constraint("guided_choice, as older clients of vLLM send it", "left|right", guided_choice=["left", "right"])
_constraint("guided_regex, as older clients of vLLM send it", "[0-9]{3}", guided_regex="[0-9]{3}")


def _refused(claim: str, **fields: Any) -> None:
    @check(GROUP, claim)
    def _(t: Target) -> None:
        t.refused("/v1/chat/completions", t.chat_body(**fields))
        t.refused("/v1/chat/completions", t.chat_body(stream=True, **fields))
        t.chat(max_tokens=1)  # the engine is still there


_refused("refused: a schema that is none", response_format=schema({"type": "no-such-type"}))
_refused("refused: a schema with a wrong keyword value", response_format=schema({"type": "object", "required": 7}))
_refused("refused: a schema with a bad pattern", response_format=schema({"type": "string", "pattern": "(("}))
_refused("refused: a reference to nowhere", response_format=schema({"$ref": "#/$defs/none"}))
_refused("refused: json_schema without a schema", response_format={"type": "json_schema"})
_refused("refused: an unknown response_format", response_format={"type": "yaml"})
_refused("refused: response_format as a string", response_format="json")
_refused("refused: a bad regular expression", structured_outputs={"regex": "(["})
_refused("refused: a bad grammar", structured_outputs={"grammar": "root ::= ("})
_refused("refused: a choice of nothing", structured_outputs={"choice": []})
_refused("refused: two constraints at once", structured_outputs={"choice": ["a"], "regex": "a"})
_refused("refused: a forced call without tools", tool_choice="required")
_refused("refused: a named call without tools", tool_choice=NAMED)
_refused("refused: a call to a tool that is not there", tools=TOOLS[:1], tool_choice=NAMED)
_refused("refused: an unknown tool_choice", tools=TOOLS, tool_choice="sometimes")
_refused("refused: a tool without a name", tools=[{"type": "function", "function": {}}])
_refused("refused: a tool without a function", tools=[{"type": "function"}])
_refused("refused: tools that are no list", tools={"get": "weather"})
_refused("refused: a forced tool with a bad schema", tools=[tool("f", {"type": "nope"})], tool_choice="required")


@check(GROUP, "tool_choice auto answers with text or calls, and says which")
def _(t: Target) -> None:
    choice = t.chat("Hello", tools=TOOLS, tool_choice="auto")["choices"][0]
    has_calls = bool(choice["message"].get("tool_calls"))
    same(choice["finish_reason"] == "tool_calls", has_calls, "finish_reason tool_calls")
    expect(has_calls or isinstance(choice["message"]["content"], str), "neither text nor calls")


@check(GROUP, "tool_choice none gives text")
def _(t: Target) -> None:
    choice = t.chat("What's the weather?", tools=TOOLS, tool_choice="none")["choices"][0]
    expect(not choice["message"].get("tool_calls") and choice["message"]["content"] is not None, f"{choice}")


@check(GROUP, "tool_choice required gives calls that fit a schema, finish_reason tool_calls, content null or text")
def _(t: Target) -> None:
    answer = t.chat("Weather in Paris?", tools=TOOLS, tool_choice="required", max_tokens=300)
    for call in calls_of(answer):
        expect(call["function"]["name"] in ("get_weather", "get_time"), f"the call is {call}")
    same(answer["choices"][0]["finish_reason"], "tool_calls", "finish_reason")
    expect("content" in answer["choices"][0]["message"], "content is missing")


@check(GROUP, "a named tool is called, once")
def _(t: Target) -> None:
    answer = t.chat("Time in Paris?", tools=TOOLS, tool_choice=NAMED, max_tokens=120)
    same([call["function"]["name"] for call in calls_of(answer)], ["get_time"], "the calls")
    expect(answer["choices"][0]["finish_reason"] in ("tool_calls", "stop"), "finish_reason")


@check(GROUP, "parallel_tool_calls false gives one call")
def _(t: Target) -> None:
    answer = t.chat("Weather?", tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=120)
    same(len(calls_of(answer)), 1, "the number of calls")


@check(GROUP, "strict tools keep their schema")
def _(t: Target) -> None:
    tools = [tool("get_weather", PLACE, strict=True)]
    calls_of(t.chat("Weather?", tools=tools, tool_choice="required", parallel_tool_calls=False, max_tokens=120))


def _streamed(claim: str, choice: Any) -> None:
    @check(GROUP, claim)
    def _(t: Target) -> None:
        chunks = t.chat_chunks("Weather in Paris?", tools=TOOLS, tool_choice=choice, max_tokens=300)
        arguments: dict[int, str] = {}
        for delta in deltas(chunks):
            for part in delta.get("tool_calls", []):
                expect(type(part["index"]) is int, "index is no integer")
                expect(all(value is not None for value in part.values()), f"a key that is null: {part}")
                expect(all(value is not None for value in part["function"].values()), f"a key that is null: {part}")
                if part["index"] not in arguments:
                    expect(part["id"] and part["function"]["name"], f"the first delta is {part}")
                    same(part.get("type"), "function", "type")
                    arguments[part["index"]] = ""
                else:
                    expect("id" not in part and "name" not in part["function"], f"id or name again: {part}")
                arguments[part["index"]] += part["function"].get("arguments", "")
        same(sorted(arguments), list(range(len(arguments))), "the calls' indices")
        expect(arguments, "no call")
        for text in arguments.values():
            is_place(text)
        same(len(finishes(chunks)), 1, "the number of finish_reasons")
        if choice == "required":
            same(finishes(chunks), ["tool_calls"], "finish_reason")


_streamed("a streamed call has id, type and name once, and arguments that join to JSON", "required")
_streamed("a streamed call to a named tool has the same shape", NAMED)


@check(GROUP, "the answer to a tool's result may follow, with arguments that are no JSON")
def _(t: Target) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": "{not json"}}
    t.chat(
        tools=TOOLS,
        messages=[
            {"role": "user", "content": "Time?"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "noon"}]},
        ],
    )


@check(GROUP, "tools with unusual but valid schemas are taken")
def _(t: Target) -> None:
    t.chat("Hi", tools=[tool("no_parameters", {}), {"type": "function", "function": {"name": "bare"}}])
