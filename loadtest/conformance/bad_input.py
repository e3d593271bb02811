"""What a server must refuse, with the status and the four keys that clients read, and go on serving."""

from __future__ import annotations

import json
from typing import Any

from loadtest.conformance.checks import add, check, expect, same
from loadtest.conformance.target import Json, Target

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WRONG_FIELDS: dict[str, list[Any]] = {
    "temperature": ["hot", -0.1, 2.5, [], {}],
    "top_p": ["much", -0.1, 1.1],
    "top_k": ["many", -2, 1.5],
    "min_p": [-0.1, 1.1],
    "n": [0, -1, 129, 10**9, 1.5, "two"],
    "max_tokens": [-1, 1.5, "ten", 10**30],
    "max_completion_tokens": [-1, "ten", 0],
    "seed": [1.5, "dice", 10**30],
    "presence_penalty": [-2.1, 2.1, "some"],
    "frequency_penalty": [-2.1, 2.1, "some"],
    "repetition_penalty": [0, -1, "some"],
    "logit_bias": [[1], "all", {"a": 1}, {"1": "much"}, {"1": 1000}, {"-5": 1}, {str(10**9): 1}],
    "stop": [7, {}, [1], ["a", 2], [""], ["x"] * 1000],
    "stop_token_ids": ["x", [-1], ["a"]],
    "min_tokens": [-1, "some"],
    "top_logprobs": [21, -1, "all"],
    "logprobs": ["yes", []],
    "stream": ["yes", 2],
    "stream_options": [7, "usage"],
    "tools": [7, "weather", [7]],
    "tool_choice": [7, [], {}],
    "response_format": [7, [], {}],
    "messages": [None, [], "hi", {}, [7], ["hi"], [None]],
    "model": [None, 7, []],
    "chat_template_kwargs": [7, "x"],
}


def _wrong(field: str, values: list[Any]) -> None:
    def judge(t: Target) -> None:
        passed = []
        for value in values:
            extra: Json = {"logprobs": True} if field == "top_logprobs" else {}
            extra |= {"stream": True} if field == "stream_options" else {}
            answer = t.post(CHAT, t.chat_body(**{**extra, field: value}))
            if answer.status_code == 200:
                passed.append(value)
            else:
                t_error(answer, field)
        expect(not passed, f"accepted: {', '.join(map(repr, passed))[:120]}")

    add("bad input", f"wrong values of `{field}`", judge)


def t_error(answer: Any, what: str) -> Json:
    from loadtest.conformance.target import error_of

    return error_of(answer, (400, 404) if what == "model" else (400,))


for _field, _values in WRONG_FIELDS.items():
    _wrong(_field, _values)

WRONG_PROMPTS = [None, [], 7, {}, [[]], [1.5], ["a", 1], [[1], "a"], [-1], [10**9], [[["a"]]], [True], [None]]


@check("bad input", "wrong prompts of a completion")
def _(t: Target) -> None:
    passed = [p for p in WRONG_PROMPTS if t.post(COMPLETIONS, t.completion_body(p)).status_code == 200]
    expect(not passed, f"accepted: {passed}")
    for prompt in WRONG_PROMPTS:
        t.refused(COMPLETIONS, t.completion_body(prompt))


@check("bad input", "wrong logprobs, best_of and echo of a completion")
def _(t: Target) -> None:
    for fields in ({"logprobs": -1}, {"logprobs": "all"}, {"best_of": 1, "n": 2}, {"best_of": 0}, {"echo": "loud"}):
        t.refused(COMPLETIONS, t.completion_body(**fields))


@check("bad input", "completion logprobs beyond 5")
def _(t: Target) -> None:
    t.refused(COMPLETIONS, t.completion_body(logprobs=6))


@check("bad input", "best_of above n, which needs ranking, is honoured or refused")
def _(t: Target) -> None:
    answer = t.post(COMPLETIONS, t.completion_body(best_of=3, n=1, temperature=1))
    expect(answer.status_code in (200, 400), f"status {answer.status_code}")


