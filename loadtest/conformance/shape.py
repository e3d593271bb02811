"""Answers that are not streamed: keys, counts, and the input shapes that both completion routes take."""

from __future__ import annotations

import time

from loadtest.conformance.checks import Skipped, check, expect, same
from loadtest.conformance.target import Target

LONG = "The lighthouse keeper counted the ships that passed in the night. " * 40


@check("shape", "a chat answer has id, object, created, model and choices")
def _(t: Target) -> None:
    answer = t.chat()
    expect(isinstance(answer["id"], str) and answer["id"], "no id")
    same(answer["object"], "chat.completion", "object")
    expect(type(answer["created"]) is int and abs(answer["created"] - time.time()) < 3600, "created is no time of now")
    same(answer["model"], t.model, "model")
    same([choice["index"] for choice in answer["choices"]], [0], "the choices' indices")


@check("shape", "a chat choice has finish_reason, index, message and logprobs (null when not asked for)")
def _(t: Target) -> None:
    choice = t.chat()["choices"][0]
    expect(choice.keys() >= {"finish_reason", "index", "message", "logprobs"}, f"its keys are {sorted(choice)}")
    expect(choice["logprobs"] is None, "logprobs that nobody asked for")
    same(choice["message"]["role"], "assistant", "role")
    expect(isinstance(choice["message"]["content"], str), "content is no string")


@check("shape", "plain text carries no list of tool calls")
def _(t: Target) -> None:
    message = t.chat()["choices"][0]["message"]
    expect(message.get("tool_calls") is None, f"tool_calls is {message.get('tool_calls')!r}")
    expect(message.get("function_call") is None, "function_call is set")


@check("shape", "usage adds up, and says how many tokens were cached even when none were")
def _(t: Target) -> None:
    usage = t.chat(f"Hello at {time.time_ns()}")["usage"]
    expect(all(type(usage[f"{part}_tokens"]) is int for part in ("prompt", "completion", "total")), "not integers")
    same(usage["total_tokens"], usage["prompt_tokens"] + usage["completion_tokens"], "total_tokens")
    expect(type((usage.get("prompt_tokens_details") or {}).get("cached_tokens")) is int, "no cached_tokens")


@check("shape", "a prompt sent again shows its cached tokens")
def _(t: Target) -> None:
    text = f"{time.time_ns()} {LONG}"
    t.chat(text, max_tokens=1)
    cached = 0
    for _ in range(4):  # a busy fleet may ask another replica, which has it from then on
        usage = t.chat(text, max_tokens=1)["usage"]
        cached = cached or usage["prompt_tokens_details"]["cached_tokens"]
    expect(0 < cached <= usage["prompt_tokens"], f"{cached} of {usage['prompt_tokens']} tokens cached")


@check("shape", "max_tokens ends an answer with finish_reason length and exactly that many tokens")
def _(t: Target) -> None:
    answer = t.chat(max_tokens=3, ignore_eos=True)
    same(answer["choices"][0]["finish_reason"], "length", "finish_reason")
    same(answer["usage"]["completion_tokens"], 3, "completion_tokens")


@check("shape", "max_completion_tokens counts, and wins over max_tokens")
def _(t: Target) -> None:
    answer = t.chat(max_tokens=9, max_completion_tokens=2, ignore_eos=True)
    same(answer["usage"]["completion_tokens"], 2, "completion_tokens")
    answer = t.chat(max_tokens=..., max_completion_tokens=4, ignore_eos=True)
    same(answer["usage"]["completion_tokens"], 4, "completion_tokens")


@check("shape", "n choices are numbered from 0, and the prompt counts once")
def _(t: Target) -> None:
    one, three = t.chat(max_tokens=4, ignore_eos=True), t.chat(max_tokens=4, n=3, ignore_eos=True, temperature=1)
    same([choice["index"] for choice in three["choices"]], [0, 1, 2], "the indices")
    same(three["usage"]["prompt_tokens"], one["usage"]["prompt_tokens"], "prompt_tokens")
    same(three["usage"]["completion_tokens"], 12, "completion_tokens")


@check("shape", "content as text parts is the same prompt as content as a string")
def _(t: Target) -> None:
    whole = t.chat("Hello there, friend")
    parts = [{"type": "text", "text": "Hello there, "}, {"type": "text", "text": "friend"}]
    single = t.chat(messages=[{"role": "user", "content": parts[:1]}], max_tokens=1)
    expect(single["usage"]["prompt_tokens"] > 0, "no prompt tokens")
    one = t.chat(messages=[{"role": "user", "content": [{"type": "text", "text": "Hello there, friend"}]}])
    same(one["usage"]["prompt_tokens"], whole["usage"]["prompt_tokens"], "prompt_tokens of one part")
    same(one["choices"][0]["message"]["content"], whole["choices"][0]["message"]["content"], "the answer to one part")
    same(
        t.post("/v1/chat/completions", t.chat_body(messages=[{"role": "user", "content": parts}])).status_code, 200, ""
    )


@check("shape", "a whole conversation is taken: system, user, assistant with a call, tool, developer")
def _(t: Target) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    t.chat(
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Add one."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "2"},
            {"role": "user", "content": "Thanks.", "name": "ann"},
        ]
    )
    t.chat(messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}])


