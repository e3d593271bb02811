"""Keeps the index's snapshot in Redis: who writes it and when, and who reads it.

The gateway with the least id of those that know something writes: every snapshot.REWRITE_S, when there is none (any
more), and when a newcomer asks. A gateway to which a replica is new asks for a fresh one; while it is alone it takes
what lies there, which is what a gateway that stopped, perhaps itself, left behind.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from gateway.replicas.registry import Registry
from gateway.router import Router
from gateway.sharing import snapshot
from gateway.sharing.book import Book, Requests
from gateway.sharing.link import Link, LinkDown
from gateway.sharing.wire import WireError
from policies.events import BlocksRecalled, Joined
from policies.types import BlockKey, ReplicaId, ReplicaStatus

_log = logging.getLogger("warmgate.sharing")
STEP_S = 0.25
ALONE_S = 1.5  # without an answer by then, the stored snapshot is taken
LOOK_S = 2.0  # between two looks whether there is one


class Keeper:
    """`matches` says whether a replica is the same process with the same cut here."""

    def __init__(
        self, link: Link, prefix: str, book: Book, router: Router, registry: Registry,
        matches: Callable[[ReplicaId, str, str], bool],
    ) -> None:  # fmt: skip
        self.link = link
        self._prefix = prefix
        self._book = book
        self._router = router
        self._registry = registry
        self._matches = matches
        self._seen: dict[ReplicaId, tuple[str, str]] = {}
        self._wants_since: float | None = None
        self._asks = False
        self._asked = False  # a peer wants a fresh one
        self._ready = False  # a peer has written one
        self._announces = False
        self._looked_at = float("-inf")
        self._written_at = float("-inf")
        self.num_recalled = 0

    def joined(self, event: Joined) -> bool:
        """Whether the replica, its process or its cut is new here; then the index of others is wanted for it."""
        identity = (event.incarnation, event.key_space)
        if event.status is not ReplicaStatus.READY or self._seen.get(event.replica_id) == identity:
            return False
        self._seen[event.replica_id] = identity
        self._wants_since = time.monotonic()
        return True

    def take_ask(self) -> bool:
        """Whether the next beat asks for a snapshot."""
        asks, self._asks = self._asks, False
        return asks

    def take_announcement(self) -> bool:
        """Whether the next beat says that one is ready."""
        announces, self._announces = self._announces, False
        return announces

    def serve(self, requests: Requests) -> None:
        self._asked |= requests.index
        self._ready |= requests.snapshot_ready

    async def run(self) -> None:
        while True:
            try:
                await self._step(time.monotonic())
            except LinkDown:
                await asyncio.sleep(self.link.retry_in_s)
            except WireError as error:
                _log.warning("%s", error)
                self._wants_since = None
            await asyncio.sleep(STEP_S)

    async def _step(self, now: float) -> None:
        ready, self._ready = self._ready, False
        if self._wants_since is not None:
            if ready or now - self._wants_since > ALONE_S:
                await self._read()
            else:
                self._asks = True
                return
        if not self._book.is_first():
            self._asked = False
            return
        if self._asked or await self._is_due(now):
            asked, self._asked = self._asked, False
            if await self.write():
                self._announces |= asked

    async def _is_due(self, now: float) -> bool:
        if now - self._written_at > snapshot.REWRITE_S:
            return True
        if now - self._looked_at < LOOK_S:
            return False
        self._looked_at = now
        return not await self.link.raw("EXISTS", f"{self._prefix}:index")

    async def write(self) -> bool:
        """Whether there was anything to write. Raises LinkDown."""
        index = self._router.fleet.index
        held = [
            snapshot.Held(each.replica_id, each.incarnation, each.key_space, index.holds(each.replica_id))
            for each in self._registry
            if each.joined
        ]
        self._written_at = time.monotonic()
        if held:
            await snapshot.write(self.link, self._prefix, held)
        return bool(held)

    async def _read(self) -> None:
        self.num_recalled += await snapshot.read(self.link, self._prefix, self._taker)
        self._wants_since = None

    def _taker(self, section: snapshot.Section) -> snapshot.Taker | None:
        replica_id = ReplicaId(section.replica_id)
        if not self._matches(replica_id, section.incarnation, section.space):
            return None

        def take(keys: tuple[BlockKey, ...], age_s: float) -> None:
            now = time.monotonic()
            self._router.apply_remote(BlocksRecalled(now, replica_id, keys, now - age_s))

        return take
