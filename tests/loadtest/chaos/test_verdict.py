"""The judge itself: each way of being wrong is seen, and a true answer isn't called wrong."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from loadtest.chaos.asks import Ask, ask, numbered
from loadtest.chaos.schedule import harms, schedule
from loadtest.chaos.verdict import Ending, Reading, judge, mismatch

TRUTH = numbered("q7", 5)


def frame(text: str = "", finish: str | None = None, **fields: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice], **fields}).encode() + b"\n\n"


def the_ask(stream: bool = True, **body: Any) -> Ask:
    body = {"stream": stream, **body}
    return Ask(7, "/v1/chat/completions", body, TRUTH, "plain", 0)


def tokens(*numbers: int, tag: str = "q7") -> bytes:
    return b"".join(frame(f" {tag}t{n}") for n in numbers)


END = frame(finish="stop") + b"data: [DONE]\n\n"
ERROR = b'data: {"error": {"message": "m", "type": "t", "param": null, "code": null}}\n\n'


def judged(body: bytes, status: int = 200, ended_well: bool = True, each: Ask | None = None) -> tuple[Ending, str]:
    each = each or the_ask()
    reading = Reading(each.is_chat, each.stream)
    for start in range(0, len(body), 11):
        reading.feed(body[start : start + 11])
    if ended_well:
        reading.close(status)
    ending, faults = judge(each, status, reading, ended_well)
    return ending, "; ".join(faults)


def test_a_true_answer_has_no_fault() -> None:
    assert judged(tokens(*range(5)) + END) == (Ending.COMPLETED, "")


def test_a_true_beginning_and_an_error_event_is_a_failure_without_fault() -> None:
    assert judged(tokens(0, 1) + ERROR) == (Ending.FAILED, "")


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (tokens(0, 1, 3, 4) + END, "lost"),
        (tokens(0, 1, 1, 2, 3, 4) + END, "doubled"),
        (tokens(0, 2, 1, 3, 4) + END, "reordered"),
        (tokens(0, 1, 2, 3) + END, "lost"),
        (tokens(0, 1, 2, 3) + tokens(4, tag="q8") + END, "another request"),
        (tokens(*range(5)) + END + frame(" x"), "after the last"),
        (tokens(*range(5)) + frame(finish="stop") + frame(" q7t5") + b"data: [DONE]\n\n", "after the finish_reason"),
        (tokens(*range(5)) + END + b"data: {", "inside an event"),
        (b"data: {nonsense\n\n" + tokens(*range(5)) + END, "not JSON"),
    ],
)
def test_a_success_that_is_not_the_truth_is_a_fault(body: bytes, word: str) -> None:
    ending, faults = judged(body)
    assert ending is Ending.COMPLETED
    assert word in faults


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (tokens(0, 0) + ERROR, "doubled"),
        (tokens(1) + ERROR, "lost"),
        (ERROR, "before the first token"),
        (tokens(0) + frame(finish="stop") + ERROR, "beside a finish_reason"),
    ],
)
def test_an_error_event_excuses_nothing(body: bytes, word: str) -> None:
    ending, faults = judged(body)
    assert ending is Ending.FAILED
    assert word in faults


@pytest.mark.parametrize(
    "body", [tokens(*range(5)), tokens(*range(5)) + frame(finish="stop"), tokens(0, 1) + b"data: [DONE]\n\n", b""]
)
def test_a_silent_end_is_no_end(body: bytes) -> None:
    assert judged(body)[0] is Ending.UNFINISHED
    assert judged(body, ended_well=False)[0] is Ending.UNFINISHED


def test_usage_is_held_to_what_was_asked() -> None:
    usage = frame(usage={"completion_tokens": 4}).replace(b'{"choices": [', b'{"choices": [')
    asked = the_ask(stream_options={"include_usage": True})
    body = tokens(*range(5)) + frame(finish="stop") + usage + b"data: [DONE]\n\n"
    assert "usage says 4" in judged(body, each=asked)[1]
    assert "wasn't asked" in judged(body)[1]
    assert "no usage" in judged(tokens(*range(5)) + END, each=asked)[1]


def test_whole_answers_and_refusals() -> None:
    whole = the_ask(stream=False)
    choice = {"message": {"content": TRUTH.text}, "finish_reason": "stop"}
    good = json.dumps({"choices": [choice], "usage": {"completion_tokens": 5}}).encode()
    assert judged(good, each=whole) == (Ending.COMPLETED, "")
    assert "not JSON" in judged(good[:-9], each=whole)[1]
    refused = ERROR.removeprefix(b"data: ").strip()
    assert judged(refused, status=503, each=whole) == (Ending.REJECTED, "")
    assert "four keys" in judged(b'{"error": {"message": "m"}}', status=503, each=whole)[1]


def test_text_without_numbers_says_where_it_differs() -> None:
    truth = numbered("q1", 0)
    assert mismatch("", truth, whole=True) is None
    assert mismatch("abcd", type(truth)("abXd", None), whole=True) == "wrong text from character 2: 'cd' for 'Xd'"


def test_the_same_seed_is_the_same_trouble() -> None:
    assert schedule(5, 300, 2, 3, 2) == schedule(5, 300, 2, 3, 2) != schedule(6, 300, 2, 3, 2)
    assert [ask(5, n, "m") for n in range(50)] == [ask(5, n, "m") for n in range(50)]
    assert not any("redis" in harm.kind for harm in schedule(5, 300, 2, 3, 2, with_redis=False))


def test_harms_of_one_sort_never_overlap_and_all_of_them_come() -> None:
    found = schedule(3, 2000, 2, 3, 2)
    for sort in ("worker", "link", "gateway", "redis"):
        own = [harm for harm in found if sort in harm.kind]
        assert own
        assert all(one.at_s + one.for_s < other.at_s for one, other in itertools.pairwise(own))
    assert len({harm.kind for harm in found}) == 8
    assert next(harms(3, 2, 3, 2)).at_s > 0
