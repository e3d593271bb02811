"""No body makes a translation fail in any way but a 400, and what it lets through is a chat request that parses."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_worker.contract.errors import ApiError
from gateway.observe.record import RequestRecord
from gateway.openai.parse import parse_request
from gateway.openai.sse import SseError
from gateway.translate.chat import read_answer
from gateway.translate.messages import MessagesTranslation
from gateway.translate.responses import ResponsesTranslation
from gateway.translate.store import ResponseStore

scalars = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.floats(allow_nan=False), st.text(max_size=6))
kinds = st.sampled_from(
    [
        "text",
        "image",
        "document",
        "tool_use",
        "tool_result",
        "thinking",
        "redacted_thinking",
        "input_text",
        "output_text",
        "input_image",
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "function",
        "item_reference",
        "custom",
        "auto",
        "any",
        "tool",
        "json_schema",
        "enabled",
        "allowed_tools",
        "base64",
        "url",
    ]
)
names = st.sampled_from(
    [
        "type",
        "text",
        "role",
        "content",
        "id",
        "name",
        "input",
        "source",
        "data",
        "media_type",
        "url",
        "tool_use_id",
        "call_id",
        "arguments",
        "output",
        "summary",
        "thinking",
        "input_schema",
        "schema",
        "format",
        "effort",
        "mode",
    ]
)
roles = st.sampled_from(["user", "assistant", "system"])


def one(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    likely = st.fixed_dictionaries({"type": kinds}, optional={"role": roles, "content": children, "text": children})
    return st.one_of(st.lists(children, max_size=3), st.dictionaries(names, children, max_size=4), likely)


values = st.recursive(st.one_of(scalars, kinds), one, max_leaves=12)
turns = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": roles, "content": values}),
        st.fixed_dictionaries({"type": kinds}, optional=dict.fromkeys(["role", "content", "call_id", "name"], values)),
        values,
    ),
    max_size=4,
)
FIELDS = {
    "messages": [
        "system",
        "tools",
        "tool_choice",
        "thinking",
        "output_config",
        "stop_sequences",
        "chat_template_kwargs",
    ],
    "responses": [
        "instructions",
        "tools",
        "tool_choice",
        "reasoning",
        "text",
        "include",
        "store",
        "metadata",
        "stream",
    ],
}


def translation_for(api: str) -> Any:
    return MessagesTranslation() if api == "messages" else ResponsesTranslation(ResponseStore(100_000))


@pytest.mark.parametrize("api", FIELDS)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_requests(api: str, data: st.DataObject) -> None:
    body = {"model": "m", "max_tokens": 3, ("messages" if api == "messages" else "input"): data.draw(turns)}
    body |= data.draw(st.dictionaries(st.sampled_from(FIELDS[api]), values, max_size=3))
    refused = None
    try:
        chat = translation_for(api).request(msgspec.json.encode(body))
        parse_request("chat", chat)
    except ApiError as error:
        refused = error
    assert refused is None or (refused.status == 400 and refused.message)


chat_names = st.sampled_from(
    [
        "choices",
        "delta",
        "message",
        "content",
        "tool_calls",
        "function",
        "name",
        "arguments",
        "index",
        "usage",
        "id",
        "finish_reason",
        "logprobs",
        "reasoning_content",
        "prompt_tokens",
        "completion_tokens",
        "refusal",
        "model",
    ]
)
frames = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(chat_names, inner, max_size=4)),
    max_leaves=12,
)
choices = st.fixed_dictionaries({"index": st.just(0), "delta": frames, "message": frames, "finish_reason": frames})
chunks = st.one_of(frames, st.fixed_dictionaries({"choices": st.lists(choices, max_size=2), "usage": frames}))


CALL = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{"}}


@pytest.mark.parametrize("between", ["content", "reasoning_content"])
def test_a_call_that_goes_on_behind_a_text_does_not_end_up_in_it(between: str) -> None:
    """In the Responses API, where the text would be the item that is open."""
    streamed, record = translation_for("responses"), RequestRecord(request_id="r", endpoint="r", started_at=0.0)
    streamed.request(b'{"model":"m","input":"x","stream":true}')

    def feed(**delta: Any) -> bytes:
        answer: bytes = streamed.chunk(read_answer(msgspec.json.encode({"choices": [{"delta": delta}]})), record)
        return answer

    assert b"function_call_arguments.delta" in feed(tool_calls=[CALL])
    assert b"function_call_arguments.done" in feed(**{between: "So."})
    assert feed(tool_calls=[{"index": 0, "function": {"arguments": ""}}]) == b"", "nothing that would be lost"
    with pytest.raises(SseError, match="went back"):
        feed(tool_calls=[{"index": 0, "function": {"arguments": "}"}}])


@pytest.mark.parametrize("api", FIELDS)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(chunks, min_size=1, max_size=5))
def test_answers(api: str, given_chunks: list[Any]) -> None:
    """What a replica sends is a chat answer, or the replica is said to have failed."""
    body: dict[str, Any] = {
        "model": "m",
        "max_tokens": 3,
        "messages": [{"role": "user", "content": "hi"}],
        "input": "hi",
    }
    if api == "messages":
        del body["input"]
    streamed, whole = translation_for(api), translation_for(api)
    streamed.request(msgspec.json.encode({**body, "stream": True}))
    whole.request(msgspec.json.encode(body))
    record = RequestRecord(request_id="r", endpoint=api, started_at=0.0)
    has_begun = False
    for chunk in given_chunks:
        try:
            answer = read_answer(msgspec.json.encode(chunk))
            msgspec.json.decode(whole.whole(answer))
            whole = translation_for(api)
            whole.request(msgspec.json.encode(body))
            streamed.chunk(answer, record)
            has_begun = True
        except SseError:
            continue
    if has_begun:
        assert streamed.finished().endswith(b"\n\n")
