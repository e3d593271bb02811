"""One run from processes to rows: start, take down what is held, traffic under harm, quiet, judge, end everything."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx

from loadtest.chaos.asks import Ask, Truth, ask
from loadtest.chaos.clients import Clients
from loadtest.chaos.engines import known_answers, worker_flags
from loadtest.chaos.injector import Injector
from loadtest.chaos.judge import Row, read_logs, rows
from loadtest.chaos.processes import Child, Gateway, NotStarted, Redis, Worker, free_ports, make_gateway, make_redis
from loadtest.chaos.processes import make_worker as worker_process
from loadtest.chaos.quiesce import Held, settled, steady
from loadtest.chaos.schedule import Harm, schedule
from loadtest.chaos.watch import Watch

NUM_WORKERS = 3
NUM_GATEWAYS = 2
FOREVER_S = 24 * 3600.0
# Shorter than the defaults, so that waits for what will not come are over within a harm's time.
GATEWAY_FLAGS = (
    *("--first-token-s", "8", "--stuck-after-s", "6", "--stream-idle-s", "8", "--request-s", "60"),
    *("--drain-s", "5", "--unready-s", "0.6"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """num_requests and duration_s: whichever comes first ends the traffic (None: no such end)."""

    seed: int
    num_requests: int | None
    duration_s: float | None
    every_s: float
    num_clients: int
    workers: Literal["fake", "engine"]
    model: str
    token_s: float
    with_redis: bool
    calm: bool = False
    folder: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    rows: list[Row]
    faults: list[str]
    rejections: list[str]
    endings: dict[str, int]
    num_asks: int
    harms: list[Harm]
    num_unmeasured: int
    wall_s: float

    @property
    def is_correct(self) -> bool:
        return all(row.ok is not False for row in self.rows if row.correctness)

    @property
    def misses_nothing(self) -> bool:
        return all(row.ok is not False for row in self.rows)


@dataclass(frozen=True, slots=True)
class _Fleet:
    workers: list[Worker]
    gateways: list[Gateway]
    redis: Redis | None

    @property
    def children(self) -> list[Child]:
        redis = [self.redis.child] if self.redis is not None else []
        return [*(worker.child for worker in self.workers), *(gateway.child for gateway in self.gateways), *redis]


async def run(options: Options, tell: Callable[[str], None]) -> Result:
    """Raises NotStarted."""
    limits = httpx.Limits(max_keepalive_connections=0)  # a control connection that is kept would count as held
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmgate-chaos-")))
        folder.mkdir(parents=True, exist_ok=True)
        async with (
            httpx.AsyncClient(trust_env=False, verify=False, limits=limits, timeout=10.0) as client,
            _running(options, folder, client) as fleet,
        ):
            return await _measured(options, fleet, client, tell)


async def _measured(options: Options, fleet: _Fleet, client: httpx.AsyncClient, tell: Callable[[str], None]) -> Result:
    known: Sequence[tuple[str, Truth, int]] = ()
    if options.workers == "engine":
        known = await known_answers(f"http://127.0.0.1:{fleet.workers[0].port}", options.seed, client)
    before = await steady(fleet.gateways, fleet.workers, client)
    watch = Watch(fleet.gateways, fleet.workers, client, collects=options.workers == "fake")
    injector = Injector(fleet.workers, fleet.gateways, fleet.redis, client, watch, tell)
    model = "fake" if options.workers == "fake" else "chaos"

    def make_ask(number: int) -> Ask:
        return ask(options.seed, number, model, known)

    clients = Clients(fleet.gateways, make_ask, options.num_requests)
    began = time.monotonic()
    await _traffic(options, clients, injector, watch)
    wall_s = time.monotonic() - began
    await watch.collect()
    clients.close()
    after = await _after(fleet, client, before)
    other_faults = [*injector.faults, *_crashes(fleet)]
    table, faults = rows(clients.tries, watch, read_logs(fleet.gateways), before, after, other_faults)
    return Result(
        rows=table,
        faults=faults,
        rejections=[f"{each.request_id}: {each.detail}" for each in clients.tries if each.ending == "rejected"],
        endings=dict(Counter(each.ending.value for each in clients.tries)),
        num_asks=len({each.ask.number for each in clients.tries}),
        harms=injector.done,
        num_unmeasured=watch.num_unmeasured,
        wall_s=wall_s,
    )


async def _traffic(options: Options, clients: Clients, injector: Injector, watch: Watch) -> None:
    """Until the last client has its last answer and everything is whole again."""
    harms = [] if options.calm else schedule(
        options.seed, options.duration_s or FOREVER_S, options.every_s, NUM_WORKERS, NUM_GATEWAYS, options.with_redis
    )  # fmt: skip
    watching = asyncio.create_task(watch.run())
    harming = asyncio.create_task(injector.run(harms))

    async def stop_in_time() -> None:
        if options.duration_s is not None:
            await asyncio.sleep(options.duration_s)
            clients.stopping = True

    stopping = asyncio.create_task(stop_in_time())
    asking = asyncio.create_task(clients.run(options.num_clients))
    try:
        pending: set[asyncio.Task[None]] = {asking, watching, harming}
        while not asking.done():
            ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        injector.stop()
        await harming
    finally:
        for task in (stopping, watching, harming, asking):
            task.cancel()
        await asyncio.gather(stopping, watching, harming, asking, return_exceptions=True)


async def _after(fleet: _Fleet, client: httpx.AsyncClient, before: Held) -> Held | None:
    try:
        return await settled(fleet.gateways, fleet.workers, client, before)
    except httpx.HTTPError:
        return None


def _crashes(fleet: _Fleet) -> list[str]:
    """Processes that ended by themselves, and tracebacks in the gateways' logs."""
    found = []
    for child in fleet.children:
        try:
            child.check()
        except NotStarted as error:
            found.append(str(error))
    for gateway in fleet.gateways:
        text = gateway.child.log.read_text("utf-8", "replace")
        if (at := text.find("Traceback")) >= 0:
            found.append(f"gateway {gateway.number} logged\n{text[at : at + 3000]}")
    return found


