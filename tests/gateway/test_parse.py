"""Bytes to ParsedRequest: what is read, what passes unread, what is refused so that no two parsers can disagree."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.contract.errors import ApiError
from gateway.openai.parse import decode_object, parse_request

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def chat(**fields):
    return parse_request("chat", json.dumps({**CHAT, **fields}).encode())


def refused(endpoint, body) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_request(endpoint, body)
    assert caught.value.status == 400
    return caught.value


def test_routing_fields_of_a_chat():
    parsed = chat(
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=5,
        n=3,
        prompt_cache_key="s1",
        cache_salt="pepper",
        tools=[{"type": "function"}],
        chat_template_kwargs={"enable_thinking": False},
        reasoning_effort="low",
    )
    assert (parsed.model, parsed.stream, parsed.adds_usage) == ("m", True, False)
    assert (parsed.max_output_tokens, parsed.num_choices, parsed.session) == (5, 3, "s1")
    source = parsed.source
    assert source.messages == CHAT["messages"]
    assert source.tools == [{"type": "function"}]
    assert source.salt == "pepper"
    assert source.chat_template_kwargs == {"enable_thinking": False}
    assert source.reasoning_effort == "low"


def test_the_newer_token_limit_wins_and_empty_tools_count_as_absent():
    parsed = chat(max_tokens=5, max_completion_tokens=9, tools=[])
    assert parsed.max_output_tokens == 9
    assert parsed.source.tools is None


def test_unknown_fields_and_nulls_pass():
    parsed = chat(stream=None, n=None, tools=None, stream_options=None, logit_bias={"1": 2}, future={"a": [None]})
    assert parsed.stream is False
    assert parsed.num_choices == 1


@pytest.mark.parametrize(
    ("prompt", "num_choices"), [("x", 2), (["a", "b"], 4), ([1, 2, 3], 2), ([[1], [2, 3]], 4), (["a"], 2)]
)
def test_the_four_shapes_of_a_prompt(prompt, num_choices):
    parsed = parse_request("completions", json.dumps({"model": "m", "prompt": prompt, "n": 2}).encode())
    assert parsed.source.prompt == prompt
    assert parsed.num_choices == num_choices


@pytest.mark.parametrize("prompt", [[], [1, "a"], [[1], "a"], [True], [[1.5]], [{}]])
def test_other_shapes_of_a_prompt_are_refused(prompt):
    assert refused("completions", json.dumps({"model": "m", "prompt": prompt}).encode()).param == "prompt"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": ""}, "model"),
        ({"model": 3}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_a_wrong_value_names_its_parameter(fields, param):
    assert refused("chat", json.dumps({**CHAT, **fields}).encode()).param.startswith(param)


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_a_missing_parameter_is_named(missing):
    error = refused("chat", json.dumps({key: value for key, value in CHAT.items() if key != missing}).encode())
    assert error.param == missing
    assert missing in error.message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{} {}",
        b'{"model":"m"',
        b"\xff\xfe",
        b'{"model":"\xff"}',
        b'{"model":"m","x":"\\ud800"}',
        b'{"model":"m","x":"\\udc00"}',
        b'{"model":"m","x":NaN}',
        b'{"model":"m","x":-Infinity}',
        b'{"model":"m","x":1e999}',
        b'{"model":"m","x":' + b"9" * 5000 + b"}",
        b'{"x":' * 100_000 + b"1" + b"}" * 100_000,
        b"[" * 100_000,
    ],
)
def test_what_parsers_could_read_differently_is_refused(body):
    refused("chat", body)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b'{"model": "m", "prompt": "\\ud800"}', "half of a surrogate pair"),
        (b'{"model": "m", "x": {"y": "\\uDFFF"}, "prompt": "a"}', "surrogate"),
        (b'{"model": {"a": 1}', "truncated"),
    ],
)
def test_what_is_no_json_hears_why(body, reason):
    assert reason in refused("completions", body).message


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":1,"a":1}',
        b'{"a":12,"a":1}',
        b'{"a":1,"b":2,"a":3}',
        b' { "a" : 1 , "b" : [ 1 ] , "b" : [ 1 ] } ',
        b'{"\\u0061":1,"a":2}',
        b'{"a":"x,y","a":"x"}',
    ],
)
def test_a_key_given_twice_is_refused(body):
    with pytest.raises(ApiError, match="twice"):
        decode_object(body)


numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False, width=32)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
keys = st.text(alphabet='ab\\"{}:, \u00e9\n', max_size=4)


@given(st.lists(st.tuples(keys, values), max_size=5), st.sampled_from([None, 2]), st.booleans())
def test_exactly_the_objects_with_unique_keys_pass(pairs, indent, ascii_only):
    """Against the standard library's pairs, over spacing, escapes and keys that look like syntax."""
    fields = [
        f"{json.dumps(key, ensure_ascii=ascii_only)} : {json.dumps(value, indent=indent, ensure_ascii=ascii_only)}"
        for key, value in pairs
    ]
    body = ("{" + " ,\n".join(fields) + "}").encode()
    if len({key for key, _ in pairs}) == len(pairs):
        assert decode_object(body) == json.loads(body)
    else:
        with pytest.raises(ApiError, match="twice"):
            decode_object(body)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ("", '{"cache_salt":"theirs+",'),
        ('"cache_salt":"mine",', '{"cache_salt":"theirs+mine",'),
        ('"cache_salt":null,', '{"cache_salt":"theirs+",'),
        ('"cache\\u005fsalt":"mine",', '{"cache\\u005fsalt":"theirs+mine",'),
    ],
)
def test_a_salt_stands_in_for_the_clients_or_in_front(own: str, expected: str):
    rest = '"model":"m","messages":[{"role":"user","content":"what is \\"cache_salt\\"?"}]}'
    parsed = parse_request("chat", ("{" + own + rest).encode(), lambda mine: f"theirs+{mine}")
    assert parsed.body.decode() == expected + rest
    assert parsed.unsalted is not None
    assert parsed.unsalted.decode() == "{" + own + rest
    assert parsed.source is not None
    assert parsed.source.salt == "theirs+" + ("mine" if "mine" in own else "")
