"""Marked streams: reading them, writing them from a list of tokens, and continuing them at any of their marks."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from engine_worker.config import EngineConfig
from engine_worker.contract.prompt import PromptRenderer
from engine_worker.core.types import FinishReason, SampledToken
from engine_worker.serving import resume
from engine_worker.serving.generate import Generation
from engine_worker.serving.messages import Update
from engine_worker.serving.metrics import WorkerMetrics
from engine_worker.serving.prepare import Preparer
from engine_worker.serving.replies import ChatReply, CompletionReply
from engine_worker.serving.stream import Stream
from engine_worker.serving.token_text import TokenText
from tests.engine_worker.serving.fake_engine import FakeRunner

CHAT, COMPLETIONS = resume.CHAT_PATH, resume.COMPLETION_PATH
_CALL_ID = re.compile(r'"id":"call_[0-9a-f]+"')


@dataclass(slots=True)
class Marked:
    """A stream's events' data, by mark: (tokens told, events that they make), and what stands behind the last mark.

    `drafts` has for each mark how many tokens were speculated up to there, and how many of them were right.
    """

    parts: list[tuple[list[int], list[str]]] = field(default_factory=list)
    drafts: list[tuple[int, int]] = field(default_factory=list)
    tail: list[str] = field(default_factory=list)

    def events(self, num_parts: int | None = None) -> list[str]:
        """All of them, or those of the first marks."""
        events = [event for _, events in self.parts[:num_parts] for event in events]
        return events + self.tail if num_parts is None else events

    def ids(self, num_parts: int) -> list[int]:
        return [token_id for ids, _ in self.parts[:num_parts] for token_id in ids]


def read_marked(text: str) -> Marked:
    """New ids of tool calls are left out: each worker makes its own for the calls that it begins."""
    frames = text.split("\n\n")
    assert frames.pop() == "", "the stream ends inside a frame"
    result = Marked()
    for frame in frames:
        mark, data = None, frame
        if frame.startswith(": t "):
            mark, _, data = frame.partition("\n")
        assert data.startswith("data: "), frame
        assert "\n" not in data
        result.tail.append(_CALL_ID.sub('"id":"call_"', data.removeprefix("data: ")))
        if mark is not None:
            ids, _, told = mark[4:].partition(";")
            result.parts.append(([int(part) for part in ids.split(",") if part], result.tail))
            tried, _, right = told.partition(",")
            before = result.drafts[-1] if result.drafts else (0, 0)
            result.drafts.append((int(tried), int(right)) if told else before)
            result.tail = []
    return result


def asked(body: dict[str, Any]) -> dict[str, Any]:
    return {"stream": True, "stream_options": {"include_usage": True}, **body}


def order(path: str, body: dict[str, Any], stream: Marked, num_parts: int) -> dict[str, Any]:
    """To go on behind the first `num_parts` marks of `stream`, the whole answer to `body`."""
    first, last = json.loads(stream.events()[0]), json.loads(stream.tail[-2])
    drafts, accepted = [(0, 0), *stream.drafts[:num_parts]][-1]
    return {
        "path": path,
        "request": asked(body),
        "id": first["id"],
        "created": first["created"],
        "model": first["model"],
        "output_ids": stream.ids(num_parts),
        "cached_tokens": last["usage"]["prompt_tokens_details"]["cached_tokens"],
        "draft_tokens": drafts,
        "accepted_tokens": accepted,
    }


def ask(http: httpx.Client, path: str, body: dict[str, Any], wanted: str = "all") -> httpx.Response:
    response = http.post(path, json=asked(body), headers={"x-warmgate-marks": wanted})
    assert response.status_code == 200, response.text
    return response


def check_continuations(http: httpx.Client, path: str, body: dict[str, Any], every: int = 1) -> Marked:
    """From (every n-th of) its marks on, a worker's answer to `body` is continued as it went on by itself."""
    whole = read_marked(ask(http, path, body).text)
    assert whole.tail[-1] == "[DONE]"
    for num_parts in range(1, len(whole.parts) + 1, every):
        sent = order(path, body, whole, num_parts)
        rest = http.post("/internal/resume", json=sent, headers={"x-warmgate-marks": "all"})
        assert rest.status_code == 200, rest.text
        going_on = read_marked(rest.text)
        got, wanted = whole.events(num_parts) + going_on.events(), whole.events()
        assert _rough(got) == _rough(wanted), f"behind {sent['output_ids']}"
    return whole


