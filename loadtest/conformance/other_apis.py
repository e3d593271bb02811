"""OpenAI's Responses and Anthropic's Messages on the same server."""

from __future__ import annotations

import json
from typing import Any

from loadtest.conformance.checks import check, expect, same
from loadtest.conformance.target import Json, Target, error_of


def named_events(text: str) -> list[Json]:
    """Events of the form `event: NAME`, `data: {... "type": NAME}`."""
    frames = text.split("\n\n")
    same(frames.pop(), "", "what comes behind the last frame")
    found = []
    for frame in frames:
        if frame.startswith(":") or frame == "data: [DONE]":
            continue
        name, _, data = frame.partition("\n")
        value = json.loads(data.removeprefix("data: "))
        same(value["type"], name.removeprefix("event: "), "the data's type")
        found.append(value)
    return found


def responses(t: Target, **fields: Any) -> Json:
    return {"model": t.model, "input": "Say hello.", "max_output_tokens": 12, "temperature": 0, **fields}


def messages(t: Target, **fields: Any) -> Json:
    said = [{"role": "user", "content": "Say hello to the world."}]
    return {"model": t.model, "messages": said, "max_tokens": 12, "temperature": 0, **fields}


@check("surface", "Responses: an answer with output and usage")
def _(t: Target) -> None:
    answer = t.ok("/v1/responses", responses(t))
    same(answer["object"], "response", "object")
    expect(answer["status"] in ("completed", "incomplete"), f"status is {answer['status']}")
    texts = [p["text"] for item in answer["output"] if item["type"] == "message" for p in item["content"]]
    expect(texts and texts[0], "no text")
    usage = answer["usage"]
    same(usage["total_tokens"], usage["input_tokens"] + usage["output_tokens"], "total_tokens")
    expect(type(usage["input_tokens_details"]["cached_tokens"]) is int, "no cached_tokens")


@check("surface", "Responses: a stream in the documented order, numbered without a gap")
def _(t: Target) -> None:
    events = named_events(t.post("/v1/responses", responses(t, stream=True)).text)
    kinds = [event["type"] for event in events]
    same(kinds[:2], ["response.created", "response.in_progress"], "the beginning")
    expect(kinds[-1] in ("response.completed", "response.incomplete"), f"the end is {kinds[-1]}")
    same([event["sequence_number"] for event in events], list(range(len(events))), "the sequence numbers")
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    done = [event["text"] for event in events if event["type"] == "response.output_text.done"]
    same(done, [text], "the text of the deltas and that of the end")


_FLIP = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"], "additionalProperties": False}


@check("surface", "Responses: a function call")
def _(t: Target) -> None:
    tools = [{"type": "function", "name": "flip", "parameters": _FLIP, "strict": True}]
    answer = t.ok("/v1/responses", responses(t, tools=tools, tool_choice="required", max_output_tokens=200))
    [call] = [item for item in answer["output"] if item["type"] == "function_call"][:1]
    same(call["name"], "flip", "the name")
    expect(type(json.loads(call["arguments"])["x"]) is bool and call["call_id"], f"{call}")


@check("surface", "Responses: structured text")
def _(t: Target) -> None:
    wanted = {"format": {"type": "json_schema", "name": "thing", "schema": _FLIP, "strict": True}}
    answer = t.ok("/v1/responses", responses(t, text=wanted, max_output_tokens=60))
    text = next(item for item in answer["output"] if item["type"] == "message")["content"][0]["text"]
    same(set(json.loads(text)), {"x"}, "the keys")


@check("surface", "Responses: what is wrong is refused in OpenAI's shape")
def _(t: Target) -> None:
    for fields in ({"input": None}, {"input": []}, {"temperature": "hot"}, {"max_output_tokens": 0}):
        t.refused("/v1/responses", responses(t, **fields))
    t.refused("/v1/responses", responses(t, previous_response_id="resp_none"), (400, 404))
    t.refused("/v1/responses", responses(t, model="no-such-model"), (404,))


@check("surface", "Messages: an answer with content, stop_reason and usage")
def _(t: Target) -> None:
    answer = t.ok("/v1/messages", messages(t))
    same((answer["type"], answer["role"]), ("message", "assistant"), "type and role")
    expect(answer["content"][0]["type"] == "text" and answer["content"][0]["text"], "no text")
    expect(answer["stop_reason"] in ("end_turn", "max_tokens"), f"stop_reason is {answer['stop_reason']}")
    expect(type(answer["usage"]["input_tokens"]) is int and type(answer["usage"]["output_tokens"]) is int, "usage")


@check("surface", "Messages: a stop sequence is named")
def _(t: Target) -> None:
    text = t.ok("/v1/messages", messages(t))["content"][0]["text"]
    mark = text[6:9]
    answer = t.ok("/v1/messages", messages(t, stop_sequences=["\u2603", mark]))
    same((answer["stop_reason"], answer["stop_sequence"]), ("stop_sequence", mark), "stop_reason and stop_sequence")
    events = named_events(t.post("/v1/messages", messages(t, stop_sequences=[mark], stream=True)).text)
    delta = next(event["delta"] for event in events if event["type"] == "message_delta")
    same((delta["stop_reason"], delta["stop_sequence"]), ("stop_sequence", mark), "those of a stream")


@check("surface", "Messages: a stream in the documented order")
def _(t: Target) -> None:
    events = named_events(t.post("/v1/messages", messages(t, stream=True)).text)
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    same(kinds[:2], ["message_start", "content_block_start"], "the beginning")
    same(kinds[-3:], ["content_block_stop", "message_delta", "message_stop"], "the end")


@check("surface", "Messages: count_tokens counts what usage counts")
def _(t: Target) -> None:
    body = messages(t)
    usage = t.ok("/v1/messages", body)["usage"]
    counted = t.ok("/v1/messages/count_tokens", {"model": body["model"], "messages": body["messages"]})
    cached = usage.get("cache_read_input_tokens") or 0
    same(counted["input_tokens"], usage["input_tokens"] + cached, "input_tokens")


@check("surface", "Messages: x-api-key, system prompts and tool results are taken")
def _(t: Target) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "flip", "input": {"x": True}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "ok"}]}
    body = messages(
        t,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        tools=[{"name": "flip", "input_schema": {"type": "object", "properties": {"x": {"type": "boolean"}}}}],
        messages=[
            {"role": "user", "content": "Flip."},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ],
    )
    t.ok("/v1/messages", body, {"x-api-key": t.api_key, "anthropic-version": "2023-06-01"})


@check("surface", "Messages: errors have Anthropic's shape")
def _(t: Target) -> None:
    for fields, status in (({"max_tokens": 0}, 400), ({"messages": []}, 400), ({"model": "no-such-model"}, 404)):
        answer = t.post("/v1/messages", messages(t, **fields))
        same(answer.status_code, status, "the status")
        value = answer.json()
        expect(value.get("type") == "error" and {"type", "message"} <= value["error"].keys(), answer.text[:120])


@check("surface", "Responses: another method is 405")
def _(t: Target) -> None:
    error_of(t.http.get("/v1/responses"), (405,))
