"""The scanner, against a plain reading of the whole stream: any split, any line end, and every way to end badly."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.openai.sse import StreamScanner, events

MAX_EVENT = 10_000


def frame(text: str = "", finish: str | None = None, **extra: object) -> str:
    value = {"id": "1", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}], **extra}
    return f"data: {json.dumps(value, separators=(',', ':'), ensure_ascii=False)}\n\n"


USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
DONE = "data: [DONE]\n\n"
GOOD = "".join(
    [
        ": ping\n\n",
        frame("\u00e9t\u00e9 \U0001f642"),
        frame('say "finish_reason":"stop" and "error" [DONE'),
        frame("", "stop"),
        f'data: {{"choices": [], "usage": {json.dumps(USAGE)}}}\n\n',
        DONE,
    ]
)


def run(chunks: list[bytes], hold_end: bool = True) -> tuple[bytes, StreamScanner]:
    scanner = StreamScanner(MAX_EVENT, hold_end)
    out = b""
    for chunk in chunks:
        out += scanner.feed(chunk)
        scanner.check_invariants()
    if not scanner.done:
        out += scanner.close()
    return out, scanner


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


@given(st.lists(st.integers(0, 10_000), max_size=40), st.sampled_from(["\n", "\r\n", "\r"]), st.booleans())
@example(list(range(1200)), "\n", True)
@example(list(range(1200)), "\r\n", True)
@example(list(range(1200)), "\r", False)
def test_every_split_of_a_good_stream_is_relayed_whole_and_understood(cuts, newline, hold_end):
    data = GOOD.replace("\n", newline).encode()
    out, scanner = run(split(data, cuts), hold_end)
    assert out == data
    assert scanner.done
    assert not scanner.broken
    assert scanner.finished
    assert scanner.error is None
    assert scanner.usage is not None
    assert (scanner.usage.prompt_tokens, scanner.usage.cached_tokens) == (9, 4)
    assert scanner.num_events == 5


@given(st.lists(st.integers(0, 10_000), max_size=20), st.integers(0, len(GOOD.encode()) - len(DONE) - 1))
def test_a_stream_cut_anywhere_is_broken_and_ends_between_events(cuts, length):
    """What was relayed is a prefix of the stream, ends at an event's end, and holds no finish_reason."""
    data = GOOD.encode()
    out, scanner = run(split(data[:length], cuts))
    assert scanner.broken
    assert data.startswith(out)
    assert b'"finish_reason":"stop"}' not in out
    assert out == b"" or out.endswith(b"\n\n")


def test_with_several_choices_nothing_is_held_back():
    scanner = StreamScanner(MAX_EVENT, hold_end=False)
    first = frame("", "stop").encode()
    assert scanner.feed(first) == first
    assert scanner.finished
    assert not scanner.done


def test_the_end_is_held_until_done():
    scanner = StreamScanner(MAX_EVENT)
    body, end = frame("a"), frame("", "length")
    assert scanner.feed((body + end).encode()) == body.encode()
    assert scanner.feed(b": ping\n\n") == b""
    assert scanner.feed(DONE.encode()) == (end + ": ping\n\n" + DONE).encode()


@pytest.mark.parametrize(
    "event",
    [
        'data: {"error":{"message":"boom","code":500}}\n\n',
        'data: {"error": "boom"}\n\n',
        'event: error\ndata: {"object":"error","message":"boom","code":400}\n\n',
    ],
)
def test_an_error_event_ends_the_stream_and_is_left_to_the_relay(event):
    out, scanner = run([frame("a").encode(), event.encode()])
    assert scanner.error is not None
    assert scanner.error["message"] == "boom"
    assert out == frame("a").encode()
    assert scanner.done
    assert not scanner.broken


def test_done_without_a_finish_reason_is_broken_and_not_relayed():
    out, scanner = run([(frame("a") + DONE).encode()])
    assert scanner.broken
    assert out == frame("a").encode()


