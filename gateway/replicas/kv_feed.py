"""Listens to one replica's KV events and keeps the router's picture of its cache exact, or says that it is not.

Events come over ZMQ PUB, which loses messages when a connection breaks or a queue is full. The numbers on them show it,
and a second socket of the replica replays what it still has. So the feed

* asks for everything from 0 when it starts: a gateway that comes late learns what the cache already holds. And again a
  moment later and at growing intervals, because a subscription takes its time to arrive, and what is sent meanwhile is
  lost;
* fills a gap by a replay before it goes on;
* asks for the last batch again when it was quiet for a while, because a lost tail leaves no gap until more follows. The
  answer also shows a publisher that was replaced behind the same address;
* starts over, with an empty cache, when the batches are another life's.

Where a gap can't be filled, and while the replica is not heard at all, the router hears `FeedLost`: what it knows of
the replica is a prediction until the cache is cleared or the feed begins at a beginning (it then says BlocksCleared).
The feed itself goes on with what it gets.

Everything happens on the event loop in short steps; a long replay lets other tasks run in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import zmq
import zmq.asyncio

from engine_worker.contract import kv_events as wire
from gateway.prefix.cursor import Cursor, Place
from gateway.prefix.translate import KvEventTranslator
from gateway.replicas.kv_endpoint import connected, reachable_endpoint
from policies.events import BlocksCleared, Event, FeedLost
from policies.types import ReplicaId

__all__ = ["FeedStatus", "FeedTiming", "KvFeed", "reachable_endpoint"]

log = logging.getLogger(__name__)

_STEPS_BETWEEN_YIELDS = 20
_REPLAY_ROUNDS = 5  # a replay can itself lose messages; each round must get further


class FeedStatus(StrEnum):
    """CONNECTING: about to read from the start. EXACT: every event was seen. APPROXIMATE: some or all were not."""

    CONNECTING = "connecting"
    EXACT = "exact"
    APPROXIMATE = "approximate"


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedTiming:
    """Seconds: a replay's silence until it counts as failed; of quiet before the first check; the most before one."""

    replay_timeout_s: float = 2.0
    retry_s: float = 1.0
    idle_check_s: float = 10.0


class _ReplayFailed(Exception):
    pass


