"""Requests that kill workers: after the second one they are refused, not handed to a third.

Theory. A prompt that crashes an engine crashes every engine that it is sent to, and failover, meant to help, walks it
through the fleet. Whose fault a crash was can't be seen from outside, so requests that were on a worker when it died
are suspects: an innocent one is hardly ever there twice. A request is named by the digest of its body, so that a
client's own retry is known again.

A broken connection is not yet a death. It counts when the replica turns out to be gone, loading or another process in
the next poll that can say so.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from xxhash import xxh3_128_intdigest

from gateway.replicas.registry import Replica

MAX_DEATHS = 2
HELD_S = 600.0
MAX_SUSPECTS = 4096
MAX_VERDICTS = 8  # of one request; the oldest are dropped


@dataclass(slots=True, eq=False)
class _Suspect:
    """`until` is when it is forgotten. `verdicts` tell of each replica that broke under it, by name and incarnation,
    whether it died: equal requests that shared a worker share its death."""

    until: float
    verdicts: dict[tuple[str, str], asyncio.Future[bool]] = field(default_factory=dict)

    def num_deaths(self) -> int:
        ended = [verdict for verdict in self.verdicts.values() if verdict.done() and not verdict.cancelled()]
        return sum(verdict.exception() is None and verdict.result() for verdict in ended)


class Quarantine:
    """`has_died(replica, incarnation)` waits for a poll of the replica that can tell whether that process is gone."""

    def __init__(self, has_died: Callable[[Replica, str], Awaitable[bool]], clock: Callable[[], float]) -> None:
        self._has_died = has_died
        self._clock = clock
        self._suspects: OrderedDict[int, _Suspect] = OrderedDict()

    def __len__(self) -> int:
        return len(self._suspects)

    def holds(self, path: str, body: bytes) -> bool:
        """Whether this request has killed its share of workers. Costs nothing while nothing is suspected."""
        if not self._suspects:
            return False
        self._forget()
        suspect = self._suspects.get(_name(path, body))
        return suspect is not None and suspect.num_deaths() >= MAX_DEATHS

    def suspect(self, path: str, body: bytes, replica: Replica) -> None:
        """The replica broke while it had this request."""
        self._forget()
        name = _name(path, body)
        suspect = self._suspects.setdefault(name, _Suspect(0.0))
        self._suspects.move_to_end(name)
        suspect.until = self._clock() + HELD_S
        life = (replica.replica_id, replica.incarnation)
        if life not in suspect.verdicts:
            suspect.verdicts[life] = asyncio.ensure_future(self._has_died(replica, replica.incarnation))
        while len(suspect.verdicts) > MAX_VERDICTS:
            suspect.verdicts.pop(next(iter(suspect.verdicts))).cancel()
        while len(self._suspects) > MAX_SUSPECTS:
            self._suspects.popitem(last=False)

    async def settled(self, path: str, body: bytes) -> bool:
        """`holds`, after the deaths that are being looked into are known (if they could change it)."""
        suspect = self._suspects.get(_name(path, body))
        if suspect is None or len(suspect.verdicts) < MAX_DEATHS:
            return False
        await asyncio.wait(suspect.verdicts.values())
        return suspect.num_deaths() >= MAX_DEATHS

    def _forget(self) -> None:
        now = self._clock()
        while self._suspects:
            name, suspect = next(iter(self._suspects.items()))
            if suspect.until > now:
                return
            del self._suspects[name]

    async def close(self) -> None:
        verdicts = [verdict for suspect in self._suspects.values() for verdict in suspect.verdicts.values()]
        for verdict in verdicts:
            verdict.cancel()
        await asyncio.gather(*verdicts, return_exceptions=True)

    def check_invariants(self) -> None:
        untils = [suspect.until for suspect in self._suspects.values()]
        assert untils == sorted(untils), "the first to forget is the first in order"
        assert len(self._suspects) <= MAX_SUSPECTS
        assert all(suspect.verdicts for suspect in self._suspects.values())


def _name(path: str, body: bytes) -> int:
    return xxh3_128_intdigest(path.encode() + b"\x00" + body)
