"""Limits and keys of several gateways in a real Redis, and what becomes of them when it is slow, empty or gone."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gateway.sharing.link import Link, LinkDown
from gateway.tenancy.keys import KeyBook, Limits, new_key
from gateway.tenancy.limits import Account, Denied, Ledger, Limit
from gateway.tenancy.scripts import GIVE_BACK
from gateway.tenancy.shared import SharedLimits
from gateway.tenancy.store import RedisStore, fields_of, redis_key
from tests.gateway.harness import Replica, Running, gateway, until
from tests.gateway.tenancy.support import Keys, ask
from tests.support.redis_server import RedisServer

WALL = 1_000_000_000.0


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as started:
        yield started


@pytest.fixture
def redis(server: RedisServer) -> RedisServer:
    """The module's server, empty."""
    server.command("REPLICAOF", "NO", "ONE")
    server.command("FLUSHALL")
    return server


_numbers = itertools.count()


class Party:
    """One gateway's accounts and its way to Redis."""

    def __init__(self, redis: RedisServer, limits: Limits) -> None:
        self.ledger = Ledger()
        account = self.ledger.account("key one", limits)
        assert account is not None
        self.account: Account = account
        self.shared = SharedLimits(redis.url, "fleet", f"gateway-{next(_numbers)}", self.ledger.accounts, 30.0)

    async def admit(self, name: str, wanted: int = 0) -> Denied | None:
        denied = await self.shared.admit([self.account], wanted)
        if denied is None:
            self.ledger.hold(name, [self.account], wanted)
        return denied

    def settle(self, name: str, used: int = 0) -> None:
        held = self.ledger.settle(name, used, WALL)
        assert held is not None
        self.shared.settle(name, *held, used, True)

    async def quiet(self) -> None:
        await until(lambda: not self.shared._settles and self.account.num_shared == self.account.num_active)


@contextlib.asynccontextmanager
async def party(redis: RedisServer, **limits: int) -> AsyncIterator[Party]:
    made = Party(redis, Limits(**limits))
    made.shared.start()
    try:
        await until(lambda: made.shared.is_up)
        yield made
        made.ledger.check_invariants()
    finally:
        await made.shared.close()


async def test_two_gateways_hold_one_limit_together(redis: RedisServer) -> None:
    async with party(redis, requests_per_minute=10) as one, party(redis, requests_per_minute=10) as two:
        parties = [one, two] * 10
        answers = await asyncio.gather(*(each.admit(str(n)) for n, each in enumerate(parties)))
        assert sum(answer is None for answer in answers) == 10
        denied = next(answer for answer in answers if answer is not None)
        assert (denied.limit, denied.bound) == (Limit.REQUESTS, 10)
        assert denied.retry_after_s is not None
        assert 0 < denied.retry_after_s <= 6.1


async def test_concurrency_counts_both_and_comes_back(redis: RedisServer) -> None:
    async with party(redis, concurrency=2) as one, party(redis, concurrency=2) as two:
        assert await one.admit("a") is None
        assert await two.admit("b") is None
        denied = await one.admit("c")
        assert denied is not None
        assert denied.limit is Limit.CONCURRENCY
        two.settle("b")
        await two.quiet()
        assert await one.admit("c") is None


async def test_tokens_and_budget_are_settled_once(redis: RedisServer) -> None:
    limits = {"tokens_per_minute": 1000, "budget_tokens": 2000}
    async with party(redis, **limits) as one, party(redis, **limits) as two:
        assert await one.admit("a", 900) is None
        denied = await two.admit("b", 900)
        assert denied is not None
        assert denied.limit is Limit.TOKENS
        one.settle("a", 100)
        # The same settlement again, as after an answer that was lost.
        one.shared.settle("a", [one.account], 900, 100, False)
        await one.quiet()
        assert await two.admit("b", 850) is None
        assert two.account.base == 100
        two.settle("b", 0)
        await two.quiet()


async def test_a_dead_gateways_requests_are_forgotten(redis: RedisServer) -> None:
    async with party(redis, concurrency=1, budget_tokens=100) as survivor:
        dead = Party(redis, Limits(concurrency=1, budget_tokens=100))
        dead.shared.start()
        await until(lambda: dead.shared.is_up)
        assert await dead.admit("a", 100) is None
        assert await survivor.admit("b", 100) is not None
        assert dead.shared._task is not None
        dead.shared._task.cancel()  # without a goodbye
        denied: Denied | None = await survivor.admit("b", 100)
        while denied is not None:
            await asyncio.sleep(0.05)
            denied = await survivor.admit("b", 100)
        await dead.shared.link.close()


