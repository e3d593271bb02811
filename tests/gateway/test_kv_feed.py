"""The feed against publishers on real sockets: the worker's own, and one that loses, lies and restarts as told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec
import pytest
import uvloop
import zmq
import zmq.asyncio

from engine_worker.contract import kv_events as wire
from engine_worker.core import events as core
from engine_worker.core.types import BlockHash
from engine_worker.serving.kv_publisher import KVPublisher
from gateway.prefix.keys import pack_ids, token_chain
from gateway.prefix.service import Space
from gateway.prefix.translate import KvEventTranslator
from gateway.replicas.kv_feed import FeedStatus, FeedTiming, KvFeed, reachable_endpoint
from policies.events import BlocksCleared, BlocksRemoved, BlocksStored, Event, FeedLost
from policies.types import BlockKey, KeySpace, ReplicaId

SPACE = Space(KeySpace("tokens:x:2:m"), "m", "fingerprint", 2)
QUICK = FeedTiming(replay_timeout_s=0.2, retry_s=0.05, idle_check_s=0.1)
PATIENT = FeedTiming(replay_timeout_s=60.0, retry_s=0.05, idle_check_s=60.0)
HANG_S = 60.0


def key_of(n: int) -> BlockKey:
    """The key of the block with ids (n, n), behind nothing."""
    return token_chain(SPACE.root("", ""), pack_ids([n, n]), 2).keys[0]


class Listener:
    """A feed and what the router knows through it."""

    def __init__(self, endpoint: str, replay_endpoint: str, timing: FeedTiming = PATIENT) -> None:
        translator = KvEventTranslator(ReplicaId("r"), SPACE)
        self.keys: set[BlockKey] = set()
        self.num_lost = 0
        self.num_cleared = 0
        self.reasons: list[tuple[FeedStatus, str]] = []
        self._changed = asyncio.Event()
        self.feed = KvFeed(
            ReplicaId("r"), endpoint, replay_endpoint, translator, self._on_events, self._on_status, timing=timing
        )
        self.feed.start()

    def _on_events(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case BlocksStored():
                    self.keys |= set(event.keys)
                case BlocksRemoved():
                    self.keys -= set(event.keys)
                case BlocksCleared():
                    self.keys.clear()
                    self.num_cleared += 1
                case FeedLost():
                    self.num_lost += 1
        self._changed.set()

    def _on_status(self, status: FeedStatus, reason: str) -> None:
        self.reasons.append((status, reason))
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(HANG_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def knows(self, *numbers: int) -> None:
        expected = {key_of(n) for n in numbers}
        await self.until(lambda: self.keys == expected)

    async def is_(self, status: FeedStatus) -> None:
        await self.until(lambda: self.feed.status is status)


class ScriptedPublisher:
    """Sends what it is told, remembers it for replays, or is told not to."""

    def __init__(self, port: int = 0, replay_port: int = 0) -> None:
        context = zmq.asyncio.Context.instance()
        self.pub, self.router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        for socket, wanted in ((self.pub, port), (self.router, replay_port)):
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(f"tcp://127.0.0.1:{wanted}" if wanted else "tcp://127.0.0.1:*")
        self.endpoint = self.pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self.router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.buffer: dict[int, bytes] = {}
        self.answers = True
        self.swallows_once: set[int] = set()
        self.num_requests = 0
        self.requested = asyncio.Event()
        self.with_topic = True
        self._task = asyncio.create_task(self._serve())

    def remember(self, sequence: int, payload: bytes) -> None:
        """Published, but it never arrived anywhere."""
        self.buffer[sequence] = payload

    async def send(self, sequence: int, payload: bytes) -> None:
        self.buffer[sequence] = payload
        await self.pub.send_multipart([b"", wire.encode_sequence(sequence), payload])

    async def _serve(self) -> None:
        while True:
            peer, _, start = await self.router.recv_multipart()
            self.num_requests += 1
            self.requested.set()
            if not self.answers:
                continue
            head = [peer, b"", b"topic"] if self.with_topic else [peer, b""]
            for sequence in sorted(self.buffer):
                if sequence in self.swallows_once:
                    self.swallows_once.remove(sequence)
                elif sequence >= int.from_bytes(start, "big"):
                    await self.router.send_multipart([*head, wire.encode_sequence(sequence), self.buffer[sequence]])
            await self.router.send_multipart([*head, wire.END_OF_REPLAY, b""])

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.pub.close(linger=0)
        self.router.close(linger=0)


def block(n: int, life: float = 0.0) -> bytes:
    """A batch that stores the block (n, n)."""
    event = wire.BlockStored(block_hashes=(n,), parent_block_hash=None, token_ids=(n, n), block_size=2)
    return wire.encode_batch(life + n, [event])


def old_block(n: int) -> bytes:
    """The same in the older encoding: arrays all the way."""
    return msgspec.msgpack.encode([float(n), [["BlockStored", [n], None, [n, n], 2, None]]])


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


# The worker's own publisher


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
    await listener.until(lambda: listener.num_cleared == 1)
    assert listener.feed.status is FeedStatus.CONNECTING
    publisher = KVPublisher(gone.endpoint, replay_endpoint=gone.replay_endpoint)
    publisher.publish([stored(4)])
    await listener.knows(4)
    publisher.close()


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
