"""Watching replicas: one task each, polling its state, turning answers and silences into what the registry says.

    answers                      joined with what it reports; its load goes to the fleet
    refuses the connection       down at once: its process is gone
    never answered yet           a warning after `poll_failures` polls, once: it may just be starting
    times out, or answers badly  down after `poll_failures` polls in a row (after a timeout at once, else in its time);
                                 what waits there for a first token fails over once it has been silent for
                                 `stuck_after_s`
    another incarnation          restarted: its index and load are purged, its tokenizer is fetched and checked again

The data plane sees a dead replica first. It marks it down (`trouble`) and the watcher polls at once, so a replica that
only hiccuped is back within one poll, and a dead one gets no further request.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import ssl
import time
from dataclasses import replace

import httpx

from gateway.config import GatewaySettings
from gateway.replicas.cuts import CutMaker
from gateway.replicas.detect import detect
from gateway.replicas.dialect import ControlClient, Dialect, PollError, Report
from gateway.replicas.registry import Registry, Replica
from policies.types import ReplicaStatus

_log = logging.getLogger("warmgate.replicas")
_DOUBT_S = 0.5  # between polls that are to say whether a replica has died


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    """The system's and certifi's authorities, read once: it takes longer than the rest of a start."""
    return httpx.create_ssl_context()


class Monitor:
    """Runs a watcher a replica from `start` to `close`."""

    def __init__(self, settings: GatewaySettings, registry: Registry, cuts: CutMaker) -> None:
        self._settings = settings
        self._registry = registry
        self._cuts = cuts
        self._client: httpx.AsyncClient | None = None
        self._watchers: dict[str, _Watcher] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, client: ControlClient | None = None) -> None:
        """`client` stands in for the network in tests."""
        settings = self._settings
        secret = settings.secret.get_secret_value() if settings.secret is not None else None
        self._client = httpx.AsyncClient(verify=_ssl_context(), trust_env=False, follow_redirects=False)
        for replica in self._registry:
            own = client or ControlClient(
                self._client, replica.spec.url, settings.poll_timeout_s, secret, replica.api_key
            )
            watcher = _Watcher(settings, self._registry, self._cuts, replica, own)
            self._watchers[replica.replica_id] = watcher
            self._tasks.append(asyncio.create_task(watcher.run(), name=f"watch {replica.replica_id}"))

    async def first_polls(self, within_s: float) -> None:
        """Returns when every replica has been asked once, or after `within_s`. Whoever serves earlier has nobody to
        send a request to, though they may all be well."""
        polls = [watcher.polled.wait() for watcher in self._watchers.values()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await asyncio.gather(*polls)

    def trouble(self, replica: Replica, refused: bool, why: str) -> None:
        """The data plane met a refused or broken connection there."""
        if refused:
            self._registry.set_status(replica, ReplicaStatus.DOWN, why)
        watcher = self._watchers.get(replica.replica_id)
        if watcher is not None:
            watcher.poll_now.set()

    async def has_died(self, replica: Replica, incarnation: str) -> bool:
        """Poll `replica`, and say whether the process with that incarnation is gone (or starting anew).

        A process that is dying cuts connections before it refuses them, and a poll that ends so says neither. So it
        is polled again, until it answers, refuses, or counts as down after so many failures.
        """
        watcher = self._watchers.get(replica.replica_id)
        if watcher is not None:
            await watcher.next_poll()
            while watcher.is_in_doubt:
                await asyncio.sleep(min(_DOUBT_S, self._settings.poll_interval_s))
                await watcher.next_poll()
        return replica.incarnation != incarnation or replica.status in (ReplicaStatus.DOWN, ReplicaStatus.LOADING)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        await self._cuts.close()
        if self._client is not None:
            await self._client.aclose()


class _Watcher:
    def __init__(
        self, settings: GatewaySettings, registry: Registry, cuts: CutMaker, replica: Replica, client: ControlClient
    ) -> None:
        self.poll_now = asyncio.Event()
        self.polled = asyncio.Event()
        self._settings = settings
        self._registry = registry
        self._cuts = cuts
        self._replica = replica
        self._client = client
        self._dialect: Dialect | None = None
        self._num_failures = 0
        self._is_silent = False
        self._has_warned = False
        self._answered_at = time.monotonic()
        self._generation = 0
        self._cut_of: tuple[str, str, int, frozenset[str]] | None = None
        self._awaited: list[asyncio.Future[None]] = []

    async def next_poll(self) -> None:
        """Returns when a poll that begins after now has ended."""
        polled = asyncio.get_running_loop().create_future()
        self._awaited.append(polled)
        self.poll_now.set()
        await polled

    @property
    def is_in_doubt(self) -> bool:
        """The last poll failed, and not so that the replica would be down. Not after `poll_failures` in a row."""
        is_down = self._replica.status is ReplicaStatus.DOWN
        return 0 < self._num_failures < self._settings.poll_failures and not is_down

    async def run(self) -> None:
        while True:
            self.poll_now.clear()
            awaited, self._awaited = self._awaited, []
            try:
                await self._poll()
            except Exception:
                # A watcher that dies would leave its replica's state frozen: say it and go on.
                _log.exception("watching replica %s failed", self._replica.replica_id)
            self.polled.set()
            for polled in awaited:
                if not polled.done():
                    polled.set_result(None)
            if self._is_silent and self._num_failures < self._settings.poll_failures:
                continue  # that took its time already, and whether it has stopped should be known soon
            try:
                async with asyncio.timeout(self._settings.poll_interval_s):
                    await self.poll_now.wait()
            except TimeoutError:
                continue

    async def _poll(self) -> None:
        try:
            if self._dialect is None:
                self._dialect = await detect(self._client, self._replica.spec.dialect)
                self._registry.speaks(self._replica, self._dialect.name)
            report = self._checked(await self._dialect.poll())
            await self._answered(self._dialect, report)
        except PollError as error:
            self._failed(error)

    def _checked(self, report: Report) -> Report:
        """The report under this replica's configuration: never the wrong model, always an incarnation."""
        wanted = self._replica.spec.model
        if wanted is not None:
            if report.models and wanted not in report.models:
                served = ", ".join(sorted(report.models))
                raise PollError(f"it serves {served}, not {wanted} as configured")
            report = replace(report, models=frozenset({wanted}))
        return report if report.incarnation else replace(report, incarnation=f"start-{self._generation}")

    async def _answered(self, dialect: Dialect, report: Report) -> None:
        self._num_failures = 0
        self._is_silent = False
        self._answered_at = time.monotonic()
        replica, registry = self._replica, self._registry
        if replica.joined and report.incarnation != replica.incarnation:
            registry.set_status(replica, ReplicaStatus.LOADING, "restarted")
            num_blocks = report.capacity_blocks(replica.block_tokens)
            registry.restarted(replica, report.incarnation, num_blocks, report.num_seats)
            self._cuts.restarted(replica)
            self._cut_of = None
        if not report.models:
            replica.detail = report.detail or "it names no model yet"
            return
        identity = (report.incarnation, report.tokenizer_fingerprint, report.block_tokens, report.models)
        if report.status is not ReplicaStatus.READY and self._cut_of is None and not replica.joined:
            # Known, so that requests for its model wait for it (503) instead of hearing that it doesn't exist.
            registry.joins(replica, report, await self._cuts.text(replica, report))
        elif report.status is ReplicaStatus.READY and identity != self._cut_of:
            registry.joins(replica, report, await self._cuts.make(replica, dialect, self._client, report))
            self._cut_of = identity
            self._cuts.follow(replica, report)
        registry.reports(replica, report)

    def _failed(self, error: PollError) -> None:
        replica = self._replica
        self._num_failures += 1
        self._is_silent = error.timed_out
        if not replica.joined and self._num_failures == self._settings.poll_failures and not self._has_warned:
            self._has_warned = True
            _log.warning("replica %s can't be used so far: %s", replica.replica_id, str(error).rstrip("."))
        if error.refused:
            if replica.joined:
                self._generation += 1  # for engines that tell no incarnation: what comes back is another process
            self._dialect = None
        if error.refused or self._num_failures >= self._settings.poll_failures:
            self._registry.set_status(replica, ReplicaStatus.DOWN, str(error))
        if error.timed_out and time.monotonic() - self._answered_at >= self._settings.stuck_after_s:
            self._registry.interrupt_waiting(replica)
        replica.detail = str(error)
