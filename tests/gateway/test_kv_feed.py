"""The feed against a publisher on real sockets that loses, lies and restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from engine_worker.contract import kv_events as wire
from gateway.replicas.kv_feed import FeedStatus, reachable_endpoint
from tests.gateway.kv_feed_support import QUICK, Listener, ScriptedPublisher, block, key_of, old_block


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


async def subscribed(publisher: ScriptedPublisher, listener: Listener) -> int:
    """Send blocks from 0 until one arrives live: subscribing takes a moment. The next sequence number."""
    sequence = 0
    while listener.feed.num_batches == 0:
        await publisher.send(sequence, block(sequence))
        sequence += 1
        await asyncio.sleep(0.01)
    await listener.knows(*range(sequence))
    return sequence


async def test_a_late_gateway_learns_the_cache_from_the_replay(
    publisher: ScriptedPublisher, listen: Callable[..., Listener]
) -> None:
    for n in range(50):
        publisher.remember(n, block(n) if n % 2 else old_block(n))
    listener = listen(publisher.endpoint, publisher.replay_endpoint)
    await listener.knows(*range(50))
    await listener.is_(FeedStatus.EXACT)
    assert listener.num_lost == 0


async def test_a_gap_is_filled_by_a_replay(publisher: ScriptedPublisher, listen: Callable[..., Listener]) -> None:
    publisher.with_topic = False
    listener = listen(publisher.endpoint, publisher.replay_endpoint)
    await listener.is_(FeedStatus.EXACT)
    following = await subscribed(publisher, listener)
    num_gaps = listener.feed.num_gaps
    publisher.remember(following, block(following))
    publisher.remember(following + 1, old_block(following + 1))
    await publisher.send(following + 2, block(following + 2))
    await listener.knows(*range(following + 3))
    assert listener.feed.num_gaps == num_gaps + 1
    assert (listener.feed.status, listener.num_lost) == (FeedStatus.EXACT, 0)


async def test_a_replay_that_itself_loses_messages_is_asked_again(
    publisher: ScriptedPublisher, listen: Callable[..., Listener]
) -> None:
    for n in range(20):
        publisher.remember(n, block(n))
    publisher.swallows_once = {5, 11}
    listener = listen(publisher.endpoint, publisher.replay_endpoint)
    await listener.knows(*range(20))
    await listener.is_(FeedStatus.EXACT)
    assert publisher.num_requests >= 2
    assert listener.num_lost == 0


async def test_what_can_not_be_replayed_makes_the_feed_approximate(
    publisher: ScriptedPublisher, listen: Callable[..., Listener]
) -> None:
    for n in range(30, 40):
        publisher.remember(n, block(n))
    listener = listen(publisher.endpoint, publisher.replay_endpoint)
    await listener.knows(*range(30, 40))
    await listener.is_(FeedStatus.APPROXIMATE)
    assert listener.num_lost == 1
    assert "0 to 29" in listener.reasons[-1][1]


async def test_a_silent_replay_socket_does_not_stop_live_events(
    publisher: ScriptedPublisher, listen: Callable[..., Listener]
) -> None:
    publisher.answers = False
    listener = listen(publisher.endpoint, publisher.replay_endpoint, QUICK)
    sequence = 100
    while listener.feed.num_batches < 3:
        await publisher.send(sequence, block(sequence))
        sequence += 1
        await asyncio.sleep(0.01)
    assert listener.feed.status is FeedStatus.APPROXIMATE
    assert listener.num_lost == 1
    assert len(listener.keys) >= 3
    assert listener.keys <= {key_of(n) for n in range(100, sequence)}


async def test_a_lost_tail_is_found_when_it_is_quiet(
    publisher: ScriptedPublisher, listen: Callable[..., Listener]
) -> None:
    listener = listen(publisher.endpoint, publisher.replay_endpoint, QUICK)
    await listener.is_(FeedStatus.EXACT)
    for n in range(3):
        publisher.remember(n, block(n))
    await listener.knows(0, 1, 2)
    assert listener.feed.status is FeedStatus.EXACT


async def test_cleared_makes_an_approximate_feed_exact(
    publisher: ScriptedPublisher, listen: Callable[..., Listener]
) -> None:
    publisher.remember(7, block(7))
    listener = listen(publisher.endpoint, publisher.replay_endpoint, QUICK)
    await listener.is_(FeedStatus.APPROXIMATE)
    publisher.remember(8, wire.encode_batch(8.0, [wire.AllBlocksCleared()]))
    await listener.is_(FeedStatus.EXACT)
    assert listener.keys == set()


async def test_an_unknown_parent_makes_the_feed_approximate(
    publisher: ScriptedPublisher, listen: Callable[..., Listener]
) -> None:
    orphan = wire.BlockStored(block_hashes=(5,), parent_block_hash=4, token_ids=(5, 5), block_size=2)
    publisher.remember(0, wire.encode_batch(0.0, [orphan]))
    publisher.remember(1, block(1))
    listener = listen(publisher.endpoint, publisher.replay_endpoint)
    await listener.knows(1)
    await listener.is_(FeedStatus.APPROXIMATE)
    assert "parent" in listener.reasons[-1][1]


async def test_rubbish_makes_the_feed_approximate_and_nothing_worse(
    publisher: ScriptedPublisher, listen: Callable[..., Listener]
) -> None:
    publisher.remember(0, block(0))
    publisher.remember(1, b"\xc1 no msgpack")
    publisher.remember(2, block(2))
    listener = listen(publisher.endpoint, publisher.replay_endpoint)
    await listener.knows(0, 2)
    await listener.is_(FeedStatus.APPROXIMATE)


async def test_another_life_behind_the_same_address_starts_over(
    publisher: ScriptedPublisher, listen: Callable[..., Listener]
) -> None:
    """More batches than the old life had, so that only the payload of the last known one tells."""
    listener = listen(publisher.endpoint, publisher.replay_endpoint, QUICK)
    for n in range(5):
        publisher.remember(n, block(n))
    await listener.knows(*range(5))
    publisher.buffer.clear()
    for n in range(9):
        publisher.remember(n, block(100 + n, life=1000.0))
    await listener.knows(*range(100, 109))
    assert listener.feed.num_restarts >= 1
    await listener.is_(FeedStatus.EXACT)


async def test_a_live_batch_of_another_life_starts_over(
    publisher: ScriptedPublisher, listen: Callable[..., Listener]
) -> None:
    listener = listen(publisher.endpoint, publisher.replay_endpoint)
    await listener.is_(FeedStatus.EXACT)
    await subscribed(publisher, listener)
    publisher.buffer.clear()
    await publisher.send(0, block(200, life=1000.0))
    await listener.knows(200)
    assert listener.feed.num_restarts == 1


async def test_an_empty_new_life_clears_the_cache(
    publisher: ScriptedPublisher, listen: Callable[..., Listener]
) -> None:
    listener = listen(publisher.endpoint, publisher.replay_endpoint, QUICK)
    publisher.remember(0, block(0))
    await listener.knows(0)
    publisher.buffer.clear()
    await listener.knows()
    await listener.is_(FeedStatus.EXACT)


async def test_without_a_replay_socket_only_the_first_batch_on_makes_it_exact(
    publisher: ScriptedPublisher, listen: Callable[..., Listener]
) -> None:
    listener = listen(publisher.endpoint, "", QUICK)
    while listener.feed.num_batches == 0:
        await publisher.send(3, block(3))
        await asyncio.sleep(0.01)
    await listener.is_(FeedStatus.APPROXIMATE)
    await listener.knows(3)


@pytest.mark.parametrize(
    ("endpoint", "url", "expected"),
    [
        ("tcp://*:5557", "http://10.0.0.7:8101", "tcp://10.0.0.7:5557"),
        ("tcp://127.0.0.1:5557", "http://127.0.0.1:8101/v1", "tcp://127.0.0.1:5557"),
        ("tcp://127.0.0.1:5557", "http://localhost:8101", "tcp://localhost:5557"),
        ("tcp://127.0.0.1:5557", "http://10.0.0.7:8101", None),
        ("tcp://169.254.169.254:80", "http://worker-1:8101", "tcp://worker-1:80"),
        ("tcp://*:5557", "http://[::1]:8101", "tcp://[::1]:5557"),
        ("tcp://[::1]:5557", "http://10.0.0.7:8101", None),
        ("ipc:///run/kv", "http://127.0.0.1:8101", "ipc:///run/kv"),
        ("ipc:///run/kv", "http://10.0.0.7:8101", None),
        ("tcp://*", "http://10.0.0.7:8101", None),
        ("", "http://10.0.0.7:8101", None),
    ],
)
def test_endpoints_are_read_at_the_replicas_own_host(endpoint: str, url: str, expected: str | None) -> None:
    assert reachable_endpoint(endpoint, url) == expected
