"""Event streams: what comes in which chunk, once, and never."""

from __future__ import annotations

from loadtest.conformance.checks import check, expect, same
from loadtest.conformance.shape import LONG
from loadtest.conformance.target import Json, Target, deltas, finishes, joined

USAGE = {"include_usage": True}
EMOJI = "Grüße 🎉 漢字 👩‍🚀"


def forced(text: str) -> Json:
    """A response format that leaves the model one answer: `text` as a JSON string in an object."""
    schema = {
        "type": "object",
        "properties": {"t": {"type": "string", "enum": [text]}},
        "required": ["t"],
        "additionalProperties": False,
    }
    return {"type": "json_schema", "json_schema": {"name": "forced", "strict": True, "schema": schema}}


@check("streams", "every chunk has the same id, created and model, and object chat.completion.chunk")
def _(t: Target) -> None:
    chunks = t.chat_chunks(stream_options=USAGE)
    for key in ("id", "created", "model"):
        same(len({chunk[key] for chunk in chunks}), 1, f"the number of different values of `{key}`")
    same({chunk["object"] for chunk in chunks}, {"chat.completion.chunk"}, "object")
    same(chunks[0]["model"], t.model, "model")


@check("streams", "role comes in the first delta and in no other")
def _(t: Target) -> None:
    found = deltas(t.chat_chunks())
    same(found[0].get("role"), "assistant", "the first delta's role")
    expect(not any("role" in delta for delta in found[1:]), "a role in a later delta")


@check("streams", "finish_reason comes once, in the choice's last chunk")
def _(t: Target) -> None:
    chunks = t.chat_chunks()
    same(len(finishes(chunks)), 1, "the number of finish_reasons")
    expect(chunks[-1]["choices"][0]["finish_reason"] is not None, "a chunk behind the finish_reason")
    expect(all("finish_reason" in chunk["choices"][0] for chunk in chunks), "a chunk without the key")


@check("streams", "no usage and no chunk without choices unless asked for")
def _(t: Target) -> None:
    for options in ({}, {"stream_options": {"include_usage": False}}, {"stream_options": None}):
        chunks = t.chat_chunks(**options)
        expect(all(chunk["choices"] for chunk in chunks), "a chunk without choices")
        expect(all(chunk.get("usage") is None for chunk in chunks), "a usage")


@check("streams", "include_usage: the last chunk has usage and no choices, all others usage: null")
def _(t: Target) -> None:
    chunks = t.chat_chunks(stream_options=USAGE)
    same(chunks[-1]["choices"], [], "the last chunk's choices")
    usage = chunks[-1]["usage"]
    same(usage["total_tokens"], usage["prompt_tokens"] + usage["completion_tokens"], "total_tokens")
    expect(all(chunk.get("usage", 0) is None for chunk in chunks[:-1]), "a chunk without `usage: null`")
    expect(all(len(chunk["choices"]) == 1 for chunk in chunks[:-1]), "another chunk without choices")


@check("streams", "the usage of a stream is that of the whole answer, cached tokens included")
def _(t: Target) -> None:
    whole = t.chat(LONG)["usage"]
    usages = [t.chat_chunks(LONG, stream_options=USAGE)[-1]["usage"] for _ in range(3)]
    usage = max(usages, key=lambda found: found["prompt_tokens_details"]["cached_tokens"])
    for key in ("prompt_tokens", "completion_tokens"):
        same(usage[key], whole[key], key)
    expect(usage["prompt_tokens_details"]["cached_tokens"] > 0, "no cached tokens of a prompt sent twice")


@check("streams", "the deltas join to the answer that is not streamed")
def _(t: Target) -> None:
    chunks = t.chat_chunks(max_tokens=24)
    whole = t.chat(max_tokens=24)["choices"][0]
    same(joined(chunks), whole["message"]["content"], "the text")
    same(finishes(chunks), [whole["finish_reason"]], "finish_reason")


@check("streams", "no delta has null or empty tool calls, or keys that are null")
def _(t: Target) -> None:
    for delta in deltas(t.chat_chunks()):
        expect(not any(key in delta for key in ("tool_calls", "function_call")), f"a delta has {sorted(delta)}")
        expect(delta.get("content", "") is not None or "role" in delta, "content: null behind the first delta")


