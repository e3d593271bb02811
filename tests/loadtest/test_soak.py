"""A short soak: mixed requests on a real worker leave nothing behind. And the checks can fail."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from loadtest.soak import Job, Tally, check_answer, make_job, with_worker

pytestmark = pytest.mark.engine


async def test_a_worker_is_as_it_was_after_mixed_requests() -> None:
    tally = await with_worker(90, 16, 3)
    assert tally.complaints == []
    assert tally.num_sequences > 80
    for what in ("answered", "left", "refused", "json", "drafts accepted", "drafts refused"):
        assert tally.outcomes[what] > 0, what


def test_a_mix_is_repeatable_and_has_everything() -> None:
    def mix() -> list[Job]:
        rng = random.Random(1)
        return [make_job(rng, number) for number in range(300)]

    assert mix() == mix()
    keys = {key for job in mix() for key in job.body}
    assert keys >= {"prompt", "messages", "n", "stop", "stream", "response_format", "logprobs", "presence_penalty"}


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"choices": []}, "0 choices"),
        ({"usage": {"completion_tokens": 11}}, "11 tokens of 10"),
        ({"choices": [{"text": "an er", "finish_reason": "stop"}]}, "stop string"),
        ({"choices": [{"text": "", "finish_reason": None}]}, "finish_reason"),
    ],
)
def test_wrong_answers_are_complained_about(wrong: dict[str, Any], complaint: str) -> None:
    right = {"choices": [{"text": "fine", "finish_reason": "stop"}], "usage": {"completion_tokens": 4}}
    job = Job(1, "/v1/completions", {"max_tokens": 10, "stop": ["er"]}, None, is_refused=False)
    tally = Tally()
    check_answer(right, job, tally, "it")
    assert tally.complaints == []
    check_answer({**right, **wrong}, job, tally, "it")
    assert len(tally.complaints) == 1
    assert complaint in tally.complaints[0]


def test_an_answer_beside_its_schema_is_complained_about() -> None:
    body = {"max_tokens": 10, "response_format": {}}
    tally = Tally()
    for text in (json.dumps({"n": 5, "s": "a"}), json.dumps({"n": 500, "s": "a"}), "{"):
        answer = {"choices": [{"text": text, "finish_reason": "stop"}], "usage": {"completion_tokens": 4}}
        check_answer(answer, Job(1, "", body, None, is_refused=False), tally, "it")
    assert len(tally.complaints) == 2
