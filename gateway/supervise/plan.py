"""From the options of `warmgate up` to the command and environment of every child.

Workers on one machine share it: each gets `max(1, cores // workers)` threads and an equal share of the memory that one
worker alone would take. The cores are those this process may use (affinity), not those the machine has.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gateway.supervise.machine import Role

MEMORY_FRACTION = 0.5  # of what is free, for the KV blocks of all workers together


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """What to bring up. `worker_args` go to every worker after ours, so they win."""

    model: str = "demo"
    num_workers: int = 2
    host: str = "127.0.0.1"
    port: int = 8000
    worker_port: int = 8101
    policy: str = "warm"
    worker_args: tuple[str, ...] = ()
    gateway_args: tuple[str, ...] = ()

    def worker_ports(self) -> range:
        return range(self.worker_port, self.worker_port + self.num_workers)


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process: `url` is where its HTTP server will answer."""

    name: str
    role: Role
    command: tuple[str, ...]
    url: str
    env: Mapping[str, str] = field(default_factory=dict)


def available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_per_worker(num_cores: int, num_workers: int) -> int:
    return max(1, num_cores // num_workers)


def reachable(host: str) -> str:
    """The address to call a server on that binds to `host`."""
    if host in ("0.0.0.0", ""):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host


def children(options: UpOptions, num_cores: int) -> list[ChildSpec]:
    """The workers, then the gateway; they start together, and the gateway waits for the workers by itself."""
    workers = [_worker(options, index, port, num_cores) for index, port in enumerate(options.worker_ports())]
    return [*workers, _gateway(options, [worker.url for worker in workers])]


def _worker(options: UpOptions, index: int, port: int, num_cores: int) -> ChildSpec:
    command = (
        *(sys.executable, "-m", "engine_worker"),
        *("--model", options.model, "--host", "127.0.0.1", "--port", str(port)),
        *("--num-threads", str(threads_per_worker(num_cores, options.num_workers))),
        *("--memory-fraction", f"{MEMORY_FRACTION / options.num_workers:.4g}"),
        *options.worker_args,
    )
    env = {"WARMGATE_WORKERS_ON_MACHINE": str(options.num_workers)}
    return ChildSpec(f"worker-{index + 1}", Role.WORKER, command, f"http://127.0.0.1:{port}", env)


def _gateway(options: UpOptions, replicas: Sequence[str]) -> ChildSpec:
    command = (
        *(sys.executable, "-m", "gateway.cli", "serve"),
        *(part for url in replicas for part in ("--replica", url)),
        *("--policy", options.policy, "--host", options.host, "--port", str(options.port)),
        *options.gateway_args,
    )
    return ChildSpec("gateway", Role.GATEWAY, command, f"http://{reachable(options.host)}:{options.port}")
