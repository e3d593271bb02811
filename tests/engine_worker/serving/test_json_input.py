"""Whatever two JSON parsers could read differently is refused with a sentence, and nothing crashes."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_worker.contract.errors import ApiError
from engine_worker.serving.json_input import MAX_DEPTH, parse_object

REFUSED = {
    "not JSON": b"{",
    "empty": b"",
    "no object": b"[1]",
    "trailing text": b'{"a": 1} x',
    "NaN": b'{"a": NaN}',
    "Infinity": b'{"a": -Infinity}',
    "a float beyond all floats": b'{"a": 1e999}',
    "a huge integer": b'{"a": ' + b"9" * 5000 + b"}",
    "invalid UTF-8": b'{"a": "\xff"}',
    "an encoded surrogate": b'{"a": "\xed\xa0\x80"}',
    "a byte order mark": b"\xef\xbb\xbf{}",
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "a lone surrogate": b'{"a": ["\\ud83d"]}',
    "a lone surrogate as a key": b'{"a": {"\\udc00": 1}}',
    "surrogates in the wrong order": b'{"a": "\\ude00\\ud83d"}',
    "a duplicate key": b'{"a": 1, "a": 2}',
    "a duplicate key, written differently": b'{"a": 1, "\\u0061": 2}',
    "a duplicate key inside": b'{"a": [{"b": 1, "b": 1}]}',
    "nested too deep": b'{"a": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}",
    "nested beyond recursion": b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "deep objects": b'{"a": ' * 100_000 + b"1" + b"}" * 100_000,
    "an unescaped control character": b'{"a": "\x00"}',
}


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED.keys())
def test_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_object(body)
    assert caught.value.status == 400
    assert caught.value.message.startswith("The request body can't be read as JSON: ")
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b"{}", {}),
        (b' {"a": "\\ud83d\\ude00"} ', {"a": "😀"}),
        ('{"a": "😀"}'.encode(), {"a": "😀"}),
        (b'{"b": 1, "a": {"b": 1}}', {"b": 1, "a": {"b": 1}}),
        (b'{"a": 12345678901234567890123}', {"a": 12345678901234567890123}),
        (b'{"a": ' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}", None),
    ],
)
def test_accepted(body: bytes, value: object) -> None:
    assert parse_object(body) == (json.loads(body) if value is None else value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=50)
@given(st.dictionaries(st.text(), json_values), st.booleans())
def test_reads_what_json_writes(value: dict[str, object], ascii_only: bool) -> None:
    assert parse_object(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@given(st.binary(max_size=200) | st.text().map(str.encode))
def test_never_fails_in_another_way(body: bytes) -> None:
    with contextlib.suppress(ApiError):
        assert isinstance(parse_object(body), dict)
