"""Doing the harm that the schedule says, and undoing it in time."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence

import httpx

from loadtest.chaos.processes import Gateway, Redis, Worker
from loadtest.chaos.schedule import SORTS, Harm
from loadtest.chaos.watch import Watch
from loadtest.toxic import Toxic

_LATENCY_S = 0.15
_BYTES_PER_S = 20_000.0


class Injector:
    """`faults` are things that should not be: a gateway that ends badly on SIGTERM."""

    def __init__(
        self,
        workers: Sequence[Worker],
        gateways: Sequence[Gateway],
        redis: Redis | None,
        client: httpx.AsyncClient,
        watch: Watch,
        tell: Callable[[str], None],
    ) -> None:
        self._workers = workers
        self._gateways = gateways
        self._redis = redis
        self._client = client
        self._watch = watch
        self._tell = tell
        self.done: list[Harm] = []
        self.faults: list[str] = []
        self._stop = asyncio.Event()
        self._turns = {sort: asyncio.Lock() for sort in set(SORTS.values())}

    def stop(self) -> None:
        """Begin nothing new; what is under way is undone in its time."""
        self._stop.set()

    async def run(self, harms: Sequence[Harm]) -> None:
        """Returns when everything is whole again."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for harm in harms:
                try:
                    async with asyncio.timeout(max(began + harm.at_s - time.monotonic(), 0.0)):
                        await self._stop.wait()
                    return
                except TimeoutError:
                    group.create_task(self._in_turn(harm))

    async def _in_turn(self, harm: Harm) -> None:
        """After the last one of its sort, with what a start took: the schedule can't know how long that is."""
        async with self._turns[harm.sort]:
            if self._stop.is_set():
                return
            self._tell(str(harm))
            self.done.append(harm)
            await self._do(harm)

    async def _do(self, harm: Harm) -> None:
        match harm.kind:
            case "kill_worker":
                await self._kill_worker(self._workers[harm.target], harm.for_s)
            case "stop_worker":
                await self._stop_worker(self._workers[harm.target], harm.for_s)
            case "harm_link":
                await self._harm_link(self._workers[harm.target], harm)
            case "kill_gateway" | "term_gateway":
                await self._end_gateway(self._gateways[harm.target], harm)
            case "stop_redis" | "kill_redis" | "flush_redis":
                assert self._redis is not None
                await self._harm_redis(self._redis, harm)

    async def _kill_worker(self, worker: Worker, for_s: float) -> None:
        with self._watch.harmed(worker, "killed"):
            await worker.kill()
            await asyncio.sleep(for_s)
            self._watch.give_up(worker)
            await worker.start(self._client)

    async def _stop_worker(self, worker: Worker, for_s: float) -> None:
        with self._watch.harmed(worker, "stopped"):
            worker.child.signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(for_s)
            finally:
                self._watch.give_up(worker)
                worker.child.signal(signal.SIGCONT)

    async def _harm_link(self, worker: Worker, harm: Harm) -> None:
        with self._watch.harmed(worker, None):
            _spoil(worker.link.toxic, harm)
            try:
                await asyncio.sleep(harm.for_s)
            finally:
                worker.link.toxic.heal()

    async def _end_gateway(self, gateway: Gateway, harm: Harm) -> None:
        number = signal.SIGKILL if harm.kind == "kill_gateway" else signal.SIGTERM
        status = await gateway.end(number)
        gateway.is_ready = False
        if number is signal.SIGTERM and status != 0:
            self.faults.append(f"gateway {gateway.number} ended with {status} after SIGTERM")
        await asyncio.sleep(harm.for_s / 2)
        await gateway.start(self._client)

    async def _harm_redis(self, redis: Redis, harm: Harm) -> None:
        if harm.kind == "flush_redis":
            try:
                await redis.command("FLUSHALL")
            except (OSError, TimeoutError) as error:
                self._tell(f"redis did not flush ({error or 'too slow'})")
        elif harm.kind == "kill_redis":
            await redis.child.end(signal.SIGKILL)
            await asyncio.sleep(harm.for_s)
            await redis.start()
        else:
            redis.child.signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(harm.for_s)
            finally:
                redis.child.signal(signal.SIGCONT)


def _spoil(toxic: Toxic, harm: Harm) -> None:
    match harm.link:
        case "slow":
            toxic.latency_s = _LATENCY_S
        case "narrow":
            toxic.bytes_per_s = _BYTES_PER_S
        case "slices":
            toxic.slice_bytes = harm.amount
        case "truncate":
            toxic.truncate_after = harm.amount
        case "reset":
            toxic.reset_after = harm.amount
        case "stall":
            toxic.stall_after = harm.amount
        case "refuse":
            toxic.refuse = True