@contextlib.asynccontextmanager
async def _running(options: Options, folder: Path, client: httpx.AsyncClient) -> AsyncIterator[_Fleet]:
    """Raises NotStarted."""
    ports = free_ports(NUM_WORKERS + NUM_GATEWAYS + 1)
    redis = make_redis(ports.pop(), folder) if options.with_redis else None
    if options.workers == "fake":
        first_token_s = str(random.Random(options.seed).uniform(0.005, 0.02))
        command = [sys.executable, "-m", "loadtest.fake_worker", "--state", "--token-s", str(options.token_s)]
        command += ["--first-token-s", first_token_s]
    else:
        command = [sys.executable, "-m", "engine_worker", *worker_flags(options.model, folder / "tiny")]
    workers = [worker_process(n, ports.pop(), command, folder, "/health") for n in range(NUM_WORKERS)]
    fleet = _Fleet(workers, [], redis)
    try:
        if redis is not None:
            await redis.start()
        await asyncio.gather(*(worker.start(client) for worker in workers))
        urls = [worker.url for worker in workers]
        redis_port = redis.port if redis is not None else None
        for n in range(NUM_GATEWAYS):
            gateway = make_gateway(n, ports.pop(), urls, redis_port, folder, GATEWAY_FLAGS)
            fleet.gateways.append(gateway)
            await gateway.start(client)
        for gateway in fleet.gateways:
            await _all_ready(gateway, client)
        yield fleet
    finally:
        for child in fleet.children:
            if child.is_running:
                child.signal(signal.SIGCONT)
                await child.end(signal.SIGKILL)
        for worker in workers:
            await worker.link.close()


async def _all_ready(gateway: Gateway, client: httpx.AsyncClient) -> None:
    """Until it sees every worker. Raises NotStarted."""
    deadline = time.monotonic() + 60.0
    while (await client.get(f"{gateway.url}/health")).json()["num_ready"] < NUM_WORKERS:
        if time.monotonic() > deadline:
            raise NotStarted(f"{gateway.child.name} does not see all workers:\n{gateway.child.output()}")
        await asyncio.sleep(0.05)
