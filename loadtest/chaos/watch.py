"""Watching from outside meanwhile: which gateways are ready, how soon they avoid a worker, which slots are freed.

A gateway avoids a worker from the moment at which its /health calls it anything but ready: no new request is placed
there then. That is asked ten times a second while a worker is down, so times are up to a tenth of a second too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import httpx
import msgspec

from loadtest.chaos.processes import Gateway, Worker

_TICK_S = 0.1
_IDLE_TICKS = 5  # asked only so often while nothing is awaited
_COLLECT_TICKS = 10
Harmed = Literal["killed", "stopped"]


@dataclass(frozen=True, slots=True)
class _Awaited:
    gateway: Gateway
    worker: Worker
    how: Harmed
    since: float


@dataclass(slots=True, eq=False)
class Watch:
    """`avoided_s` are times to notice, `num_unmeasured` harms that were over (or whose gateway was) before that.

    harms  intervals in which a worker was in trouble, by its number
    ends   how and when workers ended each request, by its id
    """

    gateways: Sequence[Gateway]
    workers: Sequence[Worker]
    client: httpx.AsyncClient
    collects: bool
    avoided_s: dict[Harmed, list[float]] = field(default_factory=lambda: {"killed": [], "stopped": []})
    num_unmeasured: int = 0
    harms: dict[int, list[list[float]]] = field(default_factory=dict)
    ends: dict[str, list[tuple[str, float, int]]] = field(default_factory=dict)
    _awaited: list[_Awaited] = field(default_factory=list)
    _states: dict[int, dict[str, str]] = field(default_factory=dict)

    @contextlib.contextmanager
    def harmed(self, worker: Worker, how: Harmed | None) -> Iterator[None]:
        """While it is in trouble; with `how`, gateways that think it well are expected to notice."""
        interval = [time.monotonic(), float("inf")]
        self.harms.setdefault(worker.number, []).append(interval)
        if how is not None:
            self._awaited += [
                _Awaited(gateway, worker, how, interval[0])
                for gateway in self.gateways
                if self._states.get(gateway.number, {}).get(worker.replica_id) == "ready"
            ]
        try:
            yield
        finally:
            interval[1] = time.monotonic()

    def give_up(self, worker: Worker) -> None:
        """It is about to be well again: who hasn't noticed by now can't any more."""
        self.num_unmeasured += sum(each.worker is worker for each in self._awaited)
        self._awaited = [each for each in self._awaited if each.worker is not worker]

    def was_harmed(self, worker: int, start: float, end: float) -> bool:
        return any(began <= end and start <= over for began, over in self.harms.get(worker, ()))

    async def run(self) -> None:
        """Until cancelled."""
        tick = 0
        while True:
            busy = {each.gateway.number for each in self._awaited}
            asked = [each for each in self.gateways if each.number in busy or tick % _IDLE_TICKS == 0]
            await asyncio.gather(*(self._ask(gateway) for gateway in asked))
            if tick % _COLLECT_TICKS == 0:
                await self.collect()
            tick += 1
            await asyncio.sleep(_TICK_S)

    async def _ask(self, gateway: Gateway) -> None:
        sent_at = time.monotonic()
        try:
            health = (await self.client.get(f"{gateway.url}/health", timeout=5.0)).json()
        except (httpx.HTTPError, ValueError):
            health = None
        now = time.monotonic()
        lost = health is None or gateway.was_down(sent_at, now)
        gateway.is_ready = not lost and health["status"] == "ok"
        states: dict[str, str] = {} if lost else {each["id"]: each["state"] for each in health["replicas"]}
        self._states[gateway.number] = states
        kept = []
        for each in self._awaited:
            if each.gateway is not gateway:
                kept.append(each)
            elif lost:
                self.num_unmeasured += 1
            elif states.get(each.worker.replica_id) != "ready":
                self.avoided_s[each.how].append(now - each.since)
            else:
                kept.append(each)
        self._awaited = kept

    async def collect(self) -> None:
        """Fetch what fake workers say of ends; one that is dead or stopped says nothing."""
        if self.collects:
            await asyncio.gather(*(self._collect(worker) for worker in self.workers))

    async def _collect(self, worker: Worker) -> None:
        now = time.monotonic()
        if self.was_harmed(worker.number, now, now):
            return
        try:
            answer = await self.client.get(f"http://127.0.0.1:{worker.port}/fake/ends", timeout=2.0)
            for request_id, how, at in msgspec.json.decode(answer.content, type=list[tuple[str, str, float]]):
                self.ends.setdefault(request_id, []).append((how, at, worker.number))
        except (httpx.HTTPError, msgspec.DecodeError):
            return
