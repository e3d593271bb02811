"""A worker that speculates: the same answers, and what came of the guesses in usage, state and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from loadtest.tiny_llama import write_tiny_llama
from tests.engine_worker.serving.running_worker import RunningWorker, events, running_worker
from tests.engine_worker.serving.test_worker_real import ask, text_of

pytestmark = pytest.mark.engine

PROMPT = "one two three four, one two three four, one two three"


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RunningWorker]]:
    """One that guesses by n-grams, one with a draft model (the very model), one that does not guess."""
    folder = write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))
    kinds = {
        "ngram": ("--speculative", "ngram", "--always-speculate"),
        "draft": ("--speculative", str(folder), "--always-speculate"),
        "plain": (),
    }
    with ExitStack() as stack:
        made = {
            name: stack.enter_context(
                running_worker(
                    "--load-format", "dummy", "--kv-cache-memory", "1MiB", "--threads", "1",
                    "--served-model-name", "fake", *arguments,
                    model=str(folder), module="engine_worker",
                )
            )
            for name, arguments in kinds.items()
        }  # fmt: skip
        for worker in made.values():
            worker.until_ready()
        yield made


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("kind", ["ngram", "draft"])
def test_answers_are_those_of_a_worker_that_does_not_guess(
    workers: dict[str, RunningWorker], kind: str, fields: dict[str, float]
) -> None:
    fields = {"max_tokens": 80, **fields}
    guessed, plain = ask(workers[kind], PROMPT, **fields), ask(workers["plain"], PROMPT, **fields)
    assert text_of(guessed) == text_of(plain)
    assert "completion_tokens_details" not in plain["usage"]
    assert guessed["usage"]["completion_tokens"] == 80


def test_what_came_of_the_guesses_is_told(workers: dict[str, RunningWorker]) -> None:
    worker = workers["draft"]
    before = worker.state().speculation
    assert before is not None
    usage = ask(worker, "Something else entirely.", max_tokens=60)["usage"]
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 30, "the draft model is the model itself"
    after = worker.state().speculation
    assert after is not None
    assert after.num_accepted_tokens - before.num_accepted_tokens == details["accepted_prediction_tokens"]
    tried = details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"]
    assert after.num_draft_tokens - before.num_draft_tokens == tried
    counted = {
        line.partition("{")[0]: float(line.rpartition(" ")[2])
        for line in worker.http.get("/metrics").text.splitlines()
        if line.startswith("vllm:spec_decode_num_")
    }
    assert counted == {
        "vllm:spec_decode_num_drafts_total": after.num_drafts,
        "vllm:spec_decode_num_draft_tokens_total": after.num_draft_tokens,
        "vllm:spec_decode_num_accepted_tokens_total": after.num_accepted_tokens,
    }
    assert workers["plain"].state().speculation is None


def test_streams_have_every_token_and_the_guesses_in_their_usage(workers: dict[str, RunningWorker]) -> None:
    fields = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "logprobs": 0, "stream": True}
    response = workers["draft"].complete(PROMPT, stream_options={"include_usage": True}, **fields)
    *chunks, last, done = events(response.text)
    assert done == "[DONE]"
    tokens = [t for c in chunks for choice in c["choices"] for t in (choice["logprobs"] or {"tokens": []})["tokens"]]
    assert len(tokens) == 40
    assert last["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