def _rough(events: list[str]) -> list[str]:
    """Without the log probabilities: a batch of another shape adds in another order, and rounds otherwise."""
    return [re.sub(r"-?\d+\.\d+", "#", event) for event in events]


class WrittenExchange:
    """Keeps what is written to it."""

    def __init__(self) -> None:
        self.body = b""

    async def start(self, status: int, headers: Any) -> None:
        assert status == 200

    async def write(self, data: bytes) -> None:
        self.body += data

    end = write


class _Call:
    """`tokens` as news, in batches of `sizes` (the last one again and again). For each, three were speculated and one
    of them was right."""

    def __init__(self, tokens: Sequence[int], sizes: Sequence[int], reason: FinishReason) -> None:
        updates = [
            Update(
                "r", SampledToken(token_id, -0.1 * (token_id % 7), ((token_id, -0.5), (3, -2.5))), None, 5,
                num_draft_tokens=3 * number, num_accepted_tokens=number,
            )
            for number, token_id in enumerate(tokens, 1)
        ]  # fmt: skip
        updates[-1] = msgspec.structs.replace(updates[-1], finish_reason=reason)
        self._updates = iter(updates)
        self._sizes = itertools.chain(sizes, itertools.repeat(sizes[-1]))

    async def news(self) -> list[tuple[int, Update]]:
        return self.take()

    def take(self) -> list[tuple[int, Update]]:
        batch = list(itertools.islice(self._updates, next(self._sizes)))
        assert batch, "the answer wants more tokens than there are"
        return [(0, update) for update in batch]

    def listen(self, listener: Any) -> None:
        pass

    def finish(self, index: int) -> None:
        pass


class Bench:
    """Writes streams as a worker does, of tokens that it is given."""

    def __init__(self) -> None:
        runner = FakeRunner(EngineConfig(model="fake"))
        self.eos = runner.eos
        self.renderer = PromptRenderer(runner.tokenizer)
        self.preparer = Preparer(runner.info, self.renderer, ("fake",))
        self.tokens = TokenText(self.renderer.tokenizer)
        self.metrics = WorkerMetrics("fake")

    async def stream(
        self, path: str, body: dict[str, Any], tokens: Sequence[int], sizes: Sequence[int] = (1,),
        reason: FinishReason = FinishReason.STOP, sent: dict[str, Any] | None = None,
    ) -> Marked:  # fmt: skip
        """The answer of these tokens, or what is left of it after the order `sent`."""
        told = {"path": path, "request": asked(body), "id": "one", "created": 7, "model": "fake", "output_ids": []}
        read = resume.read_order(json.dumps(sent or told).encode())
        prepared = resume.prepare(self.preparer, read)
        shape = ChatReply if path == CHAT else CompletionReply
        reply = shape(
            read.id, read.created, prepared.model, self.tokens, prepared.num_logprobs, prepared.include_usage,
            None, prepared.tools,
        )  # fmt: skip
        exchange = WrittenExchange()
        call = _Call(tokens[len(read.output_ids) :], sizes, reason)
        with self.metrics.request(prepared, 0.0) as metrics:
            marks = resume.marks_for(prepared, b"all")
            generation = Generation(prepared, self.tokens, metrics, marks)
            generation.replay(reply)
            await Stream(exchange, generation, call, reply, is_opened=sent is not None).run()  # type: ignore[arg-type]
        return read_marked(exchange.body.decode())
