"""Parameters of sampling do what they say, with OpenAI's names and those of vLLM's users."""

from __future__ import annotations

import math
import secrets

from loadtest.conformance.checks import check, expect, same
from loadtest.conformance.streams import forced
from loadtest.conformance.target import Json, Target, joined

WARM: Json = {"temperature": 1.0, "max_tokens": 16, "ignore_eos": True}


@check("sampling", "temperature 0 gives the same answer twice")
def _(t: Target) -> None:
    same(t.chat_text(), t.chat_text(), "the second answer")


@check("sampling", "a seed gives the same answer twice")
def _(t: Target) -> None:
    same(t.text(**WARM, seed=7), t.text(**WARM, seed=7), "the second answer")


@check("sampling", "a seed gives a stream the same answer, too")
def _(t: Target) -> None:
    same(joined(t.completion_chunks(**WARM, seed=7)), t.text(**WARM, seed=7), "the stream")


@check("sampling", "other seeds give other answers")
def _(t: Target) -> None:
    expect(len({t.text(**WARM, seed=seed) for seed in range(3)}) > 1, "three seeds, one answer")


@check("sampling", "seeds may be 0 and negative")
def _(t: Target) -> None:
    t.chat(seed=0)
    t.chat(seed=-1)


@check("sampling", "the choices of one seeded request differ")
def _(t: Target) -> None:
    texts = {choice["text"] for choice in t.complete(**WARM, n=4, seed=3)["choices"]}
    expect(len(texts) > 1, "four choices, one text")


@check("sampling", "without a seed, requests differ")
def _(t: Target) -> None:
    expect(len({t.text(**WARM) for _ in range(4)}) > 1, "four requests, one text")


def _greedy(name: str, value: float) -> None:
    @check("sampling", f"{name} {value:g} is greedy at any temperature")
    def _(t: Target) -> None:
        same(t.text(**{**WARM, name: value}), t.text(ignore_eos=True, max_tokens=16), "the text")


_greedy("top_k", 1)
_greedy("top_p", 1e-9)
_greedy("min_p", 1)


@check("sampling", "top_p 0 is allowed, and greedy")
def _(t: Target) -> None:
    same(t.text(**WARM, top_p=0), t.text(ignore_eos=True, max_tokens=16), "the text")


@check("sampling", "top_k 0 and -1 mean all tokens")
def _(t: Target) -> None:
    for top_k in (0, -1):
        t.chat(top_k=top_k, temperature=1)


@check("sampling", "logit_bias 100 forces a token, -100 bans it")
def _(t: Target) -> None:
    [token] = t.token_ids(" the")[:1]
    text = t.text(logit_bias={str(token): 100}, max_tokens=4)
    same(text, " the" * 4, "the text with a forced token")
    banned = t.text(" the the the the the", logit_bias={str(token): -100}, max_tokens=8)
    expect(" the" not in banned.replace(" them", "").replace(" then", "").replace(" these", ""), f"{banned!r}")


def _penalty(name: str, value: float) -> None:
    @check("sampling", f"{name} keeps a text from repeating itself")
    def _(t: Target) -> None:
        prompt = "la la la la la la la la la la la la la la"
        plain, penalised = t.text(prompt, max_tokens=16), t.text(prompt, max_tokens=16, **{name: value})
        expect(plain != penalised, "the text is the same with and without")


_penalty("frequency_penalty", 2)
_penalty("presence_penalty", 2)
_penalty("repetition_penalty", 1.8)


