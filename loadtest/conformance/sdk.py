"""OpenAI's own Python client, where it is installed, and what clients do around a request."""

from __future__ import annotations

import json
from typing import Any

from loadtest.conformance.checks import Skipped, check, expect, same
from loadtest.conformance.streams import forced
from loadtest.conformance.structure import NAMED, TOOLS, is_place
from loadtest.conformance.target import Target

HELLO: Any = [{"role": "user", "content": "Say hello."}]


class _Client:
    """The SDK against the target, with the number of requests that it made."""

    def __init__(self, t: Target) -> None:
        try:
            import openai
        except ImportError:
            raise Skipped("the package openai is not installed") from None
        self.openai = openai
        self.api = openai.OpenAI(base_url=f"{t.root}/v1", api_key=t.api_key, timeout=t.timeout_s, max_retries=2)

    def __enter__(self) -> _Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.api.close()


@check("sdk", "chat, and its raw response's request id")
def _(t: Target) -> None:
    with _Client(t) as c:
        raw = c.api.chat.completions.with_raw_response.create(model=t.model, messages=HELLO, max_tokens=5)
        expect(raw.parse().choices[0].message.content is not None, "no content")
        expect(raw.headers.get("x-request-id"), "no request id")


@check("sdk", "a stream, iterated")
def _(t: Target) -> None:
    with _Client(t) as c:
        chunks = list(c.api.chat.completions.create(model=t.model, messages=HELLO, max_tokens=5, stream=True))
        expect("".join(chunk.choices[0].delta.content or "" for chunk in chunks), "no text")


@check("sdk", "the stream helper's snapshot is the whole answer")
def _(t: Target) -> None:
    with _Client(t) as c:
        with c.api.chat.completions.stream(
            model=t.model, messages=HELLO, max_tokens=200, temperature=0, stream_options={"include_usage": True}
        ) as stream:
            for _event in stream:
                pass
            final = stream.get_final_completion()
        same(final.choices[0].message.content, t.chat_text("Say hello.", max_tokens=200), "the text")
        expect(final.usage is not None, "no usage")


@check("sdk", "the stream helper puts several choices together")
def _(t: Target) -> None:
    with _Client(t) as c:
        with c.api.chat.completions.stream(
            model=t.model, messages=HELLO, max_tokens=200, n=3, seed=1, temperature=0.2
        ) as stream:
            final = stream.get_final_completion()
        same(len(final.choices), 3, "the number of choices")


@check("sdk", "the stream helper puts a tool call together")
def _(t: Target) -> None:
    with _Client(t) as c:
        with c.api.chat.completions.stream(
            model=t.model,
            messages=HELLO,
            max_tokens=200,
            temperature=0,
            tools=TOOLS,
            tool_choice=NAMED,  # type: ignore[arg-type]
        ) as stream:
            final = stream.get_final_completion()
        calls = final.choices[0].message.tool_calls or []
        same([call.function.name for call in calls], ["get_time"], "the calls")
        is_place(calls[0].function.arguments)


@check("sdk", "structured output")
def _(t: Target) -> None:
    with _Client(t) as c:
        answer = c.api.chat.completions.create(
            model=t.model,
            messages=HELLO,
            max_tokens=60,
            response_format=forced("hello"),  # type: ignore[call-overload]
        )
        same(json.loads(answer.choices[0].message.content), {"t": "hello"}, "the answer")


@check("sdk", "models, completions and logprobs")
def _(t: Target) -> None:
    with _Client(t) as c:
        expect(t.model in [model.id for model in c.api.models.list()], "the model is not listed")
        same(c.api.models.retrieve(t.model).id, t.model, "the retrieved model")
        answer = c.api.completions.create(model=t.model, prompt="Once", max_tokens=3, logprobs=2, temperature=0)
        expect(answer.choices[0].logprobs and answer.choices[0].logprobs.tokens, "no logprobs")


def _raises(claim: str, error: str, **fields: Any) -> None:
    @check("sdk", claim)
    def _(t: Target) -> None:
        with _Client(t) as c:
            try:
                c.api.chat.completions.create(**{"model": t.model, "messages": HELLO, **fields})
            except c.openai.APIStatusError as raised:
                same(type(raised).__name__, error, "the exception")
                expect(isinstance(raised.body, dict) and raised.body.get("message"), f"its body is {raised.body!r}")
                expect(raised.request_id, "it has no request id")
                return
            expect(False, "nothing was raised")


_raises("a wrong value is BadRequestError", "BadRequestError", temperature=9)
_raises("an unknown model is NotFoundError", "NotFoundError", model="no-such-model")
_raises("a long prompt is BadRequestError", "BadRequestError", messages=[{"role": "user", "content": "hi " * 200_000}])


@check("sdk", "the clients' own headers are taken")
def _(t: Target) -> None:
    headers = {
        "x-stainless-read-timeout": "60", "x-stainless-retry-count": "1", "x-stainless-lang": "python",
        "x-stainless-timeout": "60", "openai-organization": "o", "openai-project": "p", "openai-beta": "x",
        "user-agent": "OpenAI/Python 1.0", "accept": "application/json", "accept-encoding": "gzip, deflate, br, zstd",
    }  # fmt: skip
    t.ok("/v1/chat/completions", t.chat_body(max_tokens=2), headers)


@check("sdk", "a request with many header values and a query is taken")
def _(t: Target) -> None:
    t.ok("/v1/chat/completions?api-version=2024-10-21", t.chat_body(max_tokens=2), {"cookie": "a=b"})
