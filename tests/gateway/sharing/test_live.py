"""Gateways over the same replicas and a real Redis: they know of each other, and go on without it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest

from gateway.sharing import link, wire
from gateway.sharing.hub import Sharing
from gateway.sharing.link import Link, LinkDown
from policies.events import BlocksCleared, BlocksRemoved, BlocksStored
from policies.types import BlockKey, ReplicaId
from tests.gateway.harness import Replica, Running, gateway, until
from tests.support.redis_server import RedisServer

PROMPT = {"messages": [{"role": "user", "content": "a long story about a cache " * 40}]}


@pytest.fixture(autouse=True)
def patient_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine Redis may take longer than a gateway should wait for it; nothing here is about how long."""
    monkeypatch.setattr(link, "CALL_S", 1.0)


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
async def replicas() -> AsyncIterator[list[Replica]]:
    started = [Replica(incarnation="one"), Replica(incarnation="two")]
    for replica in started:
        await replica.start()
    yield started
    for replica in started:
        await replica.stop()


def sharing(running: Running) -> Sharing:
    assert running.app.sharing is not None
    return running.app.sharing


@contextlib.asynccontextmanager
async def sharing_gateway(redis: RedisServer, replicas: list[Replica]) -> AsyncIterator[Running]:
    urls = [replica.url for replica in replicas]
    async with gateway(urls=urls, wait=False, redis_url=redis.url, policy="warm") as running:
        await until(lambda: len(running.app.registry.ready()) == len(replicas))
        yield running
        sharing(running).check_invariants()


@contextlib.asynccontextmanager
async def pair(redis: RedisServer, replicas: list[Replica]) -> AsyncIterator[tuple[Running, Running]]:
    async with sharing_gateway(redis, replicas) as one, sharing_gateway(redis, replicas) as two:
        await until(lambda: num_peers(one) == num_peers(two) == 1)
        yield one, two


def num_peers(running: Running) -> int:
    return sum(peer.whole for peer in sharing(running).book.peers.values())


def state(running: Running) -> str:
    return sharing(running).figures().state


def num_blocks(running: Running) -> int:
    return sum(running.app.fleet.stats(name).num_index_blocks for name in running.app.fleet.replica_ids())


def matched(running: Running) -> dict[str, int]:
    return {name: running.app.fleet.stats(name).num_index_blocks for name in running.app.fleet.replica_ids()}


async def test_what_one_gateway_dispatched_the_other_routes_by(redis: RedisServer, replicas: list[Replica]) -> None:
    async with pair(redis, replicas) as (one, two):
        first = await one.chat(**PROMPT)
        await until(lambda: num_blocks(two))
        assert matched(one) == matched(two)
        again = await two.chat(**PROMPT)
        assert again.headers["x-warmgate-replica"] == first.headers["x-warmgate-replica"]
        assert int(again.headers["x-warmgate-matched-tokens"]) > 0


async def test_requests_in_flight_are_load_at_both(redis: RedisServer, replicas: list[Replica]) -> None:
    for replica in replicas:
        replica.play(first_token_s=30.0)
    async with pair(redis, replicas) as (one, two):
        waiting = [asyncio.create_task(one.chat(stream=True, **PROMPT)) for _ in range(4)]
        await until(lambda: two.app.fleet.num_leases() == 4)
        assert two.app.router.stats.num_in_flight == 0
        two.app.router.check_invariants()
        assert two.events("warmgate_sharing_remote_leases") == 4
        for task in waiting:
            task.cancel()
        await until(lambda: two.app.fleet.num_leases() == 0)


async def test_a_new_gateway_begins_with_what_others_know(redis: RedisServer, replicas: list[Replica]) -> None:
    for replica in replicas:
        replica.play(num_tokens=1)
    async with sharing_gateway(redis, replicas) as one:
        await until(lambda: state(one) == "shared")
        await one.chat(**PROMPT)
        async with sharing_gateway(redis, replicas) as two:
            await until(lambda: matched(two) == matched(one))
            await until(lambda: two.events("warmgate_sharing_recalled_blocks_total"))