@given(st.integers(1, 300))
def test_an_event_without_end_is_capped(size):
    scanner = StreamScanner(MAX_EVENT)
    fed = 0
    while not scanner.done:
        assert scanner.feed(b"x" * size) == b""
        fed += size
    assert scanner.broken
    assert fed <= MAX_EVENT + size


def test_usage_in_every_frame_and_spaced_json_are_read():
    body = json.dumps({"choices": [{"delta": {"content": "a"}, "finish_reason": None}], "usage": {"prompt_tokens": 3}})
    end = json.dumps({"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": None})
    out, scanner = run([f"data: {body}\n\n".encode(), f"data: {end}\n\n".encode(), DONE.encode()])
    assert scanner.usage.prompt_tokens == 3
    assert scanner.finished
    assert out.endswith(DONE.encode())


def test_the_last_event_may_lack_its_blank_line():
    data = (frame("a", "stop") + "data: [DONE]").encode()
    out, scanner = run([data])
    assert out == data
    assert not scanner.broken


PIECES = st.lists(st.sampled_from(["data: a", "data:b", "data", "event: x", ": c", "id: 1", "", "", "", " ", "data:"]))


@given(PIECES, st.booleans())
@example(["data: a", "", "", "", "data: b"], False)
@example(["data: a", "data: b", "", ": c", "", "data: d"], True)
def test_events_are_the_same_whatever_ends_their_lines(lines: list[str], ends: bool):
    text = "\n".join(lines) + "\n" * ends
    plain, other = (list(events(text.replace("\n", end).encode(), 0)) for end in ("\n", "\r\n"))
    assert [data for _, data in plain] == [data for _, data in other]
    assert [text.encode()[start:].startswith(b"\n") for start, _ in plain] == [False] * len(plain)
    starts = [len(text[:start].replace("\n", "\r\n")) for start, _ in plain]
    assert starts == [start for start, _ in other]


USAGE_FRAME = f'data: {{"choices":[],"usage":{json.dumps(USAGE)}}}\n\n'
PLAIN = [
    frame("word"),
    frame("word", usage=None),
    frame("x" * 700),
    frame('"finish_reason": "usage" [DONE'),
    frame("[DONE] finish_reason"),
    ": ping\n\n",
    "\n" + frame("behind two blank lines"),
    USAGE_FRAME,
    "event: x\ndata: no JSON\n\n",
]
ENDS = [
    [],
    [frame("", "stop"), DONE],
    [frame("", "stop"), USAGE_FRAME, DONE],
    [DONE],
    ['data: {"error":{"message":"x"}}\n\n'],
]


@given(st.lists(st.sampled_from(PLAIN), max_size=60), st.sampled_from(ENDS), st.booleans(), st.booleans())
@example([PLAIN[0]] * 99, ENDS[2], True, True)
@example([PLAIN[0]] * 99, ENDS[0], True, True)
@example([PLAIN[1]] * 99, ENDS[2], True, True)
@example([PLAIN[0], USAGE_FRAME, *[PLAIN[0]] * 40], ENDS[4], True, False)
@example([PLAIN[0]] * 40, ENDS[1], False, False)
@example([PLAIN[0]] * 40, [frame("x" * 1200, "stop"), DONE], True, True)
def test_many_events_in_one_read_are_what_they_are_one_by_one(begin, end, hold_end, strips):
    pieces = [text.encode() for text in begin + end]
    one_by_one = StreamScanner(MAX_EVENT, hold_end, strips)
    parts = [one_by_one.feed(piece) for piece in pieces]
    whole = StreamScanner(MAX_EVENT, hold_end, strips)
    assert whole.feed(b"".join(pieces)) == b"".join(parts)
    for name in ("num_events", "done", "broken", "error", "finished", "usage"):
        assert getattr(whole, name) == getattr(one_by_one, name)
    whole.check_invariants()
