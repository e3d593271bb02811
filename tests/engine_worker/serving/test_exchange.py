"""One exchange with a scripted client: limits while reading, and a client that leaves or stops reading."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from dataclasses import replace
from typing import Any

import pytest

from engine_worker.contract.errors import ApiError
from engine_worker.core.types import FinishReason, SampledToken
from engine_worker.serving import http
from engine_worker.serving import stream as stream_module
from engine_worker.serving.engine_client import EngineClient
from engine_worker.serving.generate import Generation
from engine_worker.serving.http import ClientGone, Exchange
from engine_worker.serving.messages import Add, Cancel, Stats, Step, ToEngine, Update
from engine_worker.serving.metrics import WorkerMetrics
from engine_worker.serving.prepare import PreparedCall
from engine_worker.serving.replies import ChatReply
from engine_worker.serving.stream import Stream
from engine_worker.serving.token_text import TokenText
from tests.engine_worker.serving.calls import prepared_call
from tests.engine_worker.serving.fake_engine import make_tokenizer

TOKENS = TokenText(make_tokenizer())


class Client:
    """Sends scripted messages, then stays silent until told to leave.

    `direct`: its server can write at once (http.DirectWriter); `is_open` says whether it may at the moment.
    """

    def __init__(self, *messages: dict[str, Any], reads: bool = True, direct: bool = False) -> None:
        self._messages = deque(messages)
        self._left = asyncio.Event()
        self._reads = reads
        self.got: list[dict[str, Any]] = []
        self.got_more = asyncio.Event()
        self.aborted = False
        self.is_open = True
        self.num_direct = 0
        extensions: dict[str, Any] = {"warmgate.abort": {"call": self._abort}}
        if direct:
            extensions["warmgate.write"] = self
        scope = {"method": "POST", "path": "/", "headers": [], "extensions": extensions}
        self.exchange = Exchange(scope, self._receive, self._send)

    def write(self, data: bytes) -> None:
        self.num_direct += 1
        self._take({"type": "http.response.body", "body": data, "more_body": True})

    def _abort(self) -> None:
        self.aborted = True

    @property
    def has_sent_all(self) -> bool:
        return not self._messages

    def leave(self) -> None:
        self._left.set()

    async def _receive(self) -> dict[str, Any]:
        if not self._messages:
            await self._left.wait()
            return {"type": "http.disconnect"}
        return self._messages.popleft()

    async def _send(self, message: dict[str, Any]) -> None:
        if not self._reads:
            await asyncio.Event().wait()
        self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        self.got.append(message)
        self.got_more.set()

    async def until_got(self, mark: bytes) -> None:
        while not any(mark in message.get("body", b"") for message in self.got):
            self.got_more.clear()
            await self.got_more.wait()


def part(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


async def test_a_body_in_parts() -> None:
    assert await Client(part(b"ab", True), part(b"", True), part(b"c")).exchange.body() == b"abc"


async def test_a_body_that_grows_too_large() -> None:
    with pytest.raises(ApiError) as caught:
        await Client(part(b"abc", True), part(b"def")).exchange.body(limit=5)
    assert caught.value.status == 413


async def test_a_body_that_stops_arriving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_IDLE_S", 0.01)
    with pytest.raises(ApiError) as caught:
        await Client(part(b"abc", True)).exchange.body()
    assert caught.value.status == 408


async def test_a_client_that_sends_too_much_still_gets_the_answer() -> None:
    """The error is sent whole before the rest of the body is read and thrown away, and the connection closes then."""
    client = Client(part(b"x" * 10, True), part(b"y" * 10, True), part(b"z"))
    with pytest.raises(ApiError) as caught:
        await client.exchange.body(limit=5)
    await client.exchange.fail(caught.value)
    start, body, end = client.got
    assert (b"connection", b"close") in start["headers"]
    assert body["body"] == caught.value.body()
    assert end == {"type": "http.response.body", "body": b"", "more_body": False}
    assert client.has_sent_all


async def test_a_client_that_leaves_inside_its_body() -> None:
    client = Client(part(b"abc", True))
    client.leave()
    with pytest.raises(ClientGone):
        await client.exchange.body()


async def test_work_ends_when_the_client_leaves() -> None:
    client = Client(part(b""))
    await client.exchange.body()
    started, cleaned = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    serving = asyncio.create_task(client.exchange.while_connected(work()))
    await started.wait()
    client.leave()
    with pytest.raises(ClientGone):
        await serving
    assert cleaned.is_set()


async def test_work_that_fails_says_so() -> None:
    client = Client(part(b""))
    await client.exchange.body()

    async def work() -> None:
        raise ApiError(400, "no")

    with pytest.raises(ApiError):
        await client.exchange.while_connected(work())


async def test_a_client_that_stops_reading_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "SEND_STALL_S", 0.01)
    client = Client(part(b""), reads=False)
    with pytest.raises(ClientGone):
        await client.exchange.respond(200, b"{}")
    assert client.aborted


# -- a stream, with the engine played by the test


class Engine:
    """An EngineClient whose engine is the test."""

    def __init__(self) -> None:
        self.client = EngineClient()
        self.orders: list[ToEngine] = []
        self.client.connect(self.orders.append)

    def tell(self, request_id: str, text: str | None, finish: FinishReason | None = None, **more: Any) -> None:
        token = None if text is None else SampledToken(make_tokenizer().encode(text).ids[0])
        self.client.deliver(Step([Update(request_id, token, finish, **more)], Stats(), 1))
        self.client.check_invariants()


async def stream(client: Client, engine: Engine, call: PreparedCall) -> None:
    metrics = WorkerMetrics("m")
    with engine.client.submit(call) as handle, metrics.request(call, 0.0) as request_metrics:
        generation = Generation(call, TOKENS, request_metrics)
        await Stream(client.exchange, generation, handle, ChatReply("c", 1, "m", TOKENS, None, False)).run()


both_ways = pytest.mark.parametrize("direct", [False, True], ids=["awaited", "direct"])


def sent_text(client: Client) -> bytes:
    return b"".join(message.get("body", b"") for message in client.got)


@both_ways
async def test_pings_while_the_engine_thinks(direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "PING_S", 0.01)
    client, engine = Client(part(b""), direct=direct), Engine()
    serving = asyncio.create_task(stream(client, engine, prepared_call()))
    await asyncio.sleep(0)
    engine.tell("r0", "a")
    await client.until_got(b": ping\n\n")
    engine.tell("r0", "b", FinishReason.LENGTH)
    await serving
    assert sent_text(client).endswith(b"data: [DONE]\n\n")
    assert [order for order in engine.orders if isinstance(order, Cancel)] == []


@both_ways
async def test_nothing_is_sent_before_the_first_choice_has_begun(direct: bool) -> None:
    client, engine = Client(part(b""), direct=direct), Engine()
    serving = asyncio.create_task(stream(client, engine, prepared_call(n=2)))
    await asyncio.sleep(0)
    engine.tell("r1", "b")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert client.got == []
    engine.tell("r0", "a", num_cached_tokens=1)
    await client.until_got(b'"content":"b"')
    assert client.got[0]["status"] == 200
    assert dict(client.got[0]["headers"])[b"x-warmgate-cached-tokens"] == b"1"
    first = json.loads(sent_text(client).split(b"\n\n")[0].removeprefix(b"data: "))
    assert first["choices"][0]["index"] == 0
    engine.tell("r0", None, FinishReason.ABORT)
    await serving


@both_ways
async def test_an_engine_lost_before_the_first_token_is_a_status(direct: bool) -> None:
    client, engine = Client(part(b""), direct=direct), Engine()
    serving = asyncio.create_task(stream(client, engine, prepared_call()))
    await asyncio.sleep(0)
    engine.client.lose(ApiError(503, "gone"))
    with pytest.raises(ApiError, match="gone"):
        await serving
    assert client.got == []
    assert engine.client.num_in_flight == 0


@both_ways
async def test_an_engine_lost_after_it_is_an_event_behind_all_that_arrived(direct: bool) -> None:
    client, engine = Client(part(b""), direct=direct), Engine()
    serving = asyncio.create_task(stream(client, engine, prepared_call()))
    await asyncio.sleep(0)
    engine.tell("r0", "a")
    await client.until_got(b'"content":"a"')
    engine.tell("r0", "b")
    engine.client.lose(ApiError(503, "gone"))
    await serving
    text = sent_text(client)
    assert text.index(b'"content":"b"') < text.index(b'{"error":{"message":"gone"')
    assert b"[DONE]" not in text
    assert client.got[-1]["more_body"] is False


@both_ways
async def test_our_own_fault_in_a_stream_is_said_in_it(direct: bool) -> None:
    client, engine = Client(part(b""), direct=direct), Engine()
    serving = asyncio.create_task(stream(client, engine, prepared_call()))
    await asyncio.sleep(0)
    engine.tell("r0", "a")
    await client.until_got(b'"content":"a"')
    engine.client.deliver(Step([Update("r0", SampledToken("no id"), None)], Stats(), 1))  # type: ignore[arg-type]
    await serving
    assert json.loads(sent_text(client).rpartition(b"data: ")[2])["error"]["type"] == "server_error"
    assert client.got[-1]["more_body"] is False
    assert isinstance(engine.orders[-1], Cancel)


@both_ways
async def test_a_cancelled_stream_cancels_what_still_runs(direct: bool) -> None:
    client, engine = Client(part(b""), direct=direct), Engine()
    serving = asyncio.create_task(stream(client, engine, prepared_call(n=2)))
    await asyncio.sleep(0)
    engine.tell("r0", "a", FinishReason.LENGTH)
    await client.until_got(b'"length"')
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert [type(order) for order in engine.orders] == [Add, Cancel]
    assert engine.orders[-1] == Cancel(["r1"])
    engine.client.check_invariants()
    assert engine.client.num_in_flight == 0


async def test_what_comes_while_the_client_reads_is_written_at_once() -> None:
    client, engine = Client(part(b""), direct=True), Engine()
    serving = asyncio.create_task(stream(client, engine, prepared_call()))
    await asyncio.sleep(0)
    engine.tell("r0", "a")
    await client.until_got(b'"content":"a"')
    await asyncio.sleep(0)
    assert client.num_direct == 0
    for number, text in enumerate("bcd", 1):
        engine.tell("r0", text)
        assert client.num_direct == number
        assert f'"content":"{text}"'.encode() in client.got[-1]["body"]
    engine.tell("r0", "e", FinishReason.LENGTH)
    await serving
    assert client.num_direct == 3
    assert sent_text(client).endswith(b"data: [DONE]\n\n")


async def test_a_client_that_reads_slowly_gets_all_in_order() -> None:
    client, engine = Client(part(b""), direct=True), Engine()
    serving = asyncio.create_task(stream(client, engine, prepared_call()))
    await asyncio.sleep(0)
    texts = "abcdefg"
    engine.tell("r0", texts[0])
    await client.until_got(b'"content":"a"')
    for number, text in enumerate(texts[1:]):
        client.is_open = number % 3 != 0
        engine.tell("r0", text)
        if number % 2:
            await asyncio.sleep(0)
    await client.until_got(b'"content":"g"')
    engine.tell("r0", None, FinishReason.LENGTH)
    await serving
    events = [event.removeprefix(b"data: ") for event in sent_text(client).split(b"\n\n")[:-2]]
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content", "") for delta in deltas) == texts
    assert 0 < client.num_direct < len(texts) - 1


async def test_a_stop_string_in_what_is_written_at_once_ends_the_stream() -> None:
    client, engine = Client(part(b""), direct=True), Engine()
    serving = asyncio.create_task(stream(client, engine, replace(prepared_call(), stops=("c",))))
    await asyncio.sleep(0)
    engine.tell("r0", "a")
    await client.until_got(b'"content":"a"')
    await asyncio.sleep(0)
    engine.tell("r0", "b")
    engine.tell("r0", "c")
    await serving
    assert isinstance(engine.orders[-1], Cancel)
    assert b'"finish_reason":"stop","stop_reason":"c"' in sent_text(client)
    assert sent_text(client).endswith(b"data: [DONE]\n\n")
    assert client.got[-1]["more_body"] is False
