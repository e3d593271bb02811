"""openai-python through the gateway. Runs with every major that is installed beside it (`make test-clients`)."""

from __future__ import annotations

import json
import time

import openai
import pytest

MODEL = "scripted"
MAJOR = int(openai.__version__.partition(".")[0])
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {
    "name": "person",
    "schema": {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}},
}


@pytest.fixture(scope="module")
def client(base: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base}/v1", api_key="unused", max_retries=0, timeout=60)


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


class TestChat:
    def test_whole(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(model=MODEL, messages=user("say hello there"))
        assert answer.choices[0].message.content == "hello there"
        assert answer.usage.prompt_tokens_details.cached_tokens == 5
        assert answer._request_id

    def test_streamed(self, client: openai.OpenAI) -> None:
        stream = client.chat.completions.create(model=MODEL, messages=user("say one two three"), stream=True)
        chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == "one two three"
        assert all(chunk.choices for chunk in chunks), "a usage chunk that was not asked for"
        assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]

    def test_a_stream_with_its_usage(self, client: openai.OpenAI) -> None:
        options = {"include_usage": True}
        stream = client.chat.completions.create(
            model=MODEL, messages=user("say a b"), stream=True, stream_options=options
        )
        *_, last = stream
        assert (last.choices, last.usage.completion_tokens) == ([], 2)

    def test_tools_and_their_results(self, client: openai.OpenAI) -> None:
        messages = user("what now?")
        answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER, CLOCK])
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        [call] = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "x", "days": 7})
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER, CLOCK])
        assert answer.choices[0].message.content == "the result is sunny"

    def test_streamed_tools(self, client: openai.OpenAI) -> None:
        stream = client.chat.completions.create(
            model=MODEL, messages=user("call weather clock"), tools=[WEATHER, CLOCK], stream=True
        )
        calls: dict[int, list[str]] = {}
        for chunk in stream:
            for part in chunk.choices[0].delta.tool_calls or []:
                calls.setdefault(part.index, ["", ""])
                calls[part.index][0] += part.function.name or ""
                calls[part.index][1] += part.function.arguments or ""
        assert [call[0] for call in calls.values()] == ["weather", "clock"]
        assert json.loads(calls[0][1]) == {"city": "x", "days": 7}

    def test_structured_output(self, client: openai.OpenAI) -> None:
        wanted = {"type": "json_schema", "json_schema": SCHEMA}
        answer = client.chat.completions.create(model=MODEL, messages=user("who?"), response_format=wanted)
        assert json.loads(answer.choices[0].message.content) == {"name": "x", "age": 7}

    def test_an_alias(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(model="gpt-4o", messages=user("say yes"))
        assert (answer.choices[0].message.content, answer.model) == ("yes", MODEL)
        assert "gpt-4o" in [model.id for model in client.models.list()]
        assert client.models.retrieve("gpt-4o").id == "gpt-4o"


def test_completions(client: openai.OpenAI) -> None:
    assert client.completions.create(model=MODEL, prompt="say well then").choices[0].text == "well then"
    stream = client.completions.create(model=MODEL, prompt="say well then", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "well then"


class TestEmbeddings:
    def test_a_batch_as_base64_and_as_floats(self, client: openai.OpenAI) -> None:
        for encoding in ({}, {"encoding_format": "float"}):
            answer = client.embeddings.create(model=MODEL, input=["ab", "abc"], **encoding)
            assert [entry.embedding for entry in answer.data] == [[2.0, 0.0, 0.5], [3.0, 1.0, 0.5]]

    @pytest.mark.parametrize("given", ["abcd", [1, 2, 3], [[1, 2], [3]]])
    def test_other_inputs(self, client: openai.OpenAI, given: object) -> None:
        answer = client.embeddings.create(model=MODEL, input=given)
        assert answer.data[0].embedding[0] == (4 if isinstance(given, str) else 3 if given == [1, 2, 3] else 2)


class TestErrors:
    @pytest.mark.parametrize(
        ("status", "kind"),
        [
            (400, openai.BadRequestError),
            (401, openai.AuthenticationError),
            (403, openai.PermissionDeniedError),
            (422, openai.BadRequestError),
            (500, openai.InternalServerError),
        ],
    )
    def test_statuses_map_to_exceptions(self, client: openai.OpenAI, status: int, kind: type) -> None:
        with pytest.raises(kind) as caught:
            client.chat.completions.create(model=MODEL, messages=user(f"fail {status} 99"))
        assert caught.value.request_id

    def test_an_unknown_model(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="no/such", messages=user("hi"))
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("no/such")

    def test_a_break_in_mid_stream(self, client: openai.OpenAI) -> None:
        words = []

        def read() -> None:
            for chunk in client.chat.completions.create(model=MODEL, messages=user("break"), stream=True):
                words.append(chunk.choices[0].delta.content)

        with pytest.raises(openai.APIError, match="told to break"):
            read()
        assert "".join(words) == "fine"

    def test_retries_until_it_works(self, client: openai.OpenAI) -> None:
        patient = client.with_options(max_retries=2)
        answer = patient.chat.completions.create(model=MODEL, messages=user(f"fail 500 2 {time.time_ns()}"))
        assert answer.choices[0].message.content == "fine"

    def test_what_the_client_would_not_wait_for_is_given_up(self, client: openai.OpenAI, scripted: str) -> None:
        before = left(scripted)
        with pytest.raises((openai.APITimeoutError, openai.InternalServerError)):
            client.with_options(timeout=0.5).chat.completions.create(model=MODEL, messages=user("hang"))
        until_left(scripted, before)


class TestCancellation:
    def test_a_stream_that_is_closed_reaches_the_replica(self, client: openai.OpenAI, scripted: str) -> None:
        before = left(scripted)
        stream = client.chat.completions.create(model=MODEL, messages=user("hang"), stream=True)
        next(iter(stream))
        stream.close()
        until_left(scripted, before)


@pytest.mark.skipif(not hasattr(openai.OpenAI, "responses"), reason="this version has no Responses API")
class TestResponses:
    def test_whole(self, client: openai.OpenAI) -> None:
        answer = client.responses.create(model=MODEL, input="say hello there", instructions="be kind")
        assert (answer.output_text, answer.status) == ("hello there", "completed")
        assert (answer.usage.input_tokens, answer.usage.input_tokens_details.cached_tokens) == (20, 10)

    def test_streamed(self, client: openai.OpenAI) -> None:
        events = list(client.responses.create(model=MODEL, input="say a b c", stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type for event in events]
        assert kinds[:4] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ]
        assert kinds[-4:] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "a b c"
        assert events[-1].response.output_text == "a b c"
        assert events[-1].response.usage.output_tokens == 3

    def test_the_clients_own_stream_helper(self, client: openai.OpenAI) -> None:
        tools = [{"type": "function", **WEATHER["function"], "strict": False}, {"type": "web_search"}]
        with client.responses.stream(model=MODEL, input="weather?", tools=tools) as stream:
            deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
            final = stream.get_final_response()
        [item] = final.output
        assert (item.type, item.name, item.arguments) == ("function_call", "weather", "".join(deltas))
        assert json.loads(item.arguments) == {"city": "x", "days": 7}

    def test_a_tool_loop_by_items_and_by_id(self, client: openai.OpenAI) -> None:
        tools = [{"type": "function", **WEATHER["function"], "strict": False}]
        items: list = user("weather?")
        first = client.responses.create(model=MODEL, input=items, tools=tools)
        [call] = first.output
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        for second in (
            client.responses.create(model=MODEL, input=[*items, *first.output, result], tools=tools),
            client.responses.create(model=MODEL, input=[result], tools=tools, previous_response_id=first.id),
            client.responses.create(
                model=MODEL, input=[*items, {"type": "item_reference", "id": call.id}, result], tools=tools
            ),
        ):
            assert second.output_text == "the result is sunny"
        assert client.responses.retrieve(first.id).output[0].call_id == call.call_id
        client.responses.delete(first.id)
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model=MODEL, input=[result], tools=tools, previous_response_id=first.id)
        assert caught.value.param == "previous_response_id"

    def test_structured_output(self, client: openai.OpenAI) -> None:
        text = {"format": {"type": "json_schema", **SCHEMA}}
        answer = client.responses.create(model=MODEL, input="who?", text=text)
        assert json.loads(answer.output_text) == {"name": "x", "age": 7}

    def test_reasoning_comes_before_the_text(self, client: openai.OpenAI) -> None:
        events = list(client.responses.create(model=MODEL, input="think hard now | done", stream=True))
        final = events[-1].response
        assert [item.type for item in final.output] == ["reasoning", "message"]
        assert final.output[0].content[0].text == "hard now"
        assert final.output_text == "done"

    def test_an_answer_cut_by_its_limit_is_incomplete(self, client: openai.OpenAI) -> None:
        answer = client.responses.create(model=MODEL, input="say a b c d", max_output_tokens=2)
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        *_, last = client.responses.create(model=MODEL, input="say a b c d", max_output_tokens=2, stream=True)
        assert (last.type, last.response.output_text) == ("response.incomplete", "a b")

    def test_errors(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model=MODEL, input="hi", background=True)
        assert (caught.value.param, caught.value.code) == ("background", "unsupported_parameter")
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model="no/such", input="hi")
        with pytest.raises(openai.APIError, match="told to break"):
            list(client.responses.create(model=MODEL, input="break", stream=True))


def left(scripted: str) -> int:
    from urllib.request import urlopen

    with urlopen(f"{scripted}/left") as response:
        return json.load(response)["left"]


def until_left(scripted: str, before: int) -> None:
    """A request was left behind since."""
    deadline = time.monotonic() + 60
    while left(scripted) == before:
        assert time.monotonic() < deadline, "the replica still works for a client that left"
        time.sleep(0.02)
