"""Valid requests with something wrong in them, in their values or in their bytes."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz import answers
from tests.fuzz.conftest import HANG_GUARD_S, Pair, effort

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "fake",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ],
        "max_tokens": 3,
        "temperature": 0.5,
        "n": 2,
        "stop": ["x"],
        "seed": 1,
        "logprobs": True,
        "top_logprobs": 2,
        "logit_bias": {"5": 1.5},
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [TOOL],
        "tool_choice": "auto",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        "chat_template_kwargs": {"a": 1},
        "cache_salt": "s",
    },
    "/v1/completions": {
        "model": "fake",
        "prompt": ["a", "b"],
        "max_tokens": 3,
        "echo": True,
        "logprobs": 2,
        "best_of": 1,
        "stop_token_ids": [3],
        "min_tokens": 1,
        "bad_words": ["a"],
        "structured_outputs": {"regex": "[a-z]+"},
    },
    "/v1/embeddings": {"model": "fake", "input": ["a"], "dimensions": 3, "encoding_format": "float"},
    "/tokenize": {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]},
    "/detokenize": {"model": "fake", "tokens": [1, 2]},
    "/v1/responses": {
        "model": "fake",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "1"},
        ],
        "instructions": "i",
        "max_output_tokens": 3,
        "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "stream": True,
        "store": True,
        "metadata": {"a": "b"},
    },
    "/v1/messages": {
        "model": "fake",
        "max_tokens": 3,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "1"}]},
        ],
        "stop_sequences": ["x"],
        "tools": [{"name": "f", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "disabled"},
        "stream": True,
    },
    "/v1/messages/count_tokens": {"model": "fake", "messages": [{"role": "user", "content": "hi"}]},
}
JUNK: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**40, 0.5, -0.0, 1e308, "", "x", [], {}]),
    st.sampled_from(
        ["\ud800", "\x00", "\u2028", "é" * 300, "none", "auto", "required", "<|im_end|>", "${jndi}", "1e5"]
    ),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
        max_leaves=8,
    ),
)
FRAGMENTS = [
    b"NaN",
    b"1e999",
    b"-",
    b"\xff",
    b"\\ud800",
    b"\xef\xbb\xbf",
    b"[[[[",
    b'{"a":',
    b"}",
    b",",
    b'"',
    b"\x00",
    b" ",
]


def paths_of(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where everything in a body stands."""
    found = [here] if here else []
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        found += paths_of(child, (*here, key))
    return found


@st.composite
def wrong_bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """A path and a body: a valid one, one to three values of it replaced or left out, and perhaps its bytes hurt."""
    path = draw(st.sampled_from(sorted(VALID)))
    body = json.loads(json.dumps(VALID[path]))
    for _ in range(draw(st.integers(0, 3))):
        where = draw(st.sampled_from(paths_of(body) or [()]))
        if not where:
            break
        holder = body
        for key in where[:-1]:
            holder = holder[key]
        if draw(st.booleans()):
            holder[where[-1]] = draw(JUNK)
        else:
            del holder[where[-1]]
    data = json.dumps(body, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.sampled_from(FRAGMENTS)) + data[at + draw(st.integers(0, 4)) :]
    return path, data


@effort(150)
@given(case=wrong_bodies())
def test_the_gateway_answers_every_body(pair: Pair, case: tuple[str, bytes]) -> None:
    path, body = case
    answers.check(path, *answers.post(pair.gateway_port, path, body, HANG_GUARD_S))


WORKER_PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")


@effort(100)
@given(case=wrong_bodies().filter(lambda case: case[0] in WORKER_PATHS))
def test_the_worker_answers_every_body(pair: Pair, case: tuple[str, bytes]) -> None:
    path, body = case
    answers.check(path, *answers.post(pair.worker.port, path, body, HANG_GUARD_S))


@effort(60)
@given(path=st.sampled_from(sorted(VALID)), body=st.binary(max_size=60))
def test_the_gateway_answers_random_bytes(pair: Pair, path: str, body: bytes) -> None:
    answers.check(path, *answers.post(pair.gateway_port, path, body, HANG_GUARD_S))