@check("sampling", "stop may be a string: the text ends before it")
def _(t: Target) -> None:
    text = t.text(max_tokens=24)
    mark = text[len(text) // 2 : len(text) // 2 + 4]
    choice = t.complete(max_tokens=24, stop=mark)["choices"][0]
    same((choice["text"], choice["finish_reason"]), (text[: text.index(mark)], "stop"), "text and finish_reason")


@check("sampling", "stop may be a list of up to four: the first to come counts")
def _(t: Target) -> None:
    text = t.text(max_tokens=24)
    marks = ["\u2603 never", text[12:15], text[6:9]]
    first = min(text.index(mark) for mark in marks[1:])
    same(t.text(max_tokens=24, stop=[*marks, "never either"]), text[:first], "the text")


@check("sampling", "stop strings beyond ASCII work")
def _(t: Target) -> None:
    answer = t.chat(max_tokens=64, response_format=forced("日本語です🎉"), stop="語で")["choices"][0]
    expect(answer["message"]["content"].endswith("日本"), f"the text is {answer['message']['content']!r}")
    same(answer["finish_reason"], "stop", "finish_reason")


@check("sampling", "include_stop_str_in_output keeps the stop string")
def _(t: Target) -> None:
    text = t.text(max_tokens=24)
    mark = text[8:12]
    end = text.index(mark) + len(mark)
    same(t.text(max_tokens=24, stop=mark, include_stop_str_in_output=True), text[:end], "the text")


@check("sampling", "stop_token_ids stop")
def _(t: Target) -> None:
    text = t.text(max_tokens=12)
    ids = t.token_ids(text)
    choice = t.complete(max_tokens=12, stop_token_ids=[ids[3]])["choices"][0]
    same(choice["finish_reason"], "stop", "finish_reason")
    expect(text.startswith(choice["text"]) and len(choice["text"]) < len(text), f"the text is {choice['text']!r}")


@check("sampling", "the stop string that ended an answer is named in stop_reason")
def _(t: Target) -> None:
    mark = t.text(max_tokens=24)[8:12]
    same(t.complete(max_tokens=24, stop=[mark, "\u2603"])["choices"][0].get("stop_reason", 0), mark, "stop_reason")
    chunks = t.completion_chunks(max_tokens=24, stop=[mark])
    same(chunks[-1]["choices"][0].get("stop_reason", 0), mark, "a stream's stop_reason")


@check("sampling", "stop_reason is null where nothing stopped the answer")
def _(t: Target) -> None:
    same(t.chat(max_tokens=2, ignore_eos=True)["choices"][0].get("stop_reason", 0), None, "stop_reason")


@check("sampling", "ignore_eos and min_tokens make answers as long as asked")
def _(t: Target) -> None:
    same(t.chat("Say OK.", max_tokens=20, ignore_eos=True)["usage"]["completion_tokens"], 20, "with ignore_eos")
    same(t.chat("Say OK.", max_tokens=20, min_tokens=20)["usage"]["completion_tokens"], 20, "with min_tokens")


@check("sampling", "allowed_token_ids and bad_words are honoured")
def _(t: Target) -> None:
    [token] = t.token_ids(" the")[:1]
    same(t.text(allowed_token_ids=[token], max_tokens=3), " the the the", "the text")
    word = t.text(max_tokens=6).split()[0]
    expect(word not in t.text(max_tokens=6, bad_words=[word]).split(), f"{word!r} is in the text")


@check("sampling", "chat logprobs: token, logprob, bytes, and as many alternatives as asked, likeliest first")
def _(t: Target) -> None:
    for num_top in (0, 1, 5, 20):
        content = t.chat(logprobs=True, top_logprobs=num_top, max_tokens=3)["choices"][0]["logprobs"]["content"]
        for token in content:
            expect(token.keys() >= {"token", "logprob", "bytes", "top_logprobs"}, f"its keys are {sorted(token)}")
            expect(token["logprob"] <= 0 and math.isfinite(token["logprob"]), f"logprob is {token['logprob']}")
            same(len(token["top_logprobs"]), num_top, "the number of top_logprobs")
            scores = [entry["logprob"] for entry in token["top_logprobs"]]
            same(scores, sorted(scores, reverse=True), "their order")


@check("sampling", "a greedy token is the likeliest, and its bytes are its text")
def _(t: Target) -> None:
    answer = t.chat(logprobs=True, top_logprobs=1)["choices"][0]
    content = answer["logprobs"]["content"]
    expect(all(token["token"] == token["top_logprobs"][0]["token"] for token in content), "another token")
    same(bytes(b for token in content for b in token["bytes"]).decode()[:10], answer["message"]["content"][:10], "text")


@check("sampling", "there is one entry of logprobs for each token of the answer")
def _(t: Target) -> None:
    answer = t.chat(logprobs=True, max_tokens=7, ignore_eos=True)
    same(len(answer["choices"][0]["logprobs"]["content"]), answer["usage"]["completion_tokens"], "the number")


@check("sampling", "completion logprobs: four lists of one length, offsets into the text")
def _(t: Target) -> None:
    for num_top in (0, 1, 5):
        choice = t.complete(logprobs=num_top, max_tokens=4, ignore_eos=True)["choices"][0]
        found = choice["logprobs"]
        lists = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        same({len(found[name]) for name in lists if found[name] is not None}, {4}, "the lists' lengths")
        for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
            same(choice["text"][offset : offset + len(token)], token, f"the text at {offset}")


@check("sampling", "prompt_logprobs score the prompt")
def _(t: Target) -> None:
    scores = t.complete(prompt_logprobs=1, max_tokens=1)["choices"][0]["prompt_logprobs"]
    expect(scores[0] is None and all(scores[1:]), "not one entry a token")


@check("sampling", "cache_salt is accepted, and keeps caches apart")
def _(t: Target) -> None:
    text = "Some long enough prompt about nothing in particular, with many words. " * 12
    run = secrets.token_hex(8)  # an engine may have been asked before
    t.chat(text, max_tokens=1, cache_salt=f"{run} one")
    usage = t.chat(text, max_tokens=1, cache_salt=f"{run} another")["usage"]
    same((usage.get("prompt_tokens_details") or {}).get("cached_tokens"), 0, "cached_tokens under another salt")


@check("sampling", "skip_special_tokens and chat_template_kwargs are accepted")
def _(t: Target) -> None:
    t.chat(skip_special_tokens=False, chat_template_kwargs={"enable_thinking": False})