async def test_a_gateway_alone_finds_what_its_earlier_life_knew(redis: RedisServer, replicas: list[Replica]) -> None:
    async with sharing_gateway(redis, replicas) as one:
        await until(lambda: state(one) == "shared" and sharing(one)._keeper.link.is_up)
        await one.chat(**PROMPT)
        before = matched(one)
    async with sharing_gateway(redis, replicas) as two:
        await until(lambda: matched(two) == before)


async def test_of_a_restarted_replica_nothing_is_recalled(redis: RedisServer, replicas: list[Replica]) -> None:
    async with sharing_gateway(redis, replicas) as one:
        await until(lambda: state(one) == "shared" and sharing(one)._keeper.link.is_up)
        await one.chat(**PROMPT)
    for number, replica in enumerate(replicas):
        replica.worker.incarnation = f"later {number}"
    async with sharing_gateway(redis, replicas) as two:
        await until(lambda: sharing(two)._keeper._wants_since is None)
        assert num_blocks(two) == 0


async def test_without_redis_a_gateway_serves_and_says_so(
    redis: RedisServer, replicas: list[Replica], caplog: pytest.LogCaptureFixture
) -> None:
    redis.kill()
    async with sharing_gateway(redis, replicas) as one:
        await until(lambda: "this gateway goes on with its own knowledge" in caplog.text)
        assert (await one.chat(**PROMPT)).status_code == 200
        health = (await one.client.get("/health")).json()
        assert health["status"] == "ok"
        assert health["sharing"]["state"] == "local"
        assert "Redis" in health["sharing"]["detail"]
        assert one.events("warmgate_sharing_up") == 0
        assert (await one.client.get("/ready")).status_code == 200
        redis.start()
        await until(lambda: state(one) == "shared")
        assert one.events("warmgate_sharing_up") == 1


async def test_a_frozen_redis_holds_no_request_up(redis: RedisServer, replicas: list[Replica]) -> None:
    async with pair(redis, replicas) as (one, two):
        redis.freeze()
        await until(lambda: state(one) == state(two) == "local")
        for running in (one, two):
            answers = await asyncio.gather(*(running.chat(stream=True, **PROMPT) for _ in range(8)))
            assert {answer.status_code for answer in answers} == {200}
        await until(lambda: num_peers(one) == num_peers(two) == 0)
        redis.thaw()
        await until(lambda: state(one) == state(two) == "shared")
        await until(lambda: num_peers(one) == num_peers(two) == 1)
        for running in (one, two):
            await until(lambda running=running: running.app.fleet.num_leases() == 0)


async def test_requests_that_began_during_an_outage_are_known_after_it(
    redis: RedisServer, replicas: list[Replica]
) -> None:
    for replica in replicas:
        replica.play(first_token_s=60.0)
    async with pair(redis, replicas) as (one, two):
        redis.kill()
        await until(lambda: state(one) == state(two) == "local")
        waiting = [asyncio.create_task(one.chat(stream=True, **PROMPT)) for _ in range(3)]
        await until(lambda: one.app.fleet.num_leases() == 3)
        redis.start()
        await until(lambda: two.app.fleet.num_leases() == 3)
        for task in waiting:
            task.cancel()
        await until(lambda: two.app.fleet.num_leases() == 0)


async def test_flushall_is_made_good(redis: RedisServer, replicas: list[Replica]) -> None:
    async with pair(redis, replicas) as (one, two):
        await one.chat(**PROMPT)
        await until(lambda: num_blocks(two))
        assert b"OK" in redis.command("FLUSHALL")
        await until(lambda: redis.command("EXISTS", "warmgate:{default}:index") == b":1\r\n")
        before = num_blocks(two)
        other = {"messages": [{"role": "user", "content": "something else altogether " * 40}]}
        await one.chat(**other)
        await until(lambda: num_blocks(two) > before)
        assert num_peers(one) == num_peers(two) == 1