async def test_a_redis_that_lost_its_data_and_its_scripts_is_told_again(redis: RedisServer) -> None:
    limits = {"concurrency": 2, "budget_tokens": 1000}
    async with party(redis, **limits) as one, party(redis, **limits) as two:
        assert await one.admit("a", 300) is None
        one.settle("a", 300)
        await one.quiet()
        assert await one.admit("b", 100) is None
        assert await one.admit("c", 100) is None
        redis.command("FLUSHALL")
        redis.command("SCRIPT", "FLUSH")
        # One that never knew is told by one that does.
        account = f"warmgate:{{fleet}}:limits:{one.account.name}"
        await until(lambda: b"300" in redis.command("HGET", account, "spent"))
        denied = await two.admit("d", 100)
        assert denied is not None
        assert denied.limit is Limit.CONCURRENCY


async def test_what_was_used_last_is_not_forgotten_with_redis(redis: RedisServer) -> None:
    """The budget of requests that ended, with none begun since."""
    async with party(redis, budget_tokens=1000) as one:
        assert await one.admit("a", 100) is None
        assert await one.admit("b", 500) is None
        for name, used in (("a", 90), ("b", 400)):
            one.settle(name, used)
        await one.quiet()
        redis.command("FLUSHALL")
        account = f"warmgate:{{fleet}}:limits:{one.account.name}"
        await until(lambda: redis.command("HGET", account, "spent") not in (b"$-1\r\n", b"$1\r\n0\r\n"))
        assert redis.command("HGET", account, "spent") == b"$3\r\n490\r\n"
        denied = await one.admit("c", 600)
        assert denied is not None
        assert denied.limit is Limit.BUDGET


