"""The worker as users start it, over a tiny model with random weights: from HTTP to attention and back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.tiny_llama import write_tiny_llama
from tests.engine_worker.serving.marked import check_continuations
from tests.engine_worker.serving.running_worker import RunningWorker, read_until, running_worker

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningWorker]:
    folder = write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))
    with running_worker(
        "--load-format", "dummy", "--kv-cache-memory", "1MiB", "--max-num-batched-tokens", "32",
        "--threads", "1", "--served-model-name", "fake",
        model=str(folder), module="engine_worker",
    ) as worker:  # fmt: skip
        worker.until_ready()
        yield worker


def ask(worker: RunningWorker, prompt: str, **fields: Any) -> dict[str, Any]:
    fields = {"temperature": 0, "max_tokens": 20, "ignore_eos": True, **fields}
    response = worker.complete(prompt, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def text_of(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["text"]


def test_greedy_answers_repeat_and_come_from_the_cache(tiny: RunningWorker) -> None:
    prompt = "A prompt of some length, for a few blocks of the prefix cache, and then some more."
    cold, warm = ask(tiny, prompt), ask(tiny, prompt)
    assert text_of(cold) == text_of(warm)
    assert cold["usage"]["completion_tokens"] == 20
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32


def test_a_request_that_leaves_itself_no_token_is_told_so_and_blames_nobody_else(tiny: RunningWorker) -> None:
    """A status of 500 would have a gateway try it at the next replica, and doubt this one."""
    response = tiny.complete("A prompt", guided_choice=["yes", "no"], allowed_token_ids=[3])
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", None)
    assert "leave no token" in error["message"]


def test_seeds_decide_and_only_seeds(tiny: RunningWorker) -> None:
    sampled = {"temperature": 1.5, "n": 2}
    first = ask(tiny, "seeded", seed=7, **sampled)
    again = ask(tiny, "seeded", seed=7, **sampled)
    other = ask(tiny, "seeded", seed=8, **sampled)
    assert first["choices"] == again["choices"]
    assert first["choices"] != other["choices"]
    assert first["choices"][0]["text"] != first["choices"][1]["text"]
    assert text_of(ask(tiny, "unseeded", **sampled)) != text_of(ask(tiny, "unseeded", **sampled))


def test_bias_and_stop_tokens_reach_the_sampler(tiny: RunningWorker) -> None:
    forced = ask(tiny, "bias", logit_bias={"65": 100}, logprobs=0, max_tokens=3)
    [token] = set(forced["choices"][0]["logprobs"]["tokens"])
    stopped = ask(tiny, "bias", logit_bias={"65": 100}, stop_token_ids=[65], min_tokens=0)
    assert (text_of(stopped), stopped["choices"][0]["finish_reason"]) == ("", "stop")
    assert stopped["usage"]["completion_tokens"] == 1
    assert token * 3 == text_of(forced)


def test_logprobs_are_probabilities(tiny: RunningWorker) -> None:
    [choice] = ask(tiny, "probable", logprobs=5, max_tokens=8)["choices"]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == 8
    for chosen, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert chosen <= 0
        assert chosen == pytest.approx(max(top.values()), abs=1e-4)  # greedy takes the likeliest


def test_a_stream_of_a_chat_equals_the_whole(tiny: RunningWorker) -> None:
    fields = {"temperature": 0, "max_tokens": 24}
    whole = tiny.chat("Say something.", **fields).json()["choices"][0]
    chunks = [
        json.loads(line.removeprefix("data: "))
        for line in tiny.chat("Say something.", stream=True, **fields).text.splitlines()
        if line.startswith("data: {")
    ]
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(deltas) == whole["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]


def test_a_disconnect_frees_the_blocks(tiny: RunningWorker) -> None:
    body = {"model": "fake", "prompt": "leave " * 100, "max_tokens": 1200, "ignore_eos": True, "stream": True}
    sock = tiny.connect("/v1/completions", body)
    read_until(sock, b"data: ")
    sock.close()
    tiny.until_idle()
    assert tiny.ended()["abort"] == 1


def test_a_missing_model_is_one_sentence(tmp_path: Path) -> None:
    with running_worker(model=str(tmp_path / "nothing"), module="engine_worker") as worker:
        assert worker.process.until_exit() == 1
        assert "Traceback" not in worker.process.output
        assert "nothing" in worker.process.output.splitlines()[-1]


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 1.5, "seed": 11, "top_p": 0.9},
        {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4},
        {"temperature": 1.2, "seed": 5, "min_tokens": 30, "bad_words": ["a"], "ignore_eos": False},
        {"temperature": 1.0, "seed": 3, "response_format": FORMAT, "ignore_eos": False, "max_tokens": 60},
    ],
)
def test_an_answer_goes_on_elsewhere_as_it_went(tiny: RunningWorker, fields: dict[str, Any]) -> None:
    """Draws, penalties, grammars and limits go by all of the tokens, wherever they were sampled."""
    body = {"model": "fake", "prompt": "An answer", "max_tokens": 40, "ignore_eos": True, **fields}
    whole = check_continuations(tiny.http, "/v1/completions", body, every=6)
    assert len(whole.events()) > 3
