"""Reading traces: what each format's lines become, and what is said of bad ones."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from loadtest.sim.trace import BadTrace, parse_trace, read_trace
from tests.loadtest.sim.traces import mooncake_rows, own_rows, session_rows, write


def lines(*rows: dict[str, object]) -> list[str]:
    return [json.dumps(row) for row in rows]


def test_mooncake() -> None:
    trace = parse_trace(
        lines(
            {"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]},
            {"timestamp": 3000, "input_length": 1024, "output_length": 0, "hash_ids": [0, 3]},
            {"timestamp": 12000, "input_length": 7, "output_length": 2, "hash_ids": [4]},
        ),
        "t",
    )
    first, second, third = trace.requests()
    assert (trace.format, trace.block_tokens, trace.timed, trace.num_requests) == ("mooncake", 512, True, 3)
    assert first.block_ids == (0, 1), "the third block is partial"
    assert second.block_ids == (0, 3)
    assert third.block_ids == ()
    assert (first.at_s, second.at_s, third.at_s) == (0.0, 3.0, 12.0)
    assert (first.tick_s, second.tick_s) == (3.0, 6.0), "a gap in the trace doesn't spread its tick over the gap"
    assert second.num_output_tokens == 1, "an answer has one token at least"


def test_claude_code_sessions() -> None:
    rows = {
        "session": "a",
        "parent": None,
        "requests": [
            {"t": 0.0, "think": None, "api": 1.0, "in": 1100, "out": 3, "ids": [[0, 1]]},
            {"t": 9.0, "think": 4.0, "api": 1.0, "in": 2047, "out": 3, "ids": [[0, 1], [7, 8]]},
        ],
    }
    trace = parse_trace(lines(rows), "t")
    [[first, second]] = trace.sessions
    assert not trace.timed
    assert (first.session, first.block_ids, first.think_s) == ("a", (0, 1), 0.0)
    assert (second.block_ids, second.think_s) == ((0, 1, 7), 4.0)


def test_a_trace_of_ones_own() -> None:
    rows = [
        {"timestamp": 2.0, "prompt_ids": [1, 2, 3, 4, 5], "num_output_tokens": 3, "block_tokens": 2, "session": "x"},
        {"timestamp": 1.0, "prompt_ids": [1, 2, 9, 9], "num_output_tokens": 3, "session": "x"},
        {"timestamp": 3.0, "block_ids": [70, 71, 72], "num_prompt_tokens": 5, "num_output_tokens": 1},
    ]
    trace = parse_trace(lines(*rows), "t")
    early, late, ids = trace.requests()
    assert (trace.format, trace.block_tokens) == ("own", 2)
    assert early.at_s == 1.0
    assert early.block_ids[0] == late.block_ids[0], "the same tokens are the same block"
    assert early.block_ids[1] != late.block_ids[1]
    assert len(late.block_ids) == 2
    assert ids.block_ids == (70, 71)
    assert [len(session) for session in trace.sessions] == [2, 1]


def test_formats_are_detected_in_files(tmp_path: Path) -> None:
    for rows, kind in ((mooncake_rows(5), "mooncake"), (session_rows(2), "claude_code"), (own_rows(3), "own")):
        path = write(tmp_path / f"{kind}.jsonl", rows)
        assert read_trace(path).format == kind
        zipped = path.with_suffix(".gz")
        zipped.write_bytes(gzip.compress(path.read_bytes()))
        assert read_trace(zipped).sessions == read_trace(path).sessions


@pytest.mark.parametrize("limit", [1, 3, 4])
def test_a_limit_counts_requests(tmp_path: Path, limit: int) -> None:
    for rows in (mooncake_rows(8), session_rows(4), own_rows(8)):
        assert read_trace(write(tmp_path / "t.jsonl", rows), limit).num_requests == limit


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no requests"),
        ("nonsense", "line 1 is no JSON"),
        ("[1]", "no JSON object"),
        ('{"prompt": "hi"}', "fits no known format"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}', "a prompt of 0 tokens"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": 3}', "'hash_ids' has to be a list"),
        ('{"timestamp": "0", "input_length": 9, "output_length": 1, "hash_ids": []}', "'timestamp' is '0'"),
        ('{"session": "a", "requests": [{"in": 5}]}', "line 1 is not as format claude_code has it: 'out' is missing"),
        ('{"session": "a", "requests": []}', "no requests"),
        ('{"session": "a", "requests": [3]}', "a list of objects"),
        ('{"session": "a", "requests": [{"in": 9, "out": 1, "ids": [[5, 1]]}]}', "no range"),
        ('{"timestamp": NaN, "prompt_ids": [1], "num_output_tokens": 1}', "'timestamp' is nan"),
        ('{"timestamp": 1e400, "prompt_ids": [1], "num_output_tokens": 1}', "'timestamp' is inf"),
        ('{"timestamp": 0, "prompt_ids": "hello", "num_output_tokens": 1}', "'prompt_ids' has to be a list"),
        ('{"timestamp": 0, "prompt_ids": ["hello"], "num_output_tokens": 1}', "'hello' is no id"),
        ('{"timestamp": 0, "prompt_ids": [1], "num_output_tokens": 1, "block_tokens": 0}', "has to be 1 or more"),
    ],
)
def test_bad_traces(text: str, complaint: str) -> None:
    with pytest.raises(BadTrace, match=complaint):
        parse_trace(text.splitlines(), "t")


def test_a_bad_line_is_named() -> None:
    rows = [*mooncake_rows(3), {"timestamp": 0, "input_length": 5}]
    with pytest.raises(BadTrace, match="line 4 is not as format mooncake has it: 'output_length' is missing"):
        parse_trace(lines(*rows), "t")


def test_thinks_below_0_are_none() -> None:
    """Recorded clocks may disagree."""
    turn = {"t": 0.0, "think": -2.0, "in": 9, "out": 1, "ids": []}
    assert parse_trace(lines({"session": "a", "requests": [turn]}), "t").sessions[0][0].think_s == 0.0


def test_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    whole = gzip.compress(write(path, mooncake_rows(200)).read_bytes())
    damaged = whole[:100] + b"\xff" * 40 + whole[140:]
    for content, complaint in ((whole[:-50], "cut off"), (damaged, "damaged"), (b"\xb2\xff{}", "neither text")):
        path.write_bytes(content)
        with pytest.raises(BadTrace, match=complaint):
            read_trace(path)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="No such file"):
        read_trace(tmp_path / "none.jsonl")
