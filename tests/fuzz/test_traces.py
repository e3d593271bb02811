"""Recorded streams of real engines, cut anywhere: the gateway understands and relays the same whatever the pieces.

tests/data/sse holds what the bundled worker and vLLM sent for chats and completions, with usage, logprobs, several
choices, tool calls and text beyond ASCII.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.observe.record import RequestRecord
from gateway.openai.sse import StreamScanner
from gateway.translate.chat import ChatAnswer
from gateway.translate.messages import MessagesTranslation
from tests.fuzz.conftest import FACTOR, effort

TRACES = sorted((Path(__file__).parents[1] / "data" / "sse").glob("*.sse"))
DATA = {trace.stem: trace.read_bytes() for trace in TRACES}
ERROR = b'data: {"error":{"message":"The engine died.","type":"server_error","param":null,"code":null}}\n\n'
MAX_EVENT = 100_000


def outcome(pieces: list[bytes], strips_usage: bool, hold_end: bool) -> tuple[Any, ...]:
    """What was relayed and understood."""
    scanner = StreamScanner(MAX_EVENT, hold_end, strips_usage)
    out = b""
    for piece in pieces:
        out += scanner.feed(piece)
        scanner.check_invariants()
    if not scanner.done:
        out += scanner.close()
    return out, scanner.num_events, scanner.finished, scanner.broken, scanner.usage, scanner.error


def frames(data: bytes) -> list[Any]:
    found = [frame.removeprefix(b"data: ") for frame in data.split(b"\n\n") if frame.startswith(b"data: ")]
    return [json.loads(frame) for frame in found if frame != b"[DONE]"]


def test_there_are_traces() -> None:
    assert {name.partition("-")[2] for name in DATA} >= {"chat", "chat-usage", "chat-unicode", "tools", "completion"}


@pytest.mark.parametrize("name", DATA)
def test_every_split_in_two(name: str) -> None:
    """Each place of a long one only in the longer run; the test below cuts at random ones."""
    data = DATA[name]
    hold_end = "choices" not in name and name.split("-", 1)[1] != "completion-usage"
    whole = outcome([data], False, hold_end)
    assert whole[0] == data
    assert (whole[2], whole[3], whole[5]) == (True, "", None)
    stripped = outcome([data], True, hold_end)
    step = 1 if FACTOR > 1 else 1 + len(data) // 1500
    for at in range(1, len(data), step):
        assert outcome([data[:at], data[at:]], False, hold_end) == whole, at
        assert outcome([data[:at], data[at:]], True, hold_end) == stripped, at


@pytest.mark.parametrize("name", DATA)
def test_usage_taken_out_leaves_the_rest(name: str) -> None:
    out, *_ = outcome([DATA[name]], True, True)
    told = [frame for frame in frames(out) if frame.get("usage")]
    assert told == []
    kept = [{key: value for key, value in frame.items() if key != "usage"} for frame in frames(out)]
    original = [{k: v for k, v in frame.items() if k != "usage"} for frame in frames(DATA[name]) if frame["choices"]]
    assert kept == original


@effort(300)
@given(st.sampled_from(sorted(DATA)), st.lists(st.integers(0, 10_000), max_size=60), st.booleans(), st.data())
def test_pieces_ends_and_errors_anywhere(name: str, cuts: list[int], strips: bool, draw: st.DataObject) -> None:
    """Cut into any pieces, possibly broken off, possibly with an engine's error behind a whole event."""
    data = DATA[name]
    ending = draw.draw(st.sampled_from(["whole", "cut", "error", "crlf"]))
    if ending == "cut":
        data = data[: draw.draw(st.integers(0, len(data) - 1))]
    elif ending == "error":
        events = data.split(b"\n\n")
        data = b"\n\n".join([*events[: draw.draw(st.integers(0, len(events) - 3))], ERROR])
    elif ending == "crlf":
        data = data.replace(b"\n", b"\r\n")
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    got = outcome([data[a:b] for a, b in itertools.pairwise(places)], strips, True)
    assert got == outcome([data], strips, True)
    out, _, _, broken, _, error = got
    if ending == "cut":
        assert broken or error or out.rstrip().endswith(b"data: [DONE]"), "a stream that broke off passed for a success"
    elif ending == "error":
        assert error is not None
        assert b"[DONE]" not in out
    if not strips:
        assert data.startswith(out)


@pytest.mark.parametrize("name", [name for name in DATA if "completion" not in name and "choices" not in name])
def test_a_recorded_chat_becomes_a_message(name: str) -> None:
    """In the documented order, with the text and the calls of the recording."""
    translation = MessagesTranslation()
    record = RequestRecord(request_id="r", endpoint="messages", started_at=0.0)
    decoder = msgspec.json.Decoder(ChatAnswer)
    chunks = [decoder.decode(json.dumps(frame)) for frame in frames(DATA[name])]
    out = b"".join(translation.chunk(chunk, record) for chunk in chunks) + translation.finished()
    events = [json.loads(frame.split(b"data: ", 1)[1]) for frame in out.split(b"\n\n") if frame]
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    text = "".join(delta.get("text", "") for delta in deltas)
    choices = [c for frame in frames(DATA[name]) for c in frame["choices"] if c["index"] == 0]
    assert text == "".join(choice["delta"].get("content") or "" for choice in choices)
    parts = [call for choice in choices for call in choice["delta"].get("tool_calls") or ()]
    arguments = "".join(delta.get("partial_json", "") for delta in deltas)
    assert arguments == "".join(part["function"].get("arguments") or "" for part in parts)
