"""What is held when nothing is under way: slots, blocks, tasks, file descriptors, memory. Linux, through /proc."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from engine_worker.contract.state import WorkerState
from loadtest.chaos.processes import Gateway, Worker

SETTLE_S = 30.0
FDS_ALLOWED = 5
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class GatewayState:
    """num_in_flight, num_queued, num_at_replicas: its own counts; the rest is the process's."""

    num_in_flight: int
    num_queued: int
    num_at_replicas: int
    num_tasks: int
    num_fds: int
    rss_bytes: int


@dataclass(frozen=True, slots=True)
class Held:
    gateways: tuple[GatewayState, ...]
    num_free_blocks: tuple[int, ...]
    num_at_workers: int


async def held(gateways: Sequence[Gateway], workers: Sequence[Worker], client: httpx.AsyncClient) -> Held:
    """Raises httpx.HTTPError."""
    states = [await _state(gateway, client) for gateway in gateways]
    reports = []
    for worker in workers:
        answer = await client.get(f"http://127.0.0.1:{worker.port}/internal/state")
        reports.append(msgspec.json.decode(answer.content, type=WorkerState))
    return Held(
        tuple(states),
        tuple(report.num_free_blocks for report in reports),
        sum(report.num_running + report.num_waiting for report in reports),
    )


async def _state(gateway: Gateway, client: httpx.AsyncClient) -> GatewayState:
    text = (await client.get(f"{gateway.url}/metrics")).text
    pid = gateway.child.pid

    def figure(name: str) -> int:
        return round(sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)))

    return GatewayState(
        num_in_flight=figure("warmgate_in_flight"),
        num_queued=figure("warmgate_queue_depth"),
        num_at_replicas=figure("warmgate_replica_in_flight"),
        num_tasks=figure("warmgate_tasks"),
        num_fds=len(os.listdir(f"/proc/{pid}/fd")),
        rss_bytes=rss_bytes(pid),
    )


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES


def is_quiet(now: Held, before: Held) -> bool:
    """Whether nothing is held that wasn't `before`."""
    return not leftovers(now, before)


def leftovers(now: Held, before: Held) -> dict[str, str]:
    """What is held beyond what was `before`, by the row that it belongs to. A gateway process may be a new one: all
    are configured alike, so the first one's counts hold for it too."""
    found: dict[str, list[str]] = {"slots": [], "blocks": [], "tasks": [], "fds": []}
    for number, (gateway, first) in enumerate(zip(now.gateways, before.gateways, strict=True)):
        slots = gateway.num_in_flight + gateway.num_queued + gateway.num_at_replicas
        if slots:
            places = f"{gateway.num_in_flight} in flight, {gateway.num_queued} queued"
            found["slots"].append(f"gateway {number} holds {places}, {gateway.num_at_replicas} at replicas")
        if gateway.num_tasks != first.num_tasks:
            found["tasks"].append(f"gateway {number} has {gateway.num_tasks} tasks, had {first.num_tasks}")
        if gateway.num_fds > first.num_fds + FDS_ALLOWED:
            found["fds"].append(f"gateway {number} has {gateway.num_fds} descriptors, had {first.num_fds}")
    if now.num_at_workers:
        found["slots"].append(f"workers hold {now.num_at_workers}")
    if now.num_free_blocks != before.num_free_blocks:
        found["blocks"].append(f"free blocks {now.num_free_blocks}, were {before.num_free_blocks}")
    return {row: "; ".join(sentences) for row, sentences in found.items() if sentences}


async def settled(
    gateways: Sequence[Gateway], workers: Sequence[Worker], client: httpx.AsyncClient, before: Held
) -> Held:
    """The state once it is quiet, or after SETTLE_S. Raises httpx.HTTPError."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        now = await held(gateways, workers, client)
        if is_quiet(now, before) or time.monotonic() > deadline:
            return now
        await asyncio.sleep(0.25)


async def steady(gateways: Sequence[Gateway], workers: Sequence[Worker], client: httpx.AsyncClient) -> Held:
    """The state before anything: read until it stays the same for a second. Raises httpx.HTTPError."""
    deadline = time.monotonic() + SETTLE_S
    last, since = await held(gateways, workers, client), time.monotonic()
    while time.monotonic() < min(since + 1.5, deadline):
        await asyncio.sleep(0.25)
        now = await held(gateways, workers, client)
        if [(g.num_tasks, g.num_fds) for g in now.gateways] != [(g.num_tasks, g.num_fds) for g in last.gateways]:
            last, since = now, time.monotonic()
    return await held(gateways, workers, client)
