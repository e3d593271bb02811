"""Streams that say their tokens, and the rest of an answer that was begun elsewhere, from every mark on.

The fake model repeats its prompt, so the prompt chooses what has to be continued.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_worker.core.types import FinishReason
from engine_worker.serving.resume import marks_for
from tests.engine_worker.serving.calls import prepared_call
from tests.engine_worker.serving.marked import CHAT, COMPLETIONS, Bench, ask, check_continuations, order, read_marked
from tests.engine_worker.serving.running_worker import RunningWorker, running_worker

GREEDY = {"model": "fake", "max_tokens": 500, "temperature": 0}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "now")]
CALLS = """Well: <tool_call>
{"name": "add", "arguments": {"a": [1, "é😀"]}}
</tool_call>
<tool_call>
{"name": "now", "arguments": {}}
</tool_call>"""


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=40)
STOPPED, CUT = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("path", "text", "fields"),
    [
        (COMPLETIONS, "hello hello", {}),
        (COMPLETIONS, "a 😀 in the wörld 漢字", {}),  # characters of several tokens
        (COMPLETIONS, "aab aaab STO STOP more", {"stop": ["STOP", "aaab STOX"]}),  # beginnings of stop strings, and one
        (COMPLETIONS, "ababac rest", {"stop": ["abac"], "include_stop_str_in_output": True}),
        (COMPLETIONS, "xa a a ab", {"stop": ["ab"], "min_tokens": 4}),
        (COMPLETIONS, "hello again", {"echo": True}),
        (COMPLETIONS, "hello 😀 hello", {"logprobs": 2}),
        (COMPLETIONS, "hello 😀 again", {"logprobs": 1, "echo": True}),
        (CHAT, "héllo 😀", {}),
        (CHAT, "<|start|>hel<|start|>lo", {"logprobs": True}),  # tokens without text, but with a log probability
        (CHAT, CALLS, {"tools": TOOLS}),
        (CHAT, CALLS, {"tools": TOOLS, "logprobs": True, "top_logprobs": 2}),
        (CHAT, CALLS, {"tools": TOOLS, "stop": ["now", "arguments 4"]}),
        (CHAT, "no call, <tool_ but nearly", {"tools": TOOLS}),
        (CHAT, f"{CALLS[6:]}\n{CALLS[6:]}", {"tools": TOOLS, "tool_choice": "required"}),
    ],
)
@pytest.mark.parametrize("reason", [STOPPED, CUT])
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(sizes=SIZES)
async def test_an_answer_goes_on_from_every_mark(
    bench: Bench, path: str, text: str, fields: dict[str, Any], reason: FinishReason, sizes: list[int]
) -> None:
    """However the tokens arrive: one by one, or several at once."""
    tokens = bench.renderer.encode(text, add_special_tokens=False) + [bench.eos] * (reason is STOPPED)
    prompt = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "hello prompt"}
    body = {**GREEDY, **prompt, **fields}
    whole = await bench.stream(path, body, tokens, sizes, reason)
    assert whole.events() == (await bench.stream(path, body, tokens, (len(tokens),), reason)).events()
    for num_parts in range(1, len(whole.parts) + 1):
        sent = order(path, body, whole, num_parts)
        rest = await bench.stream(path, body, tokens, sizes, reason, sent)
        assert whole.events(num_parts) + rest.events() == whole.events()


async def test_each_token_that_makes_text_is_told_with_it(bench: Bench) -> None:
    tokens = bench.renderer.encode("ab😀c STO", add_special_tokens=False)
    whole = await bench.stream(COMPLETIONS, {**GREEDY, "prompt": "x", "stop": ["STOP"]}, [*tokens, bench.eos])
    told = [(ids, json.loads(events[0])["choices"][0]["text"]) for ids, events in whole.parts]
    a, b, *emoji = tokens[:6]
    assert told == [([a], "a"), ([b], "b"), (emoji, "😀"), ([tokens[6]], "c"), ([tokens[7]], " ")]
    assert json.loads(whole.tail[0])["choices"][0]["text"] == "STO"


async def test_a_continuation_can_be_continued(bench: Bench) -> None:
    tokens = [*bench.renderer.encode("several words to go on with", add_special_tokens=False), bench.eos]
    body = {**GREEDY, "prompt": "x"}
    whole = await bench.stream(COMPLETIONS, body, tokens)
    first = order(COMPLETIONS, body, whole, 3)
    second = await bench.stream(COMPLETIONS, body, tokens, sent=first)
    ids, (drafts, accepted) = [*first["output_ids"], *second.ids(4)], second.drafts[3]
    told = {"output_ids": ids, "draft_tokens": drafts, "accepted_tokens": accepted}
    third = await bench.stream(COMPLETIONS, body, tokens, sent={**first, **told})
    assert whole.events(3) + second.events(4) + third.events() == whole.events()


def test_a_worker_goes_on(worker: RunningWorker) -> None:
    """With the engine behind it, which has to find the right token."""
    check_continuations(worker.http, COMPLETIONS, {**GREEDY, "prompt": "hello 😀 hello"}, every=3)
    check_continuations(worker.http, CHAT, {**GREEDY, "messages": [{"role": "user", "content": "hello"}]}, every=9)


@pytest.mark.parametrize(
    ("fields", "wanted", "is_marked"),
    [
        ({"temperature": 0}, b"exact", True),
        ({"temperature": 1.0}, b"exact", False),
        ({"temperature": 1.0}, b"all", True),
        ({"temperature": 1.0, "seed": 3}, b"exact", True),
        ({"temperature": 1.0, "top_k": 1}, b"exact", True),
        ({"temperature": 0}, b"some", False),
        ({"temperature": 0}, None, False),
        ({"temperature": 0, "n": 2}, b"all", False),
    ],
)
def test_which_streams_are_marked(fields: dict[str, Any], wanted: bytes | None, is_marked: bool) -> None:
    assert (marks_for(prepared_call(**fields), wanted) is not None) == is_marked


def test_nobody_sees_marks_who_did_not_ask(worker: RunningWorker) -> None:
    response = worker.complete("hello", stream=True, temperature=0)
    assert "x-warmgate-marks" not in response.headers
    assert ": t" not in response.text
    logprobs = ask(worker.http, COMPLETIONS, {**GREEDY, "prompt": "hello", "logprobs": 1, "stop": "x"})
    assert "x-warmgate-marks" not in logprobs.headers


def test_log_probabilities_of_an_answer_that_holds_calls_back_are_not_told_again(bench: Bench) -> None:
    body = {**GREEDY, "messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "stream": True}
    for choice, logprobs, is_marked in (("required", True, False), ("required", False, True), ("auto", True, True)):
        call = bench.preparer.chat(json.dumps({**body, "tool_choice": choice, "logprobs": logprobs}).encode())
        assert (marks_for(call, b"all") is not None) == is_marked


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"output_ids": [10**9]}, "output_ids"),
        ({"output_ids": [-1]}, "output_ids"),
        ({"output_ids": ["1"]}, "output_ids"),
        ({"output_ids": [5] * 500}, "fewer than"),
        ({"draft_tokens": -1}, "draft_tokens"),
        ({"path": "/v1/embeddings"}, "path"),
        ({"request": {**GREEDY, "prompt": "x"}}, "stream of one choice"),
        ({"request": {**GREEDY, "prompt": "x", "stream": True, "n": 2}}, "stream of one choice"),
        ({"request": {**GREEDY, "prompt": ["x", "y"], "stream": True}}, "stream of one choice"),
        ({"request": {"model": "fake"}}, "prompt"),
        ({"request": 3}, "object"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused(worker: RunningWorker, change: dict[str, Any], says: str) -> None:
    body = {**GREEDY, "prompt": "hello hello"}
    good = order(COMPLETIONS, body, read_marked(ask(worker.http, COMPLETIONS, body).text), 2)
    answer = worker.http.post("/internal/resume", json={**good, **change})
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


def test_tokens_that_ended_the_answer_can_not_be_gone_on_with(worker: RunningWorker) -> None:
    body = {**GREEDY, "prompt": "one STOP two and then for a while on"}
    whole = read_marked(ask(worker.http, COMPLETIONS, body).text)
    ids = worker.http.post("/tokenize", json={"prompt": "one STOP two"}).json()["tokens"]
    sent = {**order(COMPLETIONS, {**body, "stop": "STOP"}, whole, 0), "output_ids": ids}
    answer = worker.http.post("/internal/resume", json=sent)
    assert answer.status_code == 400
    assert "stop string" in answer.json()["error"]["message"]


def test_the_secret_guards_it_and_alike_workers_say_so() -> None:
    with running_worker("--served-model-name", "fake", env={"WARMGATE_SECRET": "s3cret"}) as worker:
        headers = {"x-warmgate-secret": "s3cret"}
        state = worker.process.until(
            "ready",
            lambda: (s := worker.http.get("/internal/state", headers=headers).json())["status"] == "ready" and s,
        )
        assert len(state["model_fingerprint"]) == 32
        body = {**GREEDY, "prompt": "hello hello"}
        sent = order(COMPLETIONS, body, read_marked(ask(worker.http, COMPLETIONS, body).text), 1)
        assert worker.http.post("/internal/resume", json=sent).status_code == 403
        rest = worker.http.post("/internal/resume", json=sent, headers=headers)
        assert rest.status_code == 200
        assert json.loads(read_marked(rest.text).tail[0])["id"] == sent["id"]