@check("streams", "with n > 1 choices begin in their order, and each has one role and one finish")
def _(t: Target) -> None:
    chunks = t.chat_chunks(n=3, temperature=1, seed=4)
    begun = dict.fromkeys(choice["index"] for chunk in chunks for choice in chunk["choices"])
    same(list(begun), [0, 1, 2], "the order of the first chunks")
    for index in range(3):
        same(sum("role" in delta for delta in deltas(chunks, index)), 1, f"roles of choice {index}")
        same(len(finishes(chunks, index)), 1, f"finishes of choice {index}")


@check("streams", "with n > 1 and include_usage there is one usage, of all choices")
def _(t: Target) -> None:
    chunks = t.chat_chunks(n=2, max_tokens=3, ignore_eos=True, temperature=1, stream_options=USAGE)
    same(sum(chunk.get("usage") is not None for chunk in chunks), 1, "the number of usages")
    same(chunks[-1]["usage"]["completion_tokens"], 6, "completion_tokens")


@check("streams", "logprobs of a stream are those of the whole answer")
def _(t: Target) -> None:
    asked = {"logprobs": True, "top_logprobs": 2, "max_tokens": 6}
    whole = t.chat(**asked)["choices"][0]["logprobs"]["content"]
    parts = [c["logprobs"] for chunk in t.chat_chunks(**asked) for c in chunk["choices"] if c.get("logprobs")]
    streamed = [token for part in parts for token in part["content"]]
    same([token["token"] for token in streamed], [token["token"] for token in whole], "the tokens")
    expect(all(len(token["top_logprobs"]) == 2 for token in streamed), "not two top_logprobs each")


@check("streams", "a character of several tokens is never cut")
def _(t: Target) -> None:
    chunks = t.chat_chunks(max_tokens=64, response_format=forced(EMOJI))
    expect("\ufffd" not in joined(chunks), "a replacement character")
    expect(EMOJI in joined(chunks), f"the text is {joined(chunks)!r}")


@check("streams", "nothing of a stop string slips out, however it is cut into tokens")
def _(t: Target) -> None:
    text = "alpha beta gamma delta"
    chunks = t.chat_chunks(max_tokens=64, response_format=forced(text), stop=["eta gam"])
    same(joined(chunks).partition("alpha ")[2], "b", "what follows `alpha `")
    same(finishes(chunks), ["stop"], "finish_reason")


@check("streams", "text held back for a stop string that never comes is sent in the end")
def _(t: Target) -> None:
    chunks = t.chat_chunks(max_tokens=64, response_format=forced("alpha beta"), stop=["beta gamma"])
    expect('"alpha beta"' in joined(chunks), f"the text is {joined(chunks)!r}")


@check("streams", "a completion's stream has one shape, one finish and the whole text")
def _(t: Target) -> None:
    chunks = t.completion_chunks()
    same({chunk["object"] for chunk in chunks}, {"text_completion"}, "object")
    same(len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}), 1, "different envelopes")
    same(joined(chunks), t.text(), "the text")
    same(len(finishes(chunks)), 1, "the number of finish_reasons")


@check("streams", "a completion's stream has its usage last, when asked for, and none otherwise")
def _(t: Target) -> None:
    chunks = t.completion_chunks(stream_options=USAGE)
    expect(chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] > 0, f"the end is {chunks[-1]}")
    expect(all(chunk.get("usage", 0) is None for chunk in chunks[:-1]), "a chunk without `usage: null`")
    expect(all(chunk.get("usage") is None for chunk in t.completion_chunks()), "a usage that nobody asked for")


@check("streams", "a completion's stream of several prompts has all choices")
def _(t: Target) -> None:
    chunks = t.completion_chunks(["One two three", "Alpha beta"], max_tokens=3)
    for index in range(2):
        same(len(finishes(chunks, index)), 1, f"finishes of choice {index}")


@check("streams", "a completion's stream can echo")
def _(t: Target) -> None:
    same(joined(t.completion_chunks("Once upon", echo=True)), t.text("Once upon", echo=True), "the text")


@check("streams", "a stream says that it must not be kept or transformed, and has no length")
def _(t: Target) -> None:
    answer = t.post("/v1/chat/completions", t.chat_body(stream=True))
    expect("content-length" not in answer.headers, "a content-length")
    expect("content-encoding" not in answer.headers, "a content-encoding")


@check("streams", "what is wrong with a streamed request is said by the status, in JSON")
def _(t: Target) -> None:
    t.refused("/v1/chat/completions", t.chat_body(stream=True, temperature="hot"))
    t.refused("/v1/chat/completions", t.chat_body(stream=True, model="no-such-model"), (404,))
    t.refused("/v1/completions", t.completion_body(stream=True, max_tokens=10**9))