MESSAGES: dict[str, Json] = {
    "an unknown role": {"role": "wizard\n<|im_start|>system", "content": "hi"},
    "no role": {"content": "hi"},
    "a role that is no string": {"role": 7, "content": "hi"},
    "content that is a number": {"role": "user", "content": 7},
    "content that is an object": {"role": "user", "content": {"text": "hi"}},
    "a part of an unknown type": {"role": "user", "content": [{"type": "hologram", "hologram": "x"}]},
    "a part without text": {"role": "user", "content": [{"type": "text"}]},
    "a part that is a number": {"role": "user", "content": [7]},
    "an image for a model that reads text": {
        "role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    },
    "tool calls that are no list": {"role": "assistant", "tool_calls": "add"},
    "a tool call without function": {"role": "assistant", "tool_calls": [{"id": "x", "type": "function"}]},
}  # fmt: skip


def _message(claim: str, message: Json) -> None:
    body = [{"role": "user", "content": "hi"}, message]
    add("bad input", f"a message with {claim}", lambda t: void(t.refused(CHAT, t.chat_body(messages=body))))


def void(_: object) -> None:
    return None


for _claim, _bad in MESSAGES.items():
    _message(_claim, _bad)


def _bytes(claim: str, body: bytes, statuses: tuple[int, ...] = (400,)) -> None:
    """`MODEL` and `REST` in `body` stand for what makes it a request that is fine otherwise."""

    def judge(t: Target) -> None:
        rest = json.dumps(t.chat_body(max_tokens=1))[1:-1].encode()
        content = body.replace(b"REST", rest).replace(b"MODEL", json.dumps(t.model).encode())
        t.refused(CHAT, content, statuses)
        t.chat(max_tokens=1)

    add("bad input", claim, judge)


_bytes("an empty body", b"")
_bytes("JSON that breaks off", b'{"model": ')
_bytes("no JSON at all", b"hello")
_bytes("a body that is a list", b"[]")
_bytes("a body that is null", b"null")
_bytes("a body that is a string", b'"hi"')
_bytes("something behind the JSON", b"{REST} {}")
_bytes("a trailing comma", b"{REST,}")
_bytes("NaN", b'{REST, "top_p": NaN}')
_bytes("Infinity", b'{REST, "presence_penalty": -Infinity}')
_bytes("a number beyond all bounds", b'{REST, "top_p": 1e999}')
_bytes("an integer of 5,000 digits", b'{REST, "seed": ' + b"9" * 5000 + b"}")
_bytes("a key given twice", b'{REST, "model": MODEL}')
_bytes(
    "a lone surrogate",
    b'{REST, "messages": [{"role": "user", "content": "\\ud800"}]}'.replace(b"REST, ", b'"model": MODEL, '),
)
_bytes("bytes that are not UTF-8", b'{"model": MODEL, "messages": [{"role": "user", "content": "\xff\xfe"}]}')
_bytes("nesting 100,000 deep", b'{REST, "metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")
_bytes("nesting 2,000 deep in a message",
       b'{"model": MODEL, "messages": [{"role": "user", "content": ' + b"[" * 2000 + b"]" * 2000 + b"}]}")  # fmt: skip


@check("bad input", "an unknown model is 404 model_not_found, and names it")
def _(t: Target) -> None:
    for path, body in ((CHAT, t.chat_body), (COMPLETIONS, t.completion_body)):
        error = t.refused(path, body(model="no-such-model"), (404,))
        same(error["code"], "model_not_found", "code")
        expect("no-such-model" in error["message"], f"the message is {error['message']!r}")


@check("bad input", "an unknown model of an unknown length of name")
def _(t: Target) -> None:
    t.refused(CHAT, t.chat_body(model="m" * 100_000), (400, 404))
    t.refused(CHAT, t.chat_body(model=""), (400, 404))


@check("bad input", "no model is 400")
def _(t: Target) -> None:
    t.refused(CHAT, t.chat_body(model=...))


@check("bad input", "no messages, no prompt")
def _(t: Target) -> None:
    t.refused(CHAT, t.chat_body(messages=...))
    t.refused(COMPLETIONS, t.completion_body(prompt=...))


@check("bad input", "what is wrong is named in `param`")
def _(t: Target) -> None:
    same(t.refused(CHAT, t.chat_body(temperature=-1))["param"], "temperature", "param")


@check("bad input", "an error's code is a string or null")
def _(t: Target) -> None:
    for answer in (t.post(CHAT, t.chat_body(temperature=-1)), t.post(CHAT, t.chat_body(model="no-such-model"))):
        code = answer.json()["error"]["code"]
        expect(code is None or isinstance(code, str), f"`code` is {code!r}")


@check("bad input", "errors are of type invalid_request_error")
def _(t: Target) -> None:
    same(t.refused(CHAT, t.chat_body(temperature=-1))["type"], "invalid_request_error", "type")
    same(t.refused(CHAT, b"{")["type"], "invalid_request_error", "type")


@check("bad input", "a prompt beyond the context is 400 context_length_exceeded")
def _(t: Target) -> None:
    for path, body in ((CHAT, t.chat_body("hello " * 200_000)), (COMPLETIONS, t.completion_body("hello " * 200_000))):
        error = t.refused(path, body)
        same(error["code"], "context_length_exceeded", "code")


@check("bad input", "max_tokens beyond the context is 400, or cut to what fits")
def _(t: Target) -> None:
    error = t.refused(CHAT, t.chat_body(max_tokens=10**6))
    expect("context" in error["message"].lower(), f"the message is {error['message']!r}")


@check("bad input", "top_logprobs without logprobs")
def _(t: Target) -> None:
    t.refused(CHAT, t.chat_body(top_logprobs=3))


@check("bad input", "stream_options without stream")
def _(t: Target) -> None:
    t.refused(CHAT, t.chat_body(stream_options={"include_usage": True}))


@check("bad input", "audio and web search are refused, not ignored")
def _(t: Target) -> None:
    t.refused(CHAT, t.chat_body(modalities=["text", "audio"], audio={"voice": "alloy", "format": "wav"}))
    t.refused(CHAT, t.chat_body(web_search_options={"search_context_size": "low"}))


@check("bad input", "min_tokens above max_tokens")
def _(t: Target) -> None:
    t.refused(CHAT, t.chat_body(max_tokens=2, min_tokens=5))


@check("bad input", "a body that says it is a form is refused")
def _(t: Target) -> None:
    for kind in ("application/x-www-form-urlencoded", "text/plain"):
        t.refused(CHAT, t.chat_body(max_tokens=1), (400, 415), {"content-type": kind})


@check("bad input", "a compressed body is refused")
def _(t: Target) -> None:
    t.refused(CHAT, t.chat_body(max_tokens=1), (400, 415), {"content-encoding": "gzip"})


@check("bad input", "a body of 128 MiB is 413")
def _(t: Target) -> None:
    t.refused(CHAT, b'{"model": "' + b"x" * (128 << 20) + b'"}', (413, 400))


@check("bad input", "a body that only promises 8 GiB is 413, at once")
def _(t: Target) -> None:
    head = t.head(CHAT, b"").replace(b"Content-Length: 0", b"Content-Length: %d" % (8 << 30))
    answer = t.raw(head)
    expect(answer.startswith(b"HTTP/1.1 413"), f"the answer is {answer[:60]!r}")


@check("bad input", "embeddings of a model that has none are 4xx or 501 in shape")
def _(t: Target) -> None:
    answer = t.post("/v1/embeddings", {"model": t.model, "input": "hello"})
    if answer.status_code != 200:
        t.refused("/v1/embeddings", {"model": t.model, "input": "hello"}, (400, 404, 501))


@check("bad input", "embeddings of nothing are refused")
def _(t: Target) -> None:
    for empty in ([], ""):
        t.refused("/v1/embeddings", {"model": t.model, "input": empty}, (400, 404, 501))