async def test_an_answer_that_was_lost_holds_no_place(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 45: a frozen Redis still does what it was asked before, when whoever asked has given up."""
    monkeypatch.setattr("gateway.tenancy.shared.BEAT_S", 1e6)  # the next beat is the one after the failure
    async with party(redis, concurrency=1) as one:
        one.shared._call_s = 0.05
        redis.freeze()
        try:
            with pytest.raises(LinkDown):
                await one.admit("a")
        finally:
            redis.thaw()
        account = f"warmgate:{{fleet}}:limits:{one.account.name}"
        await until(lambda: redis.command("HGET", account, "at") != b"$-1\r\n")  # it came late
        one.shared._call_s = 30.0
        await until(lambda: one.shared.is_up)
        await until(lambda: b"a:" not in redis.command("HGETALL", account))
        assert await one.admit("b") is None


async def test_a_server_that_is_no_master_any_more_is_as_good_as_none(redis: RedisServer) -> None:
    async with party(redis, concurrency=2) as one:
        redis.command("REPLICAOF", "127.0.0.1", "1")
        with pytest.raises(LinkDown):
            await one.admit("a")
        redis.command("REPLICAOF", "NO", "ONE")
        await until(lambda: one.shared.is_up)
        assert await one.admit("a") is None


async def test_who_leaves_while_asking_holds_nothing(redis: RedisServer) -> None:
    async with party(redis, concurrency=1) as one:
        for _ in range(20):
            task = asyncio.create_task(one.shared.admit([one.account], 0))
            for _ in range(random.Random(7).randrange(4)):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await until(lambda: not one.shared._admits)
        await one.quiet()
        assert await one.admit("a") is None


async def test_redis_decides_as_the_machine_does(redis: RedisServer) -> None:
    """The same requests to both; only the limits that don't depend on the clock's exact reading."""
    rng = random.Random(11)
    limits = Limits(requests_per_minute=30, tokens_per_minute=3000, concurrency=4, budget_tokens=4000)
    machine, other = Ledger(), Party(redis, limits)
    account = machine.account("key one", limits)
    assert account is not None
    other.shared.start()
    await until(lambda: other.shared.is_up)
    open_now: list[str] = []
    for number in range(60):
        if open_now and rng.random() < 0.45:
            name = open_now.pop(rng.randrange(len(open_now)))
            used = rng.randrange(0, 150)
            machine.settle(name, used, WALL)
            other.settle(name, used)
            await other.quiet()
            continue
        wanted = rng.randrange(0, 400)
        here = machine.admit(str(number), [account], wanted, 0.0, WALL)
        there = await other.admit(str(number), wanted)
        assert (here is None) == (there is None), number
        if here is None:
            open_now.append(str(number))
        else:
            assert there is not None
            assert (here.limit, here.bound, here.wanted) == (there.limit, there.bound, there.wanted)
    await other.shared.close()


@contextlib.asynccontextmanager
async def keyed_gateway(redis: RedisServer, replica: Replica, **settings: object) -> AsyncIterator[Running]:
    async with gateway(urls=[replica.url], wait=False, redis_url=redis.url, **settings) as running:
        await until(lambda: running.app.registry.ready())
        shared = running.app.tenancy.shared
        assert shared is not None
        await until(lambda: shared.is_up)
        yield running
        running.app.tenancy.check_invariants()


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    made = Replica(incarnation="one")
    await made.start()
    yield made
    await made.stop()


async def test_keys_in_redis_come_go_and_survive_its_loss(redis: RedisServer, replica: Replica) -> None:
    store = RedisStore(redis.url, "default")
    async with keyed_gateway(redis, replica, keys_redis=True) as running:
        find = running.app.tenancy.directory.find
        key, record = new_key("acme", limits=Limits(requests_per_minute=100))
        store.put(record)
        await until(lambda: find(key.encode()))
        assert (await ask(running, key)).status_code == 200
        redis.command("FLUSHALL")
        await until(lambda: record.id in store.read().keys)
        assert store.read().salt_secret
        assert (await ask(running, key)).status_code == 200
        assert store.remove(record.id)
        await until(lambda: find(key.encode()) is None)
        assert (await ask(running, key)).status_code == 401


async def test_a_key_made_right_after_a_loss_costs_no_other(redis: RedisServer, replica: Replica) -> None:
    """Before any gateway has seen that Redis is empty: the book that begins there must not pass for the old one."""
    store = RedisStore(redis.url, "default")
    old_key, old = new_key("acme")
    store.put(old)
    secret = store.read().salt_secret
    async with keyed_gateway(redis, replica, keys_redis=True) as running:
        find = running.app.tenancy.directory.find
        await until(lambda: find(old_key.encode()))
        redis.command("FLUSHALL")
        young_key, young = new_key("acme")  # the same version as before, too
        store.put(young)
        await until(lambda: find(young_key.encode()))
        assert find(old_key.encode()) is not None
        assert store.read().keys.keys() == {old.id, young.id}
        assert store.read().salt_secret == secret, "prefixes stay what they were"
        # One that knows the young book alone finds it in this one, and brings back nothing that is revoked.
        assert store.remove(young.id)
        late = Link(redis.url)
        words = fields_of(KeyBook({young.id: young})).popitem()
        assert await late.raw("EVAL", GIVE_BACK, 1, redis_key("default"), _began(redis), 1, *words) == 0
        await late.close()
        assert store.read().keys.keys() == {old.id}


def _began(redis: RedisServer) -> str:
    """The secret of the book that is in this one."""
    fields = redis.command("HKEYS", redis_key("default")).decode().split()
    [mark] = [field for field in fields if field.startswith("was:")]
    return mark.removeprefix("was:")


async def test_keys_in_redis_that_are_none_change_nothing(redis: RedisServer, replica: Replica) -> None:
    store = RedisStore(redis.url, "default")
    first_key, first = new_key("acme")
    store.put(first)
    async with keyed_gateway(redis, replica, keys_redis=True) as running:
        await until(lambda: len(running.app.tenancy.directory) == 1)
        watcher = running.app.tenancy._watcher
        assert watcher is not None
        redis.command("HSET", "warmgate:{default}:keys", "version", "many")
        await until(lambda: "version" in watcher._said)
        assert (await ask(running, first_key)).status_code == 200
        redis.command("HSET", "warmgate:{default}:keys", "version", "7")
        second_key, second = new_key("acme")
        store.put(second)
        await until(lambda: len(running.app.tenancy.directory) == 2)
        assert (await ask(running, second_key)).status_code == 200


async def test_without_redis_each_gateway_holds_its_share(redis: RedisServer, replica: Replica, tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    key = keys.make("acme", requests_per_minute=8)
    settings = {"keys_file": keys.path}
    async with keyed_gateway(redis, replica, **settings) as one, keyed_gateway(redis, replica, **settings) as two:
        both = [one.app.tenancy.shared, two.app.tenancy.shared]
        await until(lambda: all(each is not None and each.num_gateways == 2 for each in both))
        redis.freeze()
        try:
            answers = [(await ask(one, key)).status_code for _ in range(8)]
        finally:
            redis.thaw()
        assert answers == [200] * 4 + [429] * 4
        assert one.events("warmgate_limits_local_total") == 8
        await until(lambda: all(each is not None and each.is_up for each in both))
