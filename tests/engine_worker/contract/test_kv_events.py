"""The wire format of KV events, against bytes built by hand as the engines in the field build them."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.contract import kv_events as wire

HASH = bytes(range(32))


def stored(**changes: object) -> wire.BlockStored:
    fields: dict[str, object] = {
        "block_hashes": (HASH, 7),
        "parent_block_hash": None,
        "token_ids": (1, 2, 3, 4),
        "block_size": 2,
    }
    return wire.BlockStored(**{**fields, **changes})  # type: ignore[arg-type]


EVENTS = (
    stored(extra_keys=(("salt",), None), medium="GPU"),
    stored(parent_block_hash=HASH, lora_id=3, lora_name="a", group_idx=1, kv_cache_spec_kind="full_attention"),
    wire.BlockRemoved(block_hashes=(HASH, 2**63), medium="GPU"),
    wire.AllBlocksCleared(),
)


def test_what_we_write_we_read() -> None:
    batch = wire.decode_batch(wire.encode_batch(12.5, EVENTS, 0))
    assert batch == wire.EventBatch(timestamp=12.5, events=EVENTS, data_parallel_rank=0)


def test_events_are_maps_with_a_type_in_an_array_batch() -> None:
    timestamp, events, rank = msgspec.msgpack.decode(wire.encode_batch(1.0, EVENTS[:1] + EVENTS[3:]))
    assert (timestamp, rank) == (1.0, None)
    assert events == [
        {
            "type": "BlockStored",
            "block_hashes": [HASH, 7],
            "parent_block_hash": None,
            "token_ids": [1, 2, 3, 4],
            "block_size": 2,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [["salt"], None],
        },
        {"type": "AllBlocksCleared"},
    ]


def test_reads_tagged_arrays_whatever_their_age() -> None:
    payload = msgspec.msgpack.encode(
        [
            1,
            [
                ["BlockStored", [11, 12], None, [1, 2, 3, 4], 2, None],
                [
                    "BlockStored",
                    [13],
                    12,
                    [5, 6],
                    2,
                    1,
                    "CPU",
                    "ada",
                    [["ada", "salt"]],
                    2,
                    "full_attention",
                    None,
                    "new",
                ],
                ["BlockRemoved", [13], "CPU", 2, "later field"],
                ["BlockRemoved", [11]],
                ["AllBlocksCleared"],
            ],
        ]
    )
    assert wire.decode_batch(payload).events == (
        stored(block_hashes=(11, 12)),
        wire.BlockStored(
            block_hashes=(13,),
            parent_block_hash=12,
            token_ids=(5, 6),
            block_size=2,
            lora_id=1,
            medium="CPU",
            lora_name="ada",
            extra_keys=(("ada", "salt"),),
            group_idx=2,
            kv_cache_spec_kind="full_attention",
        ),
        wire.BlockRemoved(block_hashes=(13,), medium="CPU", group_idx=2),
        wire.BlockRemoved(block_hashes=(11,)),
        wire.AllBlocksCleared(),
    )


def test_reads_maps_throughout_and_skips_what_it_does_not_know() -> None:
    payload = msgspec.msgpack.encode(
        {
            "ts": 3.0,
            "future": {"x": 1},
            "events": [
                {"type": "BlockRemoved", "block_hashes": [HASH], "medium": None, "locality": "LOCAL"},
                {"type": "BlockMoved", "block_hashes": [HASH]},
                ["BlockMoved", [1]],
            ],
            "data_parallel_rank": 1,
        }
    )
    batch = wire.decode_batch(payload)
    assert batch.events == (wire.BlockRemoved(block_hashes=(HASH,)),)
    assert (batch.num_unknown, batch.data_parallel_rank) == (2, 1)


@pytest.mark.parametrize(
    "raw",
    [
        7,
        [],
        [1.0],
        ["when", []],
        [1.0, {}],
        {"ts": 1.0},
        [1.0, [7]],
        [1.0, [[]]],
        [1.0, [{"type": "BlockStored"}]],
        [1.0, [["BlockStored", "hash", None, [], 2]]],
        [1.0, [["BlockStored", [1], None, [1, 2, 3], 2]]],
        [1.0, [["BlockStored", [], None, [], 0]]],
        [1.0, [["BlockStored", [1], None, [1, -2], 2]]],
        [1.0, [["BlockStored", [1], None, [1, 2**40], 2]]],
        [1.0, [["BlockStored", [1], None, [1, 2], 2, None, None, None, [None, None]]]],
        [1.0, [["BlockRemoved", [1.5]]]],
    ],
)
def test_what_is_no_batch_is_refused(raw: object) -> None:
    with pytest.raises(wire.WireError):
        wire.decode_batch(msgspec.msgpack.encode(raw))


@given(st.binary(max_size=200))
def test_bytes_of_any_kind_are_read_or_refused(payload: bytes) -> None:
    with contextlib.suppress(wire.WireError):
        wire.decode_batch(payload)


LEAVES = st.none() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5) | st.binary(max_size=5)
KEYS = st.sampled_from(["type", "ts", "events", "block_hashes", "x"])


@given(st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(KEYS, inner, max_size=4)))
def test_msgpack_of_any_shape_is_read_or_refused(raw: object) -> None:
    with contextlib.suppress(wire.WireError):
        wire.decode_batch(msgspec.msgpack.encode(raw))


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(wire.WireError):
        wire.decode_batch(b"\x91" * 100_000)


def test_sequence_numbers_come_last_but_one_whatever_stands_before_them() -> None:
    sequence = wire.encode_sequence(258)
    assert sequence == b"\0\0\0\0\0\0\x01\x02"
    for before in ([], [b""], [b"", b"topic"]):
        assert wire.decode_frames([*before, sequence, b"x"]) == (258, b"x")
    assert wire.decode_frames([b"", wire.END_OF_REPLAY, b""]) == (-1, b"")
    with pytest.raises(wire.WireError):
        wire.decode_frames([b"short", b"x"])
    with pytest.raises(wire.WireError):
        wire.decode_frames([b"x"])
