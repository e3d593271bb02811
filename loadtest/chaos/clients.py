"""Clients with habits: each asks, reads, leaves, waits or asks again, and writes down how every try ended."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from loadtest.chaos.asks import Ask
from loadtest.chaos.processes import Gateway
from loadtest.chaos.verdict import Ending, Reading, judge, mismatch
from loadtest.chaos.wire import Wire, connect, request_head

SILENCE_S = 120.0  # nothing may take longer: a try without an end by then is one of the faults that are looked for
_MAX_GATEWAY_TRIES = 40
_MAX_RETRY_AFTER_S = 2.0


@dataclass(slots=True, eq=False)
class Try:
    """One request on the wire. Times are of the monotonic clock, which all processes of a machine share."""

    ask: Ask
    request_id: str
    gateway: Gateway
    sent_at: float
    ended_at: float = 0.0
    first_token_at: float | None = None
    status: int = 0
    num_tokens: int = 0
    ending: Ending = Ending.UNFINISHED
    detail: str = ""
    faults: list[str] = field(default_factory=list)


class Clients:
    """`make_ask(number)` gives request after request to `num_clients` clients until `stop` or `num_requests`."""

    def __init__(self, gateways: list[Gateway], make_ask: Callable[[int], Ask], num_requests: int | None) -> None:
        self._gateways = gateways
        self._make_ask = make_ask
        self._numbers: Iterator[int] = iter(range(num_requests)) if num_requests is not None else itertools.count()
        self._idle: dict[tuple[int, bool], list[Wire]] = {}
        self.tries: list[Try] = []
        self.stopping = False

    async def run(self, num_clients: int) -> None:
        """Returns when all have ended what they began."""
        async with asyncio.TaskGroup() as group:
            for _ in range(num_clients):
                group.create_task(self._client())

    def close(self) -> None:
        for wire in itertools.chain.from_iterable(self._idle.values()):
            wire.abort()
        self._idle.clear()

    async def _client(self) -> None:
        for number in self._numbers:
            await self._ask(self._make_ask(number))
            if self.stopping:
                return

    async def _ask(self, ask: Ask) -> None:
        """One request to its end, with the retries that this client's habit allows."""
        num_retries, gateway = 0, self._gateways[ask.gateway % len(self._gateways)]
        for number in range(_MAX_GATEWAY_TRIES):
            gateway = self._reachable(gateway)
            each = Try(ask, f"chaos-{ask.number}-{number}", gateway, time.monotonic())
            self.tries.append(each)
            retry_after_s = await self._one(each)
            each.ended_at = time.monotonic()
            if each.ending is Ending.GATEWAY_LOST:
                gateway = self._other(gateway)
                await asyncio.sleep(0.05)
                continue
            impatient = ask.habit == "impatient" and each.ending in (Ending.LEFT, Ending.REJECTED)
            if not impatient or num_retries == ask.num_retries:
                return
            num_retries += 1
            await asyncio.sleep(min(retry_after_s, _MAX_RETRY_AFTER_S))

    def _reachable(self, gateway: Gateway) -> Gateway:
        """As a load balancer that asks /ready would have it."""
        other = self._other(gateway)
        return other if not gateway.is_ready and other.is_ready else gateway

    def _other(self, gateway: Gateway) -> Gateway:
        return self._gateways[(gateway.number + 1) % len(self._gateways)]

    async def _one(self, each: Try) -> float:
        """One try; returns the seconds to wait before another one that the answer asked for."""
        ask = each.ask
        reading = Reading(ask.is_chat, ask.stream)
        body = msgspec.json.encode(ask.body)
        head = request_head(ask.path, each.gateway.port, each.request_id, len(body))
        try:
            wire = await self._wire(each.gateway, ask.habit == "slow")
        except OSError as error:
            self._broken(each, reading, f"it can't be connected to ({error})")
            return 0.0

        def on_body(data: bytes) -> None:
            reading.feed(data)
            if each.first_token_at is None and reading.num_tokens:
                each.first_token_at = time.monotonic()
            if ask.habit == "leaves" and 0 < ask.leave_at <= reading.num_tokens:
                leave()

        left = False

        def leave() -> None:
            nonlocal left
            left = True
            wire.abort()

        def lose_patience() -> None:
            if each.first_token_at is None and not wire.ended_well:
                leave()

        loop = asyncio.get_running_loop()
        waits = ask.habit == "impatient" or (ask.habit == "leaves" and ask.leave_at < 0)
        patience = loop.call_later(ask.patience_s, lose_patience) if waits else None
        try:
            async with asyncio.timeout(SILENCE_S):
                await wire.exchange(head, body, on_body)
        except TimeoutError:
            wire.abort()
            each.faults.append(f"no end within {SILENCE_S:g} s")
        finally:
            if patience is not None:
                patience.cancel()
        each.status, each.num_tokens = wire.status, reading.num_tokens
        if left:
            self._left(each, reading)
            return 0.0
        if wire.ended_well:
            reading.close(wire.status)
        each.ending, faults = judge(ask, wire.status, reading, wire.ended_well)
        if each.ending is Ending.UNFINISHED:
            self._broken(each, reading, f"the connection ended after {reading.num_tokens} tokens")
        each.faults += faults
        if reading.error is not None:
            each.detail = f"{wire.status} {reading.error.get('code')}: {reading.error.get('message')}"
        if not wire.is_closed:
            self._idle.setdefault((each.gateway.number, ask.habit == "slow"), []).append(wire)
        retry_after = wire.headers.get("retry-after", "")
        return float(retry_after) if retry_after.isdigit() else 0.0

    def _left(self, each: Try, reading: Reading) -> None:
        each.ending = Ending.LEFT
        if wrong := mismatch(reading.text, each.ask.truth, whole=False):
            each.faults.append(wrong)

    def _broken(self, each: Try, reading: Reading, detail: str) -> None:
        """The connection failed: the gateway's fault, unless its process had been ended."""
        each.detail = detail
        each.ending = Ending.UNFINISHED
        if each.gateway.was_down(each.sent_at, time.monotonic()):
            each.ending = Ending.GATEWAY_LOST

    async def _wire(self, gateway: Gateway, slow: bool) -> Wire:
        idle = self._idle.get((gateway.number, slow), [])
        while idle:
            wire = idle.pop()
            if not wire.is_closed:
                return wire
        return await connect("127.0.0.1", gateway.port, slow)
