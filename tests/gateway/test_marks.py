"""Marks are taken out, and what they told never differs from what went on, wherever reads and failures cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_worker.contract.resume import marked
from gateway.openai.marks import MarkedScanner, num_told, told_drafts, told_ids

MAX = 100_000


def event(text: str, **more: object) -> bytes:
    chunk = {"id": "c-1", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], **more}
    return b"data: " + json.dumps(chunk, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


FINISH = b'data: {"id":"c-1","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
USAGE = b'data: {"id":"c-1","choices":[],"usage":{"prompt_tokens":4,"completion_tokens":6}}\n\n'
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error":{"message":"gone","type":"server_error","param":null,"code":"engine_restarting"}}\n\n'

# (ids in the mark or None, event)
RECORDED: list[tuple[list[int] | None, bytes]] = [
    ([], event("")),
    ([17], event("a")),
    ([18, 19], event("é: t 5\\n😀")),
    (None, event("two of ")),
    ([20], event("one token")),
    ([], b": ping\n\n"),
    ([4711], event(": t 1,2\n")),
]
DRAFTS = {19: (4, 1), 4711: (12, 1)}  # told with the mark that ends in this id


def recorded(num_parts: int | None = None) -> bytes:
    parts = RECORDED[:num_parts]
    return b"".join(data if ids is None else marked(data, ids, DRAFTS.get((ids or [0])[-1])) for ids, data in parts)


STREAM = recorded()
PLAIN = b"".join(data for _, data in RECORDED)
END = event("last") + FINISH + USAGE + DONE
# What may have been passed on, with the tokens that then are told.
Told = tuple[list[int], tuple[int, int]]  # ids, and the tokens speculated for them and those of them that were right
STATES: dict[bytes, Told] = {b"": ([], (0, 0))}
_data: bytes = b""
_told: Told = ([], (0, 0))
for _ids, _event in RECORDED:
    _data += _event
    if _ids is not None:
        _told = (_told[0] + _ids, DRAFTS.get((_ids or [0])[-1], _told[1]))
        STATES[_data] = _told


def told_by(scanner: MarkedScanner) -> Told:
    ids = told_ids(scanner.told)
    assert num_told(scanner.told) == len(ids)
    return ids, told_drafts(scanner.told)


def feed(scanner: MarkedScanner, data: bytes, cuts: list[int]) -> bytes:
    out = b""
    at = 0
    for cut in [*sorted(cuts), len(data)]:
        if data[at:cut]:
            out += scanner.feed(data[at:cut])
            scanner.check_invariants()
            if not scanner.done:
                assert STATES[out] == told_by(scanner)
            at = cut
    return out


def test_every_split_into_two() -> None:
    for cut in range(len(STREAM + END)):
        scanner = MarkedScanner(MAX, bytearray())
        assert feed(scanner, STREAM + END, [cut]) == PLAIN + END
        assert scanner.done
        assert not scanner.broken
        assert told_by(scanner) == ([17, 18, 19, 20, 4711], (12, 1))
        assert scanner.usage is not None


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(cuts=st.lists(st.integers(0, len(STREAM + END)), max_size=40), stop=st.integers(0, len(STREAM + END)))
def test_a_stream_that_breaks_anywhere_has_told_what_was_passed_on(cuts: list[int], stop: int) -> None:
    data = (STREAM + END)[:stop]
    scanner = MarkedScanner(MAX, bytearray())
    out = feed(scanner, data, [cut for cut in cuts if cut < stop])
    if stop < len(STREAM + END):
        assert STATES[out] == told_by(scanner)
        assert scanner.close() == b""
        assert scanner.broken


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(cuts=st.lists(st.integers(0, len(STREAM + ERROR)), max_size=20), parts=st.integers(0, len(RECORDED)))
def test_an_error_takes_along_what_no_mark_vouches_for(cuts: list[int], parts: int) -> None:
    data = recorded(parts) + ERROR
    scanner = MarkedScanner(MAX, bytearray())
    out = feed(scanner, data, [cut for cut in cuts if cut < len(data)])
    assert scanner.error is not None
    assert scanner.error["code"] == "engine_restarting"
    assert STATES[out] == told_by(scanner)


@pytest.mark.parametrize("usage", [{}, {"usage": None}])
@pytest.mark.parametrize("strips", [True, False])
def test_an_event_read_alone_is_what_it_is_among_others(usage: dict[str, None], strips: bool) -> None:
    plain = event('say "finish_reason":"stop", [DONE] and "error"', **usage)
    alone, among = MarkedScanner(MAX, bytearray(), strips), MarkedScanner(MAX, bytearray(), strips)
    out = alone.feed(marked(plain, [1]))
    assert among.feed(marked(event("x"), [0]) + marked(plain, [1])) == event("x") + out
    assert out == (plain.replace(b',"usage":null', b"") if strips else plain)
    assert (alone.num_events, among.num_events) == (1, 2)
    assert not alone.finished


def test_tokens_are_told_behind_those_of_the_stream_before() -> None:
    told = bytearray(b"1,2\n")
    scanner = MarkedScanner(MAX, told)
    scanner.feed(marked(event("x"), [3]))
    assert told_ids(told) == [1, 2, 3]


def test_the_usage_is_taken_out_as_ever() -> None:
    scanner = MarkedScanner(MAX, bytearray(), strip_usage=True)
    with_null = event("x", usage=None)
    out = scanner.feed(marked(with_null, [1]) + FINISH + USAGE + DONE)
    assert out == with_null.replace(b',"usage":null', b"") + FINISH + DONE
    assert scanner.usage is not None


def test_what_no_mark_ends_is_bounded() -> None:
    scanner = MarkedScanner(1000, bytearray())
    for _ in range(100):
        scanner.feed(event("never marked"))
        if scanner.done:
            break
    assert "without an end" in scanner.broken