class KvFeed:
    """One replica's feed, for one incarnation of it. `start` it on the event loop and `close` it when done.

    endpoint, replay_endpoint  ZMQ addresses as `reachable_endpoint` gives them; "" where there is no replay
    on_events                  gets events for FleetState.apply, in order, on the event loop; must not block
    on_status                  gets each change of status and a sentence on why
    clock                      the router's clock, seconds
    """

    def __init__(
        self,
        replica_id: ReplicaId,
        endpoint: str,
        replay_endpoint: str,
        translator: KvEventTranslator,
        on_events: Callable[[Sequence[Event]], None],
        on_status: Callable[[FeedStatus, str], None] = lambda _status, _reason: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        timing: FeedTiming | None = None,
    ) -> None:
        self._replica_id = replica_id
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._translator = translator
        self._on_events = on_events
        self._on_status = on_status
        self._clock = clock
        self._timing = timing or FeedTiming()
        self._context = zmq.asyncio.Context.instance()
        self._cursor = Cursor()
        self._task: asyncio.Task[None] | None = None
        self._caught_up = False
        self._quiet_s = self._timing.retry_s
        self.status = FeedStatus.CONNECTING
        self.num_batches = 0
        self.num_gaps = 0
        self.num_restarts = 0

    def start(self) -> None:
        assert self._task is None, "a feed is started once"
        self._task = asyncio.create_task(self._run(), name=f"kv-feed-{self._replica_id}")

    async def close(self) -> None:
        """Stop and close the sockets. The router's picture stays as it is."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            try:
                await self._listen()
            except zmq.ZMQError as error:
                self._lose(f"its KV events can't be read from {self._endpoint}: {error.strerror}")
            except Exception:
                log.exception("the KV event feed of %s failed and starts over", self._replica_id)
                self._lose("the feed failed")
            await asyncio.sleep(self._timing.retry_s)

    async def _listen(self) -> None:
        with connected(self._context, zmq.SUB, self._endpoint) as socket:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            self._start_over()
            await self._catch_up()
            if not self._caught_up:
                self._lose("nothing was heard from it yet")
            while True:
                if await socket.poll(int(self._quiet_s * 1000)):
                    await self._drain(socket)
                    continue
                await self._catch_up()
                if self._caught_up:
                    self._quiet_s = min(2 * self._quiet_s, self._timing.idle_check_s)

    async def _drain(self, socket: zmq.asyncio.Socket) -> None:
        for _ in range(_STEPS_BETWEEN_YIELDS):
            try:
                frames = await socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                await self._receive(*wire.decode_frames(frames))
            except wire.WireError as error:
                self._lose(f"it sent something that is no KV event: {error}")
        await asyncio.sleep(0)

    async def _receive(self, sequence: int, payload: bytes) -> None:
        place = self._cursor.place(sequence, payload)
        if place is Place.SEEN:
            return
        if place is Place.GAP:
            self.num_gaps += 1
        if place is Place.OTHER_LIFE:
            self._restart()
        if place is not Place.NEXT or not self._caught_up:
            await self._catch_up()
            place = self._cursor.place(sequence, payload)
        if place in (Place.SEEN, Place.OTHER_LIFE):
            return  # the replay brought it, or it is an old life's last word
        if place is Place.GAP:
            self._lose(f"batches {self._cursor.expected} to {sequence - 1} of its KV events are lost")
        else:
            self._begin_whole()
        self._caught_up = True
        self._apply(sequence, payload)
        self._sound()

    async def _catch_up(self) -> None:
        """Get from the replay what we lack, and make sure that the publisher is the one we know."""
        if not self._replay_endpoint:
            return
        for _ in range(_REPLAY_ROUNDS):
            try:
                if await self._replay_round():
                    self._caught_up = True
                    self._sound()
                    return
            except _ReplayFailed as error:
                log.debug("a KV event replay of %s failed: %s", self._replica_id, error)
                return

    async def _replay_round(self) -> bool:
        """One request. True when the publisher's last batch is the last one applied here."""
        first = max(self._cursor.expected - 1, 0)
        num_answers = 0
        async with contextlib.aclosing(self._replayed(first)) as answers:
            async for sequence, payload in answers:
                num_answers += 1
                self._begin_whole()
                place = self._cursor.place(sequence, payload)
                if place is Place.OTHER_LIFE:
                    self._restart()
                    return False
                if place is Place.GAP:
                    if num_answers > 1:
                        return False  # lost on the way here: ask again from there
                    self._lose(f"batches {self._cursor.expected} to {sequence - 1} can't be replayed any more")
                if place is not Place.SEEN:
                    self._apply(sequence, payload)
                if num_answers % _STEPS_BETWEEN_YIELDS == 0:
                    await asyncio.sleep(0)
        if num_answers == 0 and self._cursor.expected > 0:
            self._restart()  # it does not have the batch that we had from it
            return False
        self._begin_whole()
        return True

    async def _replayed(self, first: int) -> AsyncGenerator[tuple[int, bytes], None]:
        """Batches from `first` on. Raises _ReplayFailed when the answer does not come or does not end."""
        timeout_ms = int(self._timing.replay_timeout_s * 1000)
        with connected(self._context, zmq.DEALER, self._replay_endpoint) as socket:
            await socket.send_multipart((b"", wire.encode_sequence(first)))
            while True:
                if not await socket.poll(timeout_ms):
                    raise _ReplayFailed(f"no answer within {self._timing.replay_timeout_s} s")
                try:
                    sequence, payload = wire.decode_frames(await socket.recv_multipart())
                except wire.WireError as error:
                    raise _ReplayFailed(str(error)) from error
                if sequence < 0:
                    return
                yield sequence, payload

    def _apply(self, sequence: int, payload: bytes) -> None:
        self._cursor.applied(sequence, payload)
        self.num_batches += 1
        try:
            batch = wire.decode_batch(payload)
        except wire.WireError as error:
            self._lose(f"batch {sequence} can't be read: {error}")
            return
        translation = self._translator.translate(batch, self._clock())
        self._deliver(translation.events)
        if any(isinstance(event, BlocksCleared) for event in translation.events):
            self._set_status(FeedStatus.EXACT, "its cache was cleared")
        if translation.lacking is not None:
            self._lose(translation.lacking)

    def _begin_whole(self) -> None:
        """Called when something was heard: if it is the first, what follows is known from its beginning."""
        if self.status is FeedStatus.APPROXIMATE and not self._caught_up and self._cursor.expected == 0:
            self._start_over()

    def _restart(self) -> None:
        self.num_restarts += 1
        self._start_over()

    def _start_over(self) -> None:
        self._cursor.restart()
        self._translator.clear()
        self._caught_up = False
        self._quiet_s = self._timing.retry_s
        self._deliver((BlocksCleared(at=self._clock(), replica_id=self._replica_id),))
        self._set_status(FeedStatus.CONNECTING, "its events are read from the start")

    def _sound(self) -> None:
        if self.status is FeedStatus.CONNECTING:
            self._set_status(FeedStatus.EXACT, "every event so far is known")

    def _lose(self, reason: str) -> None:
        if self.status is not FeedStatus.APPROXIMATE:
            self._deliver((FeedLost(at=self._clock(), replica_id=self._replica_id),))
            self._set_status(FeedStatus.APPROXIMATE, reason)

    def _set_status(self, status: FeedStatus, reason: str) -> None:
        if status is not self.status:
            self.status = status
            self._on_status(status, reason)

    def _deliver(self, events: Sequence[Event]) -> None:
        if events:
            self._on_events(events)
