"""The feed against the worker's own publisher, on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop

from engine_worker.core import events as core
from engine_worker.core.types import BlockHash
from engine_worker.serving.kv_publisher import KVPublisher
from gateway.prefix.keys import pack_ids, token_chain
from gateway.replicas.kv_feed import FeedStatus
from tests.gateway.kv_feed_support import HANG_S, QUICK, SPACE, Listener, ScriptedPublisher, block


@pytest.fixture
async def publisher() -> AsyncIterator[ScriptedPublisher]:
    publisher = ScriptedPublisher()
    yield publisher
    await publisher.close()


@pytest.fixture
async def listen() -> AsyncIterator[Callable[..., Listener]]:
    listeners: list[Listener] = []

    def start(*args: object, **kwargs: object) -> Listener:
        listeners.append(Listener(*args, **kwargs))  # type: ignore[arg-type]
        return listeners[-1]

    yield start
    await asyncio.gather(*(listener.feed.close() for listener in listeners))
    names = {task.get_name() for task in asyncio.all_tasks()}
    assert not any(name.startswith("kv-feed") for name in names), "a closed feed leaves no task"


def stored(n: int, parent: int | None = None, salt: str = "") -> core.BlocksStored:
    parent_hash = None if parent is None else BlockHash(bytes([parent] * 32))
    return core.BlocksStored(
        block_hashes=(BlockHash(bytes([n] * 32)),),
        parent_block_hash=parent_hash,
        token_ids=(n, n),
        block_size=2,
        salt=salt,
    )


async def test_the_workers_publisher_feeds_the_gateway(listen: Callable[..., Listener]) -> None:
    publisher = KVPublisher("tcp://127.0.0.1:0")
    publisher.publish([stored(1), stored(2, parent=1)])
    listener = listen(publisher.endpoint, publisher.replay_endpoint)
    both = token_chain(SPACE.root("", ""), pack_ids([1, 1, 2, 2]), 2).keys
    salted = token_chain(SPACE.root("", "s"), pack_ids([3, 3]), 2).keys
    await listener.until(lambda: listener.keys == set(both))
    await listener.is_(FeedStatus.EXACT)
    publisher.publish([core.BlocksRemoved(block_hashes=(BlockHash(bytes([2] * 32)),))])
    publisher.publish([stored(3, salt="s")])
    await listener.until(lambda: listener.keys == {both[0], *salted})
    publisher.publish([core.AllBlocksCleared()])
    await listener.until(lambda: listener.keys == set())
    assert listener.num_lost == 0
    publisher.close()


def test_the_feed_works_on_the_gateways_own_event_loop() -> None:
    async def scenario() -> None:
        publisher = KVPublisher("tcp://127.0.0.1:0")
        listener = Listener(publisher.endpoint, publisher.replay_endpoint)
        publisher.publish([stored(1)])
        await listener.knows(1)
        await listener.is_(FeedStatus.EXACT)
        publisher.publish([stored(2)])
        await listener.knows(1, 2)
        await listener.feed.close()
        publisher.close()

    uvloop.run(scenario())


async def test_the_workers_publisher_restarts_on_the_same_port(listen: Callable[..., Listener]) -> None:
    first = KVPublisher("tcp://127.0.0.1:0")
    listener = listen(first.endpoint, first.replay_endpoint, QUICK)
    first.publish([stored(1)])
    await listener.knows(1)
    endpoint = first.endpoint
    first.close()
    await listener.knows(1)
    second = KVPublisher(endpoint, replay_endpoint=first.replay_endpoint)
    second.publish([stored(2)])
    second.publish([stored(3)])
    await listener.knows(2, 3)
    await listener.is_(FeedStatus.EXACT)
    second.close()


async def test_a_feed_that_starts_before_its_publisher_waits_for_it(listen: Callable[..., Listener]) -> None:
    gone = KVPublisher("tcp://127.0.0.1:0")
    gone.close()
    listener = listen(gone.endpoint, gone.replay_endpoint, QUICK)
    await listener.is_(FeedStatus.APPROXIMATE)
    assert (listener.num_lost, listener.num_cleared) == (1, 1), "nothing is believed to be complete meanwhile"
    publisher = KVPublisher(gone.endpoint, replay_endpoint=gone.replay_endpoint)
    await listener.is_(FeedStatus.EXACT)
    assert (listener.num_lost, listener.num_cleared) == (1, 2)
    publisher.publish([stored(4)])
    await listener.knows(4)
    publisher.close()


async def test_a_feed_without_a_replay_socket_is_exact_from_the_very_first_batch(
    publisher: ScriptedPublisher, listen: Callable[..., Listener]
) -> None:
    listener = listen(publisher.endpoint, "", QUICK)
    await listener.is_(FeedStatus.APPROXIMATE)
    while listener.feed.num_batches == 0:
        await publisher.send(0, block(0))
        await asyncio.sleep(0.01)
    await listener.is_(FeedStatus.EXACT)
    await publisher.send(1, block(1))
    await listener.knows(0, 1)
    await publisher.send(5, block(5))
    await listener.is_(FeedStatus.APPROXIMATE)
    await listener.knows(0, 1, 5)


async def test_a_feed_stops_in_the_middle_of_a_replay(publisher: ScriptedPublisher) -> None:
    publisher.answers = False
    listener = Listener(publisher.endpoint, publisher.replay_endpoint)
    async with asyncio.timeout(HANG_S):
        await publisher.requested.wait()
        await listener.feed.close()
        await listener.feed.close()


async def test_a_long_replay_lets_other_tasks_run(listen: Callable[..., Listener]) -> None:
    publisher = KVPublisher("tcp://127.0.0.1:0")
    for n in range(600):
        publisher.publish([stored(n % 200)])
    listener = listen(publisher.endpoint, publisher.replay_endpoint)
    num_turns = 0
    async with asyncio.timeout(HANG_S):
        while listener.feed.num_batches < 600:
            await asyncio.sleep(0)
            num_turns += 1
    assert num_turns > 600 / 20
    publisher.close()
