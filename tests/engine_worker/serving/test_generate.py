"""Streams of several choices, from news in any order."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine_worker.core.types import FinishReason, SampledToken
from engine_worker.serving.generate import Generation
from engine_worker.serving.messages import Update
from engine_worker.serving.replies import ChatReply, CompletionReply
from engine_worker.serving.stream import Stream
from tests.engine_worker.serving.marked import Bench, WrittenExchange

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "n": 3, "stream": True}
TEXT = {"model": "fake", "prompt": ["one", "two", "three"], "stream": True}


class News:
    """A call whose news come in these batches."""

    def __init__(self, batches: list[list[tuple[int, Update]]]) -> None:
        self._batches = iter(batches)

    async def news(self) -> list[tuple[int, Update]]:
        return self.take()

    def take(self) -> list[tuple[int, Update]]:
        return next(self._batches)

    def listen(self, listener: Any) -> None:
        pass

    def finish(self, index: int) -> None:
        pass


def said(token_id: int, reason: FinishReason | None = None) -> Update:
    return Update("r", SampledToken(token_id), reason, 0)


async def chunks(body: dict[str, Any], batches: list[list[tuple[int, Update]]]) -> list[dict[str, Any]]:
    """The choices of the stream's chunks, one each."""
    bench, exchange = Bench(), WrittenExchange()
    is_chat = "messages" in body
    prepared = (bench.preparer.chat if is_chat else bench.preparer.completion)(json.dumps(body).encode())
    reply = (ChatReply if is_chat else CompletionReply)("one", 7, "fake", bench.tokens, None, False)
    with bench.metrics.request(prepared, 0.0) as metrics:
        generation = Generation(prepared, bench.tokens, metrics)
        await Stream(exchange, generation, News(batches), reply).run()  # type: ignore[arg-type]
    frames = exchange.body.decode().split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.removeprefix("data: "))["choices"][0] for frame in frames[:-2]]


@pytest.mark.parametrize("body", [CHAT, TEXT], ids=["chat", "completion"])
async def test_choices_begin_in_their_order_whatever_order_their_tokens_come_in(body: dict[str, Any]) -> None:
    """openai-python's helper for chats puts a choice that it meets for the first time at the end of its list."""
    end = FinishReason.LENGTH
    found = await chunks(
        body, [[(2, said(70))], [(0, said(71))], [(2, said(72, end))], [(1, said(73, end)), (0, said(74, end))]]
    )
    assert list(dict.fromkeys(choice["index"] for choice in found)) == [0, 1, 2]
    texts = ["", "", ""]
    for choice in found:
        texts[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    assert [len(text) for text in texts] == [2, 1, 2]
    assert [choice["index"] for choice in found if choice["finish_reason"]] == [2, 1, 0]
    roles = [choice["index"] for choice in found if "role" in choice.get("delta", {})]
    assert roles == ([0, 1, 2] if body is CHAT else [])


async def test_a_choice_whose_first_token_makes_no_text_begins_all_the_same() -> None:
    end = FinishReason.LENGTH
    first, *rest = Bench().renderer.tokenizer.encode("😀").ids
    later = [[(0, said(token_id))] for token_id in rest]
    found = await chunks(
        TEXT, [[(0, said(first)), (1, said(71, end))], *later, [(0, said(72, end)), (2, said(73, end))]]
    )
    assert [choice["index"] for choice in found] == [0, 1, 0, 0, 2]
    assert [choice["text"] for choice in found][:3] == ["", Bench().tokens.string_of(71), "😀"]