@check("shape", "an assistant message without content but with null keys is taken")
def _(t: Target) -> None:
    said = {"role": "assistant", "content": "Hi", "refusal": None, "tool_calls": None, "function_call": None}
    t.chat(messages=[{"role": "user", "content": "Hi"}, said, {"role": "user", "content": "Go on"}])


@check("shape", "null counts as absent")
def _(t: Target) -> None:
    names = "n stop seed tools tool_choice logprobs top_logprobs response_format stream_options logit_bias user top_p"
    t.chat(stream=None, **dict.fromkeys(names.split()))


@check("shape", "fields that only mean something to others are accepted")
def _(t: Target) -> None:
    t.chat(
        user="u", safety_identifier="s", metadata={"a": "b"}, store=False, service_tier="auto", verbosity="low",
        prediction={"type": "content", "content": "x"}, prompt_cache_key="k", a_field_of_tomorrow={"deep": [1]},
    )  # fmt: skip


@check("shape", "an empty list of tools counts as none")
def _(t: Target) -> None:
    expect(t.chat(tools=[])["choices"][0]["message"].get("tool_calls") is None, "tool calls without tools")


@check("shape", "reasoning_effort is accepted")
def _(t: Target) -> None:
    t.chat(reasoning_effort="low")


@check("shape", "ids are unique, and created is not in the future")
def _(t: Target) -> None:
    answers = [t.chat(max_tokens=1) for _ in range(2)]
    expect(answers[0]["id"] != answers[1]["id"], "the same id twice")
    expect(all(answer["created"] <= time.time() + 5 for answer in answers), "created in the future")


@check("shape", "text beyond ASCII goes in and out whole")
def _(t: Target) -> None:
    text = "Grüße 🎉 漢字 \u0000\u001f \U0001f469\u200d\U0001f680"
    same(t.text(text, max_tokens=1, echo=True)[: len(text)].replace("\u0000", ""), text.replace("\u0000", ""), "echo")


@check("shape", "an assistant's last message can be continued")
def _(t: Target) -> None:
    messages = [{"role": "user", "content": "Count to five."}, {"role": "assistant", "content": "One, two,"}]
    t.chat(messages=messages, add_generation_prompt=False, continue_final_message=True)


@check("shape", "a completion has id, object, created, model, choices and usage")
def _(t: Target) -> None:
    answer = t.complete()
    same(answer["object"], "text_completion", "object")
    choice = answer["choices"][0]
    expect(choice.keys() >= {"text", "index", "logprobs", "finish_reason"}, f"a choice's keys are {sorted(choice)}")
    same(answer["usage"]["total_tokens"], sum(answer["usage"][f"{p}_tokens"] for p in ("prompt", "completion")), "sum")
    expect(type(answer["created"]) is int and answer["id"] and answer["model"] == t.model, "the envelope")


@check("shape", "a completion stops after 16 tokens unless told otherwise")
def _(t: Target) -> None:
    same(t.complete(max_tokens=..., ignore_eos=True)["usage"]["completion_tokens"], 16, "completion_tokens")


@check("shape", "several prompts get choices in their order")
def _(t: Target) -> None:
    prompts = ["One two three", "Alpha beta"]
    answer = t.complete(prompts)
    same([choice["index"] for choice in answer["choices"]], [0, 1], "the indices")
    same([choice["text"] for choice in answer["choices"]], [t.text(prompt) for prompt in prompts], "the texts")


@check("shape", "several prompts times n get all their choices")
def _(t: Target) -> None:
    answer = t.complete(["One two three", "Alpha beta"], n=2, max_tokens=2, temperature=1)
    same([choice["index"] for choice in answer["choices"]], [0, 1, 2, 3], "the indices")


@check("shape", "a prompt may be token ids, or lists of them")
def _(t: Target) -> None:
    ids = t.token_ids("Once upon a time")
    text = t.text("Once upon a time", add_special_tokens=False)
    same(t.text(ids), text, "the text for ids")
    answer = t.complete([ids, ids])
    same([choice["text"] for choice in answer["choices"]], [text, text], "the texts for lists of ids")


@check("shape", "echo gives the prompt back in front")
def _(t: Target) -> None:
    text = t.text("Once upon a time")
    same(t.text("Once upon a time", echo=True), "Once upon a time" + text, "the text")


@check("shape", "echo with max_tokens 0 and logprobs scores the prompt")
def _(t: Target) -> None:
    choice = t.complete("Once upon a time", echo=True, max_tokens=0, logprobs=1)["choices"][0]
    same(choice["text"], "Once upon a time", "the text")
    scores = choice["logprobs"]["token_logprobs"]
    expect(scores[0] is None and all(score <= 0 for score in scores[1:]), f"the scores are {scores}")


@check("shape", "suffix is honoured or refused, never dropped silently")
def _(t: Target) -> None:
    answer = t.post("/v1/completions", t.completion_body("def f(", suffix="return 1"))
    expect(answer.status_code in (200, 400), f"status {answer.status_code}")
    if answer.status_code == 200:
        raise Skipped("it took the suffix; whether it heeded it can't be seen")


@check("shape", "best_of equal to n is accepted")
def _(t: Target) -> None:
    t.complete(best_of=1)


@check("shape", "JSON says that it is JSON, and has a length")
def _(t: Target) -> None:
    answer = t.post("/v1/chat/completions", t.chat_body())
    expect(answer.headers["content-type"].startswith("application/json"), answer.headers["content-type"])
    expect("content-length" in answer.headers, "no content-length")
