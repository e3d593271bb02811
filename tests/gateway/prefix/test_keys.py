"""Block keys: what they depend on, bytes included, because gateways and simulators must agree on them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128_intdigest

from gateway.prefix.canonical import chat_text
from gateway.prefix.keys import (
    STRIDE_BLOCKS,
    Strides,
    block_keys,
    pack_ids,
    text_chain,
    text_root,
    token_chain,
    token_keys,
    token_root,
)
from policies.types import BlockKey

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_the_bytes_that_are_hashed() -> None:
    root = BlockKey(5)
    first = xxh3_128_intdigest((5).to_bytes(16, "little") + bytes([1, 0, 0, 0, 0, 1, 0, 0]))
    second = xxh3_128_intdigest(first.to_bytes(16, "little") + bytes([3, 0, 0, 0, 255, 255, 255, 255]))
    assert token_keys(root, [1, 256, 3, 2**32 - 1, 9], 2) == [first, second]


@given(IDS, IDS, st.integers(1, 7))
def test_equal_prefixes_and_only_they_have_equal_keys(left: list[int], right: list[int], block_size: int) -> None:
    root = token_root("m", "t")
    a = token_chain(root, pack_ids(left), block_size)
    b = token_chain(root, pack_ids(right), block_size)
    assert (len(a.keys), a.num_tokens, a.block_tokens) == (len(left) // block_size, len(left), block_size)
    for i, (key, other) in enumerate(zip(a.keys, b.keys, strict=False)):
        end = (i + 1) * block_size
        assert (key == other) == (left[:end] == right[:end])


@given(IDS, st.integers(1, 7), st.integers(0, 5))
def test_a_chain_goes_on_from_any_of_its_keys(ids: list[int], block_size: int, at: int) -> None:
    root = token_root("m", "t")
    keys = token_keys(root, ids, block_size)
    if at < len(keys):
        assert keys[at + 1 :] == token_keys(keys[at], ids[(at + 1) * block_size :], block_size)


def test_roots_differ_in_each_part_and_in_where_parts_end() -> None:
    roots = [
        token_root("m", "t"),
        token_root("m2", "t"),
        token_root("m", "t2"),
        token_root("m", "t", "adapter"),
        token_root("m", "t", "", "adapter"),
        token_root("mt", ""),
        token_root("", "mt"),
        text_root("chat", "m"),
        text_root("prompt", "m"),
        text_root("chat", "m", "", "salt"),
    ]
    assert len(set(roots)) == len(roots)


@pytest.mark.parametrize("ids", [[-1], [2**32], ["a"], [1.5], [None]])
def test_ids_that_are_none_are_no_silent_wrap(ids: list[object]) -> None:
    with pytest.raises((OverflowError, TypeError)):
        pack_ids(ids)  # type: ignore[arg-type]


def test_text_is_cut_by_bytes_and_counted_by_guess() -> None:
    chain = text_chain(text_root("prompt", "m"), b"x" * 70, 8)
    assert (len(chain.keys), chain.num_tokens, chain.block_tokens) == (2, 18, 8)
    assert list(chain.keys) == block_keys(text_root("prompt", "m"), b"x" * 64, 32)


def test_canonical_text_grows_at_its_end() -> None:
    turns = [
        {"role": "system", "content": "Help."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Look: "}, {"type": "image_url", "image_url": {"url": "a"}}],
        },
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
        {"role": "tool", "content": "42"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    for end in range(1, len(turns)):
        assert chat_text(turns, tools).startswith(chat_text(turns[:end], tools))
        assert chat_text(turns[:end], tools) != chat_text(turns[:end], None)
    assert chat_text([{"role": "user", "content": "a"}], None) == chat_text(
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}], None
    )


FIELDS = st.sampled_from(["role", "content", "type", "text", "tool_calls"])
LEAVES = st.none() | st.booleans() | st.integers(0, 9) | st.text(max_size=3)


@given(st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=3)))
def test_canonical_text_takes_any_json(value: object) -> None:
    chat_text([value], [value])  # type: ignore[list-item]


def test_stretches_known_from_before_have_the_same_keys() -> None:
    data = bytes(range(256)) * 8
    root = text_root("chat", "m")
    first = block_keys(root, data, 16)
    assert block_keys(root, data, 16) == first
    one_by_one: list[int] = []
    for start in range(0, len(data), 16):
        one_by_one += block_keys(BlockKey(one_by_one[-1]) if one_by_one else root, data[start : start + 16], 16)
    assert first == one_by_one
    assert block_keys(text_root("chat", "m", salt="s"), data, 16)[0] != first[0]


def test_known_stretches_are_bounded_and_those_in_use_stay() -> None:
    strides = Strides(max_strides=4)
    used = bytes(STRIDE_BLOCKS)
    kept = strides.keys(1, used, 0, 1)
    for number in range(40):
        strides.keys(2, number.to_bytes(STRIDE_BLOCKS, "little"), 0, 1)
        assert strides.keys(1, used, 0, 1) is kept
        strides.check_invariants()
    assert len(strides) <= 8
