"""The whole product through OpenAI's own client: what an application that only changes its base_url sees."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise

import openai
import pytest

from tests.e2e.conftest import Stack

pytestmark = pytest.mark.e2e

HELLO = [{"role": "user", "content": "Say hello to the world."}]


def test_a_chat_completion(client: openai.OpenAI, stack: Stack) -> None:
    answer = client.chat.completions.create(model=stack.model, messages=HELLO, max_tokens=8, temperature=0)
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("length", "stop")
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.model == stack.model


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI, stack: Stack) -> None:
    whole = client.chat.completions.create(model=stack.model, messages=HELLO, max_tokens=24, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model=stack.model,
            messages=HELLO,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == [whole.choices[0].finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1
    assert sum(1 for chunk in chunks for choice in chunk.choices if choice.delta.role) == 1


def test_the_clients_own_stream_helper(client: openai.OpenAI, stack: Stack) -> None:
    with client.chat.completions.stream(model=stack.model, messages=HELLO, max_tokens=8) as stream:
        kinds = [event.type for event in stream]
        [choice] = stream.current_completion_snapshot.choices
    assert {"chunk", "content.delta", "content.done"} <= set(kinds)
    assert choice.message.content
    assert choice.finish_reason in ("length", "stop")


def test_a_completion_and_its_stream(client: openai.OpenAI, stack: Stack) -> None:
    arguments = {"model": stack.model, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**arguments)
    assert whole.choices[0].text
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**arguments, stream=True))
    assert streamed == whole.choices[0].text


def test_several_choices_and_logprobs(client: openai.OpenAI, stack: Stack) -> None:
    answer = client.chat.completions.create(
        model=stack.model, messages=HELLO, max_tokens=4, n=2, seed=5, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content
        assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)


def test_models(client: openai.OpenAI, stack: Stack) -> None:
    assert stack.model in [model.id for model in client.models.list()]
    assert client.models.retrieve(stack.model).id == stack.model


class TestErrors:
    def test_an_unknown_model_is_not_found(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="nobody/knows", messages=HELLO)
        assert caught.value.code == "model_not_found"
        assert caught.value.type == "invalid_request_error"

    def test_a_wrong_value_names_its_parameter(self, client: openai.OpenAI, stack: Stack) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=stack.model, messages=HELLO, temperature=-1)
        assert caught.value.param == "temperature"

    def test_a_prompt_beyond_the_context_says_so(self, client: openai.OpenAI, stack: Stack) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model=stack.model, messages=[{"role": "user", "content": "word " * 20_000}], max_tokens=1
            )
        assert caught.value.code == "context_length_exceeded"

    def test_a_body_that_is_no_json_is_a_bad_request(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError):
            client.post("/chat/completions", content=b"{", cast_to=object)

    def test_a_stream_refused_before_its_first_token_has_a_true_status(
        self, client: openai.OpenAI, stack: Stack
    ) -> None:
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model=stack.model, messages=HELLO, max_tokens=-4, stream=True)

    def test_an_unknown_path_is_not_found(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError):
            client.post("/nothing/here", body={}, cast_to=object)


class TestPrefix:
    def test_the_second_turn_goes_to_the_replica_that_holds_the_first(
        self, client: openai.OpenAI, stack: Stack, long_prompt: str
    ) -> None:
        """Three conversations, so that staying put by chance alone would show."""
        for number in range(3):
            messages = [{"role": "user", "content": f"{number}. {long_prompt} What is it about?"}]
            replicas, cached = [], []
            for _ in range(3):
                raw = client.chat.completions.with_raw_response.create(
                    model=stack.model, messages=messages, max_tokens=8, temperature=0
                )
                answer = raw.parse()
                replicas.append(raw.headers["x-warmgate-replica"])
                cached.append(int(raw.headers["x-warmgate-cached-tokens"]))
                assert raw.headers["x-warmgate-policy"] == "warm"
                assert raw.headers["x-request-id"]
                assert answer.usage is not None
                assert answer.usage.prompt_tokens_details is not None
                assert answer.usage.prompt_tokens_details.cached_tokens == cached[-1]
                matched = int(raw.headers["x-warmgate-matched-tokens"])
                messages.append({"role": "assistant", "content": answer.choices[0].message.content})
                messages.append({"role": "user", "content": "And then?"})
            assert len(set(replicas)) == 1, replicas
            assert all(later >= earlier for earlier, later in pairwise(cached))
            assert cached[1] > 200, "the first turn's prompt was not found again"
            assert abs(matched - cached[-1]) <= 32, "the router expected something else than what happened"

    def test_a_stream_carries_the_same_headers(self, client: openai.OpenAI, stack: Stack, long_prompt: str) -> None:
        messages = [{"role": "user", "content": long_prompt}]
        seen = []
        for _ in range(2):
            raw = client.chat.completions.with_raw_response.create(
                model=stack.model, messages=messages, max_tokens=4, stream=True
            )
            seen.append((raw.headers["x-warmgate-replica"], int(raw.headers["x-warmgate-cached-tokens"])))
            for _ in raw.parse():
                pass
        assert seen[0][0] == seen[1][0]
        assert seen[1][1] > 200


class TestPrintedLines:
    """What `warmgate up` prints is pasted as it stands."""

    def test_the_curl_line(self, stack: Stack) -> None:
        [line] = [line for line in stack.up.output.splitlines() if line.startswith("curl ")]
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120)
        assert done.stdout.startswith("HTTP/1.1 200"), done.stdout + done.stderr
        assert "x-warmgate-replica: " in done.stdout
        assert '"finish_reason"' in done.stdout

    def test_the_python_snippet(self, stack: Stack) -> None:
        snippet = re.search(r"from openai.*?(?=\n\nCtrl-C)", stack.up.output, re.S)
        assert snippet is not None
        done = subprocess.run([sys.executable, "-"], input=snippet[0], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert re.search(r"127\.0\.0\.1:\d+ \d+ cached tokens\n$", done.stdout)
