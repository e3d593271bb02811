"""From the options of `warmgate up` to the command and environment of every child.

Workers on one machine share it: told by WARMGATE_WORKERS_ON_MACHINE how many they are, each takes its part of the cores
that it may use (`max(1, cores // workers)` threads) and of the memory that one worker alone would take.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gateway.supervise.machine import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """What to bring up. `worker_args` go to every worker after ours, so they win; `gateway_settings` are settings of
    the gateway by name, beside those of the file `gateway_config`."""

    model: str = "demo"
    num_workers: int = 2
    host: str = "127.0.0.1"
    port: int = 8000
    worker_port: int = 8101
    policy: str = "warm"
    worker_args: tuple[str, ...] = ()
    gateway_config: Path | None = None
    gateway_settings: Mapping[str, str] = field(default_factory=dict)

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


def reachable(host: str) -> str:
    """The address to call a server on that binds to `host`."""
    if host in ("0.0.0.0", ""):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host


def children(options: UpOptions) -> list[ChildSpec]:
    """The workers, then the gateway; they start together, and the gateway waits for the workers by itself."""
    workers = [_worker(options, index, port) for index, port in enumerate(options.worker_ports())]
    return [*workers, _gateway(options, [worker.url for worker in workers])]


def _worker(options: UpOptions, index: int, port: int) -> ChildSpec:
    command = (
        *(sys.executable, "-m", "engine_worker"),
        *("--model", options.model, "--host", "127.0.0.1", "--port", str(port)),
        *options.worker_args,
    )
    env = {"WARMGATE_WORKERS_ON_MACHINE": str(options.num_workers)}
    return ChildSpec(f"worker-{index + 1}", Role.WORKER, command, f"http://127.0.0.1:{port}", env)


def _gateway(options: UpOptions, replicas: Sequence[str]) -> ChildSpec:
    command = (
        *(sys.executable, "-m", "gateway.cli", "serve"),
        *(part for url in replicas for part in ("--replica", url)),
        *("--policy", options.policy, "--host", options.host, "--port", str(options.port)),
        *(("--config", str(options.gateway_config)) if options.gateway_config else ()),
        *(part for name, value in options.gateway_settings.items() for part in (f"--{name.replace('_', '-')}", value)),
    )
    return ChildSpec("gateway", Role.GATEWAY, command, f"http://{reachable(options.host)}:{options.port}")
