"""Sharing at work: one task writes this gateway's messages, one reads everybody's, one keeps the index's snapshot.

    writer    gathers events for `GATHER_S`, one XADD a message; a beat every `BEAT_S`
    reader    XREAD from where it stands, blocking; its own messages come back too, which shows that it reads on
    keeper    the index's snapshot (keeper.py)

States: `shared` while writing and reading work, else `local`: every gateway then goes on with its own knowledge, which
/health and the metrics say. What was missed is made good by complete lists of leases, here and at the peers.

A reader that stands beyond the stream's end (Redis lost its data and its clock went back, or another server took over)
would wait for ever; it notices that its own messages don't come back, and begins anew at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Sequence

import msgspec

from gateway.replicas.registry import Registry
from gateway.router import Router
from gateway.sharing import wire
from gateway.sharing.book import Book, Requests
from gateway.sharing.figures import SharingFigures
from gateway.sharing.keeper import Keeper
from gateway.sharing.link import Link, LinkDown
from gateway.sharing.outbox import Identity, Outbox
from policies.events import BlocksCleared, BlocksRemoved, BlocksStored, Event, FeedLost, Joined
from policies.types import ReplicaId

_log = logging.getLogger("warmgate.sharing")

GATHER_S = 0.005
BEAT_S = 0.5
READ_S = 0.5
READ_COUNT = 64
STREAM_LENGTH = 2048
ECHO_S = 2.0
_BLOCK_EVENTS = (BlocksStored, BlocksRemoved, BlocksCleared, FeedLost)
# Engines that tell no incarnation have their restarts counted by each gateway, which can't be compared.
_COUNTED_HERE = "start-"


class Sharing:
    """Raises ValueError when `url` is no Redis URL. `start` and `close` it on the event loop."""

    def __init__(self, url: str, fleet_name: str, router: Router, registry: Registry) -> None:
        self.gateway_id = secrets.token_hex(6)
        self._prefix = f"warmgate:{{{fleet_name}}}"  # braces keep a fleet's keys in one slot of a cluster
        self._stream = f"{self._prefix}:events"
        self._router = router
        self._registry = registry
        self._writer_link, self._reader_link = Link(url), Link(url)
        self.book = Book(self.gateway_id, self)
        self._keeper = Keeper(Link(url), self._prefix, self.book, router, registry, self.matches)
        self._outbox = Outbox(self._identity)
        self._wake = asyncio.Event()
        self._sequence = 0
        self._echoed_at = 0.0
        self._sent_since_echo = False
        self._read_anew = False
        self._blocks_wanted: set[ReplicaId] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._was_up: bool | None = None  # None: nothing was said yet
        self._num_published = 0
        router.listeners.append(self.observe)
        router.num_remote_leases = lambda: self.book.num_leases

    # This gateway, as the book sees it

    def apply(self, event: Event) -> None:
        self._router.apply_remote(event)

    def matches(self, replica_id: ReplicaId, incarnation: str, space: str) -> bool:
        replica = self._registry.find(replica_id)
        if replica is None or not replica.joined or replica.key_space != space:
            return False
        counted = incarnation.startswith(_COUNTED_HERE) and replica.incarnation.startswith(_COUNTED_HERE)
        return counted or replica.incarnation == incarnation

    def has_lease(self, request_id: str) -> bool:
        return self._router.fleet.has_lease(request_id)

    def lacking(self) -> Sequence[ReplicaId]:
        return [
            replica.replica_id
            for replica in self._registry
            if replica.joined and replica.key_mode == "token" and replica.kv_feed in ("none", "approximate")
        ]

    def _hears(self) -> list[str]:
        return [replica.replica_id for replica in self._registry if replica.joined and replica.kv_feed == "exact"]

    def _identity(self, replica_id: ReplicaId) -> Identity:
        replica = self._registry.get(replica_id)
        return replica.incarnation, replica.key_space

    # What happens here

    def observe(self, event: Event) -> None:
        """An event of this gateway's own, after it was applied."""
        if isinstance(event, _BLOCK_EVENTS):
            if isinstance(event, BlocksCleared):
                self.book.heard_here(event.replica_id)
            if event.replica_id not in self.book.wanted_blocks():
                return
        elif isinstance(event, Joined):
            if self._keeper.joined(event):
                self.book.ask_all()
            return
        if self._outbox.add(event, self._writer_link.is_up):
            self._wake.set()

    def figures(self) -> SharingFigures:
        links = (self._writer_link, self._reader_link)
        down = [link.why_down for link in links if not link.is_up]
        return SharingFigures(
            "local" if down else "shared",
            down[0] if down else "",
            self.gateway_id,
            len(self.book.peers),
            self.book.num_leases,
            self._num_published,
            self.book.num_applied,
            self._outbox.num_dropped,
            self.book.num_gaps,
            sum(link.num_failed_calls for link in (*links, self._keeper.link)),
            self._keeper.num_recalled,
        )

    # Tasks

    def start(self) -> None:
        for name, run in (("writer", self._write), ("reader", self._read), ("keeper", self._keeper.run)):
            self._tasks.append(asyncio.create_task(run(), name=f"sharing {name}"))

    async def close(self) -> None:
        """Say goodbye, leave a snapshot behind if nobody else will, and stop."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(LinkDown, TimeoutError):
            async with asyncio.timeout(1.0):
                if self._writer_link.is_up:
                    await self._send([wire.Bye()])
                if self.book.is_first() and self._keeper.link.is_up:
                    await self._keeper.write()
        self.book.forget_all(time.monotonic())
        for link in (self._writer_link, self._reader_link, self._keeper.link):
            await link.close()

    async def _write(self) -> None:
        beat_at = 0.0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(beat_at - time.monotonic(), 0.0)):
                    await self._wake.wait()
            self._wake.clear()
            now = time.monotonic()
            items: list[wire.Item] = []
            if now >= beat_at:
                beat_at = now + BEAT_S
                items += self._beat(now)
            if self._writer_link.retry_in_s > 0.0:
                self._outbox.drop()
                continue
            try:
                await self._send(self._outbox.take(now) + items)
            except LinkDown:
                self._outbox.drop()
            if len(self._outbox):
                self._wake.set()
            elif self._blocks_wanted:
                self._add_blocks()
            self._say_state()
            await asyncio.sleep(GATHER_S)

    def _beat(self, now: float) -> list[wire.Item]:
        beat = self.book.tick(now, self._hears())
        items: list[wire.Item] = [msgspec.structs.replace(beat, asks_index=self._keeper.take_ask())]
        if self._keeper.take_announcement():
            items.append(wire.Snapshot())
        if self._sent_since_echo and now - self._echoed_at > ECHO_S:
            self._read_anew = self._reader_link.is_up
        return items

    async def _send(self, items: list[wire.Item]) -> None:
        """One message. Its number is used up even when it fails: it may have arrived."""
        if not items:
            return
        self._sequence += 1
        data = wire.encode(self.gateway_id, self._sequence, items)
        if not self._sent_since_echo:
            self._sent_since_echo, self._echoed_at = True, time.monotonic()
        await self._writer_link.raw("XADD", self._stream, "MAXLEN", "~", STREAM_LENGTH, "*", "m", data)
        self._num_published += len(items)

    def _add_blocks(self) -> None:
        replica_id = self._blocks_wanted.pop()
        replica = self._registry.find(replica_id)
        if replica is not None and replica.joined and replica.kv_feed == "exact":
            self._outbox.add_blocks(replica_id, self._router.fleet.index.holds(replica_id))
            self._wake.set()

    def _say_state(self) -> None:
        links = (self._writer_link, self._reader_link)
        is_up = all(link.is_up for link in links)
        if not is_up and self._was_up is None and not any(link.num_failed_calls for link in links):
            return  # at the start: not tried yet
        if is_up is not self._was_up:
            self._was_up = is_up
            if is_up:
                _log.info("gateway %s shares its knowledge through Redis", self.gateway_id)
            else:
                _log.warning("%s: this gateway goes on with its own knowledge", self.figures().detail)

    async def _read(self) -> None:
        position: bytes | None = None
        while True:
            try:
                if position is None or self._read_anew:
                    self._read_anew = False
                    position = await self._end_of_stream()
                    self.book.ask_all()
                position = await self._read_on(position)
            except LinkDown:
                self._say_state()
                await asyncio.sleep(self._reader_link.retry_in_s)

    async def _end_of_stream(self) -> bytes:
        self._echoed_at = time.monotonic()
        last = await self._reader_link.raw("XREVRANGE", self._stream, "+", "-", "COUNT", 1)
        return bytes(last[0][0]) if last else b"0-0"

    async def _read_on(self, position: bytes) -> bytes:
        """Everything after `position`; waits for it up to READ_S. Returns the new position."""
        wait_ms = int(READ_S * 1000)
        found = await self._reader_link.raw(
            "XREAD", "COUNT", READ_COUNT, "BLOCK", wait_ms, "STREAMS", self._stream, position, timeout_s=READ_S + 0.25
        )
        for _, entries in found or ():
            for entry_id, fields in entries:
                position = entry_id
                try:
                    self._message(wire.decode((fields or {}).get(b"m", b"")))
                except wire.WireError as error:
                    _log.warning("Redis stream %s: %s", self._stream, error)
            await asyncio.sleep(0)
        return position

    def _message(self, message: wire.Message) -> None:
        now = time.monotonic()
        if message.gateway_id == self.gateway_id:
            self._echoed_at, self._sent_since_echo = now, message.sequence < self._sequence
            return
        self._serve(self.book.receive(message, now))

    def _serve(self, requests: Requests) -> None:
        if requests.leases:
            self._outbox.lists_leases = True
            self._wake.set()
        if requests.blocks:
            self._blocks_wanted.update(map(ReplicaId, requests.blocks))
            self._wake.set()
        self._keeper.serve(requests)

    def check_invariants(self) -> None:
        self.book.check_invariants()
        assert len(self._outbox.leases) <= self._router.stats.num_in_flight
