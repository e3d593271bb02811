"""The failure catalogue, row by row: what a client sees when a replica fails, before the first token and after it."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.gateway.harness import Replica, gateway, tokens, until

BEFORE_FIRST_TOKEN = [
    {"fault": "close"},
    {"fault": "status", "status": 500},
    {"fault": "status", "status": 503},
    {"fault": "status", "status": 429},
    {"fault": "die", "after": 0},
    {"fault": "error", "after": 0},
]


CASES = [(script, stream) for script in BEFORE_FIRST_TOKEN for stream in (True, False)]
CASES.append(({"fault": "gzip"}, True))  # a whole answer's encoding is passed on with its bytes; a stream's can't be


@pytest.mark.parametrize(("script", "stream"), CASES, ids=str)
async def test_a_failure_before_the_first_token_is_never_seen(script, stream):
    """Rows 3, 6, 7, 8, 16: one failover, and the client gets a whole answer."""
    bad, good = Replica(), Replica()
    async with gateway(bad, good) as running:
        bad.play(**script)
        for _ in range(4):
            answer = await running.chat(stream)
            assert answer.status_code == 200
            assert tokens(answer.content) == [f" t{n}" for n in range(8)]
            assert answer.headers["x-warmgate-replica"] == good.name
        assert bad.log.num_started >= 1
        assert running.events("warmgate_failovers_total") >= 1


async def test_an_answer_that_is_not_json_counts_as_broken():
    bad, good = Replica(), Replica()
    async with gateway(bad, good) as running:
        bad.play(fault="html")
        assert tokens((await running.chat()).content) == [f" t{n}" for n in range(8)]
        assert tokens((await running.chat()).content) == [f" t{n}" for n in range(8)]
        assert running.events("warmgate_failovers_total") >= 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_refused_connection_is_another_replicas_request(stream):
    """Row 1; and the dead one gets no more requests, at once."""
    dead, good = Replica(), Replica()
    async with gateway(dead, good, poll_interval_s=60.0) as running:
        await dead.stop()
        for _ in range(4):
            answer = await running.chat(stream)
            assert answer.status_code == 200
            assert answer.headers["x-warmgate-replica"] == good.name
        assert running.events("warmgate_failovers_total") <= 1
        assert [replica.replica_id for replica in running.app.registry.ready()] == [good.name]


async def test_no_first_token_in_time_fails_over_and_lets_the_replica_go():
    """Row 2: it accepts and never answers."""
    silent, good = Replica(), Replica()
    async with gateway(silent, good, first_token_s=0.2) as running:
        silent.play(fault="stall")
        for _ in range(2):
            answer = await running.chat(True)
            assert answer.headers["x-warmgate-replica"] == good.name
        await until(lambda: silent.log.num_aborted == silent.log.num_started)
        assert silent.log.num_started >= 1


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ({"fault": "close"}, 502),
        ({"fault": "status", "status": 500}, 500),
        ({"fault": "status", "status": 429, "retry_after": "7"}, 429),
        ({"fault": "error", "after": 0}, 500),
        ({"fault": "stall"}, 504),
        ({"fault": "status", "status": 503, "retry_after": "9"}, 503),
    ],
)
async def test_when_all_fail_the_client_gets_a_true_status_and_only_two_attempts_were_made(script, status):
    replicas = [Replica(), Replica(), Replica()]
    async with gateway(*replicas, first_token_s=0.2) as running:
        for replica in replicas:
            replica.play(**script)
        answer = await running.chat(True)
        assert answer.status_code == status
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
        if "retry_after" in script:
            assert answer.headers["retry-after"] == script["retry_after"]
        assert sum(replica.log.num_started for replica in replicas) == 2


async def test_a_refusal_of_the_request_itself_is_passed_on_and_not_tried_elsewhere():
    replicas = [Replica(), Replica()]
    async with gateway(*replicas) as running:
        for replica in replicas:
            replica.play(fault="status", status=400)
        answer = await running.chat()
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "told to refuse"
        assert sum(replica.log.num_started for replica in replicas) == 1


@pytest.mark.parametrize(
    "script",
    [
        {"fault": "die", "after": 3},
        {"fault": "stall", "after": 3},
        {"fault": "no_done"},
        {"fault": "no_finish"},
        {"fault": "endless", "after": 3},
        {"fault": "error", "after": 3},
    ],
    ids=lambda s: s["fault"],
)
async def test_a_failure_after_the_first_token_is_an_error_event_and_never_a_success(script):
    """Rows 4, 5, 7, 8, 10: no replay, no finish_reason, no [DONE], one error event at the end."""
    bad, other = Replica(), Replica()
    async with gateway(bad, other, stream_idle_s=0.2, max_sse_line_bytes=100_000) as running:
        other.play(fault="status", status=500)  # so that the first attempt's turn doesn't matter
        bad.play(**script, num_tokens=5)
        answer = await running.chat(True)
        assert answer.status_code == 200
        *frames, last = [line[6:] for line in answer.text.split("\n\n") if line]
        error = json.loads(last)["error"]
        assert set(error) >= {"message", "type", "param", "code"}
        count = 3 if "after" in script else 5
        assert tokens(answer.content) == [f" t{n}" for n in range(count)]
        assert all(json.loads(frame)["choices"][0]["finish_reason"] is None for frame in frames)
        assert "data: [DONE]" not in answer.text
        assert bad.log.num_started == 1


async def test_all_replicas_down_is_a_503_with_retry_after_and_they_come_back_by_themselves():
    """Row 15."""
    replicas = [Replica(), Replica()]
    async with gateway(*replicas) as running:
        for replica in replicas:
            await replica.stop()
        for _ in range(2):
            answer = await running.chat()
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["type"] == "server_error"
        await until(lambda: not running.app.registry.ready())
        assert (await running.client.get("/ready")).status_code == 503
        assert (await running.client.get("/health")).json()["status"] == "no_replica"
        for replica in replicas:
            await replica.start()
        await until(lambda: len(running.app.registry.ready()) == 2)
        assert (await running.chat()).status_code == 200


async def test_a_gateway_starts_without_its_replicas_and_they_join_later():
    replica = Replica()
    await replica.start()
    await replica.stop()
    async with gateway(replica, wait=False) as running:
        assert (await running.chat()).status_code == 503
        await replica.start()
        await until(lambda: running.app.registry.ready())
        assert (await running.chat()).status_code == 200


async def test_a_gateway_that_just_started_has_asked_its_replicas_before_it_serves():
    """Else the first requests of its life are refused, though every replica is well."""
    replicas = [Replica(), Replica()]
    async with gateway(*replicas, wait=False) as running:
        assert len(running.app.registry.ready()) == 2
        assert (await running.chat()).status_code == 200


async def test_a_model_that_is_still_loading_is_not_an_unknown_model():
    replica = Replica(incarnation="a")
    replica.play(status_name="loading")
    other = Replica("other")
    async with gateway(replica, other, wait=False) as running:
        await until(lambda: "fake" in running.app.registry.models() and running.app.registry.ready())
        answer = await running.chat()
        assert answer.status_code == 503
        assert "loading" in answer.json()["error"]["message"]
        replica.play()
        await until(lambda: len(running.app.registry.ready()) == 2)
        assert (await running.chat()).headers["x-warmgate-replica"] == replica.name


async def test_a_kept_alive_connection_that_went_stale_is_made_anew():
    """Row 12: the reset comes on a connection that had served, before any byte of an answer."""
    replica = Replica()
    async with gateway(replica, poll_interval_s=60.0) as running:
        assert (await running.chat()).status_code == 200
        replica.play(fault="close", times=1)
        answer = await running.chat()
        assert answer.status_code == 200
        assert running.events("warmgate_failovers_total") == 0
        assert replica.log.num_started == 3


async def test_many_at_once_each_end_once_while_replicas_fail():
    """Each request ends in exactly one way, and nothing stays in flight."""
    replicas = [Replica(), Replica(), Replica()]
    async with gateway(*replicas, stream_idle_s=2.0) as running:
        replicas[0].play(fault="die", after=4, token_s=0.002)
        replicas[1].play(token_s=0.002)
        replicas[2].play(fault="status", status=500)
        answers = await asyncio.gather(*(running.chat(n % 2 == 0) for n in range(30)))
        for answer in answers:
            if answer.status_code == 200 and answer.headers["content-type"] == "text/event-stream":
                ends_well = answer.text.endswith("data: [DONE]\n\n") and '"finish_reason":"stop"' in answer.text
                ends_badly = "[DONE]" not in answer.text and answer.text.rstrip().splitlines()[-1].startswith(
                    'data: {"error"'
                )
                assert ends_well != ends_badly
                assert tokens(answer.content) == [f" t{n}" for n in range(8 if ends_well else 4)]
            elif answer.status_code == 200:
                assert tokens(answer.content) == [f" t{n}" for n in range(8)]
            else:
                assert answer.json()["error"]
        await running.is_quiet()
        assert running.events("warmgate_requests_total") == 30
        assert running.events("warmgate_in_flight") == 0