async def test_a_server_that_became_a_replica_is_left_alone_until_it_is_a_master(
    redis: RedisServer, replicas: list[Replica]
) -> None:
    async with pair(redis, replicas) as (one, two):
        redis.command("REPLICAOF", "127.0.0.1", "1")
        await until(lambda: state(one) == state(two) == "local")
        assert (await one.chat(**PROMPT)).status_code == 200
        redis.command("REPLICAOF", "NO", "ONE")
        await until(lambda: state(one) == state(two) == "shared")
        await two.chat(**PROMPT)


async def test_rubbish_in_the_stream_is_passed_over(redis: RedisServer, replicas: list[Replica]) -> None:
    async with pair(redis, replicas) as (one, two):
        stream = "warmgate:{default}:events"
        redis.command("XADD", stream, "*", "m", "no message")
        redis.command("XADD", stream, "*", "other", "field")
        await one.chat(**PROMPT)
        await until(lambda: num_blocks(two))


async def test_blocks_reach_a_gateway_that_cannot_hear_them(redis: RedisServer, replicas: list[Replica]) -> None:
    name = ReplicaId(replicas[0].name)
    keys = tuple(map(BlockKey, (2**100, 2**101, 2**102)))
    async with pair(redis, replicas) as (one, two):
        for running, feed in ((one, "exact"), (two, "approximate")):
            replica = running.app.registry.get(name)
            replica.kv_feed, replica.key_mode = feed, "token"
        one.app.router.emit(BlocksCleared(0.0, name))
        one.app.router.emit(BlocksStored(0.0, name, keys[:2]))
        await until(lambda: two.app.fleet.stats(name).authoritative)
        await until(lambda: two.app.fleet.stats(name).num_index_blocks == 2)
        one.app.router.emit(BlocksStored(0.0, name, keys[2:]))
        await until(lambda: two.app.fleet.stats(name).num_index_blocks == 3)
        one.app.router.emit(BlocksRemoved(0.0, name, keys[1:]))
        await until(lambda: two.app.fleet.stats(name).num_index_blocks == 1)


async def test_a_cancelled_call_drops_its_connection(redis: RedisServer) -> None:
    link = Link(redis.url)
    await link.raw("SET", "key", "mine")
    call = asyncio.create_task(link.raw("BLPOP", "nothing", 5, timeout_s=20.0))
    await until(lambda: b"blocked_clients:1" in redis.command("INFO", "clients"))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    redis.command("LPUSH", "nothing", "not this")
    assert await link.raw("GET", "key") == b"mine"
    await link.close()


async def test_the_first_call_has_longer_than_those_after_it(redis: RedisServer) -> None:
    link = Link(redis.url)
    assert await link.raw("BLPOP", "nothing", 0.2) is None  # takes four times what later ones have
    with pytest.raises(LinkDown, match="does not answer in time"):
        await link.raw("BLPOP", "nothing", 20.0)
    await link.close()


async def test_a_call_that_fails_opens_the_breaker(redis: RedisServer) -> None:
    now = [0.0]
    link = Link(redis.url, clock=lambda: now[0])
    await link.raw("PING")
    redis.freeze()
    with pytest.raises(LinkDown, match="does not answer in time"):
        await link.raw("PING")
    assert not link.is_up
    redis.thaw()
    with pytest.raises(LinkDown):
        await link.raw("PING")
    assert link.num_failed_calls == 1, "nothing was asked while it is open"
    now[0] += link.retry_in_s
    assert await link.raw("PING")
    assert link.is_up
    await link.close()


def test_a_version_of_the_future_is_not_guessed_at() -> None:
    newer = wire._encoder.encode(wire.Message(wire.VERSION + 1, "g", 1, []))
    with pytest.raises(wire.WireError, match="version 2"):
        wire.decode(newer)
