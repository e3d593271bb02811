"""The straight way of whole answers: what goes it, what goes on by the general way, and that clients can't tell."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from gateway.plain_protocol import PlainProtocol
from tests.gateway.harness import HANG_GUARD_S, Replica, Running, gateway, until
from tests.gateway.straight_support import BODY, HEAD, Ways, line, request, warmed


async def test_a_whole_answer_takes_no_task():
    replica = Replica()
    async with warmed(replica) as (running, ways), line(running) as client:
        for _ in range(3):
            status, headers, body = await client.ask(request())
            assert status == 200
            assert json.loads(body)["usage"]["completion_tokens"] == 8
            assert headers["x-warmgate-replica"] == replica.name
        assert ways.were_straight
        assert running.events("warmgate_requests_total") == 4
        assert running.events("warmgate_output_tokens_total") == 32
        assert running.events("warmgate_decisions_total") == 4


async def test_clients_can_not_tell_which_way_their_answer_came():
    """A chunked body goes the general way."""
    replica = Replica()
    async with warmed(replica) as (running, ways), line(running) as client:
        replica.play(cached_tokens=4)
        straight = await client.ask(request(extra=b"x-request-id: mine\r\n"))
        assert ways.were_straight
        seen = dict(replica.log.last_headers)
        chunked = b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
        general = await client.ask(HEAD + b"x-request-id: mine\r\n" + chunked)
        assert ways.num_general == 1
        assert list(straight[1]) == list(general[1]), "the same headers in the same order"
        dates = [straight[1].pop("date"), general[1].pop("date")]
        assert all(re.fullmatch(r"\w{3}, .* GMT", date) for date in dates)
        assert straight == general
        assert straight[1]["x-warmgate-cached-tokens"] == "4"
        assert straight[1]["x-request-id"] == "mine"
        assert seen == replica.log.last_headers
        assert replica.log.last_body.encode() == BODY


async def test_a_connection_that_is_to_be_closed_is():
    async with warmed(Replica()) as (running, ways), line(running) as client:
        status, headers, _ = await client.ask(request(extra=b"connection: close\r\n"))
        assert (status, headers["connection"]) == (200, "close")
        assert await client.reader.read() == b""
        assert ways.were_straight


async def test_completions_and_paths_without_v1_go_it_too():
    async with warmed(Replica()) as (running, ways), line(running) as client:
        completion = json.dumps({"model": "fake", "prompt": "hi"}).encode()
        for path in (b"/v1/completions", b"/completions"):
            status, _, body = await client.ask(request(completion).replace(b"/v1/chat/completions", path))
            assert status == 200
            assert json.loads(body)["object"] == "text_completion"
        assert (await client.ask(request().replace(b"/v1/chat", b"/chat")))[0] == 200
        assert ways.were_straight


_BODY_WAIT = "gateway.plain_protocol.BODY_WAIT_S"


async def test_a_body_that_follows_its_head_is_waited_for(monkeypatch):
    async with warmed(Replica()) as (running, ways), line(running) as client:
        monkeypatch.setattr(_BODY_WAIT, HANG_GUARD_S)
        client.send(request()[: -len(BODY)])
        await until(lambda: any(_plain(connection) for connection in _connections(running)))
        assert (await client.ask(BODY))[0] == 200
        assert ways.were_straight


async def test_a_body_that_does_not_come_or_comes_in_pieces_goes_the_general_way(monkeypatch):
    async with warmed(Replica()) as (running, ways), line(running) as client:
        monkeypatch.setattr(_BODY_WAIT, 0.01)
        client.send(request()[: -len(BODY)])
        await until(lambda: ways.num_general == 1)
        assert (await client.ask(BODY))[0] == 200
        monkeypatch.setattr(_BODY_WAIT, HANG_GUARD_S)
        client.send(request()[:-10])
        await until(lambda: ways.num_general == 2)
        assert (await client.ask(BODY[-10:]))[0] == 200
        client.send(request()[: -len(BODY)])
        await until(lambda: any(_plain(connection) for connection in _connections(running)))
        client.writer.close()  # it is noted as one that left
        await until(lambda: ways.num_general == 3)
        assert not ways.begun


def _connections(running: Running) -> list[PlainProtocol]:
    return list(running._server.server_state.connections)  # type: ignore[arg-type]


def _plain(connection: PlainProtocol) -> bool:
    return connection._plain is not None


async def test_a_stream_and_a_body_that_is_wrong_go_on_by_the_general_way():
    async with warmed(Replica()) as (running, ways), line(running) as client:
        assert (await running.chat(True)).status_code == 200
        assert ways.begun[0].parsed is not None
        status, _, body = await client.ask(request(b'{"model":"fake"'))
        assert (status, json.loads(body)["error"]["type"]) == (400, "invalid_request_error")
        assert (await client.ask(request(b'{"model":"other","messages":[{}]}')))[0] == 404
        assert (await client.ask(request()))[0] == 200
        assert [begun.error is not None for begun in ways.begun] == [False, True, True]
        assert ways.num_general == 0


@pytest.mark.parametrize("header", [b"origin: http://x", b"content-encoding: gzip", b"content-type: text/plain"])
async def test_unusual_heads_go_the_general_way(header):
    async with warmed(Replica()) as (running, ways), line(running) as client:
        await client.ask(request(extra=header + b"\r\n"))
        assert (ways.num_general, ways.begun) == (1, [])


async def test_without_an_idle_connection_the_placed_request_waits_for_one():
    replica = Replica()
    async with gateway(replica) as running:
        ways = Ways(running)
        replica.play(first_token_s=0.1)
        answers = await asyncio.gather(*(running.chat() for _ in range(3)))
        assert [answer.status_code for answer in answers] == [200] * 3
        assert len(ways.begun) == 3
        assert all(begun.lease is not None for begun in ways.begun)
        assert replica.log.num_started == 3


async def test_a_full_gateway_queues_it():
    replica = Replica()
    async with warmed(replica, max_in_flight=1) as (running, ways):
        replica.play(first_token_s=0.1)
        answers = await asyncio.gather(*(running.chat() for _ in range(3)))
        assert [answer.status_code for answer in answers] == [200] * 3
        assert [begun.is_admitted for begun in ways.begun] == [False, False]


@pytest.mark.parametrize(
    "script",
    [{"fault": "close"}, {"fault": "die"}, {"fault": "html"}, {"fault": "error"}, {"fault": "status", "status": 503}],
    ids=str,
)
async def test_a_replicas_failure_is_retried_by_the_general_way(script):
    bad, good = Replica(), Replica()
    async with warmed(bad, good) as (running, ways), line(running) as client:
        bad.play(**script)
        for _ in range(2):
            status, headers, _ = await client.ask(request())
            assert (status, headers["x-warmgate-replica"]) == (200, good.name)
        begun = ways.begun[0]
        assert begun.lease is not None
        assert begun.response is not None or begun.is_again
        assert not ways.num_general
        assert running.events("warmgate_failovers_total") >= 1


async def test_a_connection_that_the_replica_closed_meanwhile_is_no_failure():
    replica = Replica()
    async with warmed(replica) as (running, ways), line(running) as client:
        replica.play(fault="close", times=1)
        assert (await client.ask(request()))[0] == 200
        [begun] = ways.begun
        assert begun.is_again
        assert begun.record.num_attempts == 2, "it was sent twice"
        assert running.events("warmgate_failovers_total") == 0


async def test_a_client_that_leaves_cancels_its_request_upstream():
    replica = Replica()
    async with warmed(replica) as (running, ways), line(running) as client:
        replica.play(fault="stall")
        client.send(request())
        await until(lambda: replica.log.num_in_flight == 1)
        assert ways.were_straight
        client.writer.close()
        await until(lambda: replica.log.num_aborted == 1)
        await until(lambda: running.events("warmgate_requests_total") == 2)
        [begun] = ways.begun
        assert begun.record.status == 499


@pytest.mark.parametrize("how", ["deadline", "patience"])
async def test_time_runs_out_on_it(how):
    replica = Replica()
    async with (
        warmed(replica, request_s=0.2 if how == "deadline" else 60.0) as (running, ways),
        line(running) as client,
    ):
        replica.play(fault="stall")
        patience = b"x-stainless-read-timeout: 0.2\r\n" if how == "patience" else b""
        status, headers, body = await client.ask(request(extra=patience))
        assert (status, headers["x-should-retry"]) == (504, "false")
        assert "deadline" in json.loads(body)["error"]["message"]
        await until(lambda: replica.log.num_aborted == 1)
        assert len(ways.begun) == 1
        replica.play()
        assert (await client.ask(request()))[0] == 200, "the connection goes on"


@pytest.mark.parametrize("how", ["deadline", "patience"])
async def test_what_goes_on_by_the_general_way_has_the_time_that_was_left(how):
    replica = Replica()
    request_s = 0.2 if how == "deadline" else 60.0
    async with warmed(replica, request_s=request_s) as (running, ways), line(running) as client:
        replica.play(fault="stall", after=0)
        patience = b"x-stainless-read-timeout: 0.2\r\n" if how == "patience" else b""
        assert (await client.ask(request(BODY[:-1] + b', "stream": true}', patience)))[0] == 504
        [begun] = ways.begun
        left_s = begun.left_s if how == "deadline" else begun.patience_s
        assert left_s is not None
        assert left_s < 0.5


async def test_a_replica_that_is_stuck_loses_it():
    stuck, good = Replica(), Replica()
    async with warmed(stuck, good) as (running, ways), line(running) as client:
        stuck.play(fault="stall")
        good.play(fault="stall")
        client.send(request())
        await until(lambda: stuck.log.num_in_flight + good.log.num_in_flight == 1)
        good.play()
        [replica] = [replica for replica in running.app.registry if replica.waiting]
        running.app.registry.interrupt_waiting(replica)
        if replica.replica_id == good.name:
            stuck.play()
        assert (await client.answer())[0] == 200
        assert len(ways.begun) == 1


@pytest.mark.parametrize("num_signals", [1, 2])
async def test_a_forced_stop_tells_its_client(num_signals):
    replica = Replica()
    drain_s = 1.0 if num_signals == 1 else HANG_GUARD_S
    async with warmed(replica, drain_s=drain_s) as (running, ways), line(running) as client:
        replica.play(fault="stall")
        client.send(request())
        await until(lambda: replica.log.num_in_flight == 1)
        assert ways.were_straight
        for _ in range(num_signals):
            running.stop()
        status, headers, _ = await client.answer()
        assert (status, headers["connection"]) == (503, "close")
        await until(lambda: running.events("warmgate_requests_total") == 2)


async def test_requests_sent_ahead_are_answered_in_order():
    async with warmed(Replica()) as (running, ways), line(running) as client:
        client.send(b"".join(request(extra=b"x-request-id: r%d\r\n" % n) for n in range(4)))
        assert [(await client.answer())[1]["x-request-id"] for _ in range(4)] == ["r0", "r1", "r2", "r3"]
        assert ways.num_general == 3


async def test_a_large_answer_is_relayed_by_the_general_way():
    replica = Replica()
    async with warmed(replica) as (running, ways), line(running) as client:
        replica.play(num_tokens=60_000)
        status, _, body = await client.ask(request())
        assert status == 200
        assert json.loads(body)["usage"]["completion_tokens"] == 60_000
        [begun] = ways.begun
        assert begun.response is not None


async def test_a_bug_of_ours_is_a_500_and_holds_nothing(monkeypatch, caplog):
    async with warmed(Replica()) as (running, ways), line(running) as client:

        def broken(*_):
            raise RuntimeError("a bug")

        monkeypatch.setattr(running.app.router.policy, "choose", broken)
        assert (await client.ask(request()))[0] == 500
        monkeypatch.undo()
        assert "a bug" in caplog.text
        assert isinstance(ways.begun[0].error, RuntimeError)
        async with line(running) as other:  # one behind the answer doesn't take it back
            monkeypatch.setattr(running.app._proxy, "on_served", broken)
            assert (await other.ask(request()))[0] == 200
            monkeypatch.undo()
            assert await other.reader.read() == b""
        async with line(running) as other:
            assert (await other.ask(request()))[0] == 200
