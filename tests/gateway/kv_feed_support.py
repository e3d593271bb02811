"""A feed with what the router knows through it, and a publisher that loses, lies and restarts as told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
import zmq
import zmq.asyncio

from engine_worker.contract import kv_events as wire
from gateway.prefix.keys import pack_ids, token_chain
from gateway.prefix.service import Space
from gateway.prefix.translate import KvEventTranslator
from gateway.replicas.kv_feed import FeedStatus, FeedTiming, KvFeed
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
