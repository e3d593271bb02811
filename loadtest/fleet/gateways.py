"""Gateways as processes: how each is started in front of given replicas, and when it is ready.

    warmgate[:POLICY]       ours, before replicas that are bundled workers: their tokenizer, their KV events
    warmgate-text[:POLICY]  ours, before replicas that are vLLM: text keys, no events
    warmgate*N[:POLICY]     N of ours (warmgate-text*N, too) that share what they know over a Redis of their own, which
                            takes redis-server; requests go to one after the other
    sglang-router[:POLICY]  as installed from PyPI, cache_aware unless named otherwise
    vllm-router[:POLICY]    the same; kv_aware reads the replicas' KV events
    litellm[:STRATEGY]      its proxy, simple-shuffle unless named otherwise

The others' programs are looked for in --peers/NAME/bin, a virtual environment for each:

    python -m venv DIR/sglang-router && DIR/sglang-router/bin/pip install sglang-router
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from loadtest.ending import bound_to_us
from loadtest.fleet.replica import Manner

START_LIMIT_S = 90.0
DEFAULT_PEERS = Path.home() / ".cache" / "peers"


class GatewayFailed(Exception):
    """It isn't installed, or didn't come up; the message ends with its last output."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """A replica as a gateway is told of it."""

    url: str
    kv_events: str
    kv_events_replay: str


@dataclass(frozen=True, slots=True)
class Start:
    """What a kind of gateway needs to be started."""

    policy: str
    upstreams: Sequence[Upstream]
    model: str
    block_words: int
    port: int
    other_port: int
    folder: Path
    peers: Path
    redis_url: str = ""


@dataclass(frozen=True, slots=True)
class Kind:
    manner: Manner
    command: Callable[[Start], list[str]]
    is_ours: bool = False


@dataclass(frozen=True, slots=True)
class Running:
    """Processes that are one gateway to the clients, who go to one address after the other."""

    base_urls: tuple[str, ...]
    pids: tuple[int, ...]


def kind_of(name: str) -> Kind:
    """Raises ValueError with the names there are."""
    kind = KINDS.get(name.partition(":")[0].partition("*")[0])
    if kind is None:
        raise ValueError(f"unknown gateway {name!r}: choose among {', '.join(KINDS)}, each with :POLICY, or sim:POLICY")
    return kind


def count_of(name: str) -> int:
    """How many gateways `name` asks for. Raises ValueError."""
    kind = kind_of(name)
    _, times, count = name.partition(":")[0].partition("*")
    if not times:
        return 1
    if not kind.is_ours or not count.isdigit() or not int(count):
        raise ValueError(f"gateway {name!r}: only ours can be several, such as warmgate*2")
    return int(count)


@contextlib.contextmanager
def running_gateway(
    name: str, upstreams: Sequence[Upstream], model: str, block_words: int, peers: Path
) -> Iterator[Running]:
    """Up, and knowing all replicas and each other, while the block runs. Raises GatewayFailed."""
    kind, count, policy = kind_of(name), count_of(name), name.partition(":")[2]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmgate-fleet-")))
        redis_url = stack.enter_context(_running_redis(folder / "redis.log")) if count > 1 else ""
        base_urls, pids = [], []
        for number in range(count):
            port, other_port = _free_ports(2)
            place = folder / str(number)
            place.mkdir()
            start = Start(policy, upstreams, model, block_words, port, other_port, place, peers, redis_url)
            log = place / "log"
            process = stack.enter_context(_running(kind.command(start), log))
            base_urls.append(f"http://127.0.0.1:{port}")
            pids.append(process.pid)
            _wait_ready(name, kind, process, base_urls[-1], model, len(upstreams), number, log)
        yield Running(tuple(base_urls), tuple(pids))


@contextlib.contextmanager
def _running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            bound_to_us(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(),
            process_group=0,
        )
        try:
            yield process
        finally:
            _stop(process)


@contextlib.contextmanager
def _running_redis(log: Path) -> Iterator[str]:
    """A Redis that saves nothing, and its URL. Those who need it wait for it. Raises GatewayFailed."""
    program = shutil.which("redis-server")
    if program is None:
        raise GatewayFailed("several gateways share over Redis: install redis-server (Debian: apt-get install it)")
    [port] = _free_ports(1)
    options = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no", "--dir", str(log.parent)]
    with _running([program, *options], log):
        yield f"redis://127.0.0.1:{port}/0"


def _environment() -> dict[str, str]:
    """Without settings that were meant for another gateway."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WARMGATE_")}
    return {**kept, "PYTHONUNBUFFERED": "1", "NO_PROXY": "127.0.0.1,localhost", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def _wait_ready(
    name: str, kind: Kind, process: subprocess.Popen[bytes], base_url: str, model: str, num_replicas: int,
    num_others: int, log: Path,
) -> None:  # fmt: skip
    deadline = time.monotonic() + START_LIMIT_S
    with httpx.Client(base_url=base_url, timeout=5.0, trust_env=False) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError, KeyError, ValueError):
                if kind.is_ours:
                    if _knows_all(client.get("/health").json(), num_replicas, num_others):
                        return
                elif _answers(client, model, num_replicas):
                    return
            if process.poll() is not None or time.monotonic() > deadline:
                last = "\n".join(log.read_text("utf-8", "replace").splitlines()[-15:])
                raise GatewayFailed(f"{name} did not come up:\n{last}")
            time.sleep(0.2)


def _knows_all(health: dict[str, Any], num_replicas: int, num_others: int) -> bool:
    """All replicas joined, every feed of KV events that will be followed is, and the gateways before it are known."""
    replicas = health["replicas"]
    if health["num_ready"] != num_replicas or any(each["kv_feed"] == "connecting" for each in replicas):
        return False
    return not num_others or bool(health["sharing"]["num_peers"] == num_others)


def _answers(client: httpx.Client, model: str, num_replicas: int) -> bool:
    """As many requests as there are replicas are served, one after the other."""
    body = {"model": model, "messages": [{"role": "user", "content": "bab "}], "max_tokens": 1}
    return all(client.post("/v1/chat/completions", json=body).status_code == 200 for _ in range(num_replicas))


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Its whole group: some keep processes of their own."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def cpu_seconds(pids: Sequence[int]) -> float | None:
    """User and system time of processes so far; None where the system doesn't tell."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(server.getsockname()[1]) for server in servers]


# How each is started


def _ours(dialect: str) -> Callable[[Start], list[str]]:
    def command(start: Start) -> list[str]:
        settings = {
            "replicas": [
                {"url": each.url, "dialect": dialect, "name": f"r{index:02d}"}
                for index, each in enumerate(start.upstreams)
            ],
            "policy": start.policy or "warm",
            "host": "127.0.0.1",
            "port": start.port,
            "access_log": "",
            **({"redis_url": start.redis_url} if start.redis_url else {}),
        }
        config = start.folder / "gateway.yaml"
        config.write_text(json.dumps(settings), "utf-8")  # JSON is YAML
        return [sys.executable, "-m", "gateway.cli", "serve", "--config", str(config)]

    return command


def _program(start: Start, peer: str, name: str) -> str:
    path = start.peers / peer / "bin" / name
    if not path.is_file():
        raise GatewayFailed(
            f"{peer} is not installed: python -m venv {start.peers / peer} && "
            f"{start.peers / peer}/bin/pip install {PACKAGES[peer]} (or tell --peers where it is)"
        )
    return str(path)


def _router_flags(start: Start) -> list[str]:
    """What the two routers, of one origin, have in common. Their own defaults otherwise."""
    return [
        *("--worker-urls", *(each.url for each in start.upstreams)),
        *("--host", "127.0.0.1", "--port", str(start.port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(start.other_port)),
        *("--worker-startup-check-interval", "1"),
        *("--policy", start.policy or "cache_aware"),
    ]


def _sglang_router(start: Start) -> list[str]:
    return [_program(start, "sglang-router", "sglang-router"), "launch", *_router_flags(start)]


def _vllm_router(start: Start) -> list[str]:
    command = [_program(start, "vllm-router", "vllm-router"), *_router_flags(start)]
    if start.policy == "kv_aware":
        command += ["--kv-event-block-size", str(start.block_words), "--kv-event-model", start.model]
        for each in start.upstreams:
            command += ["--kv-event-source", f"{each.url}={each.kv_events}"]
            command += ["--kv-event-replay-source", f"{each.url}={each.kv_events_replay}"]
    return command


def _litellm(start: Start) -> list[str]:
    settings = {
        "model_list": [
            {
                "model_name": start.model,
                "litellm_params": {"model": f"openai/{start.model}", "api_base": f"{each.url}/v1", "api_key": "none"},
            }
            for each in start.upstreams
        ],
        # It listens on loopback for one measurement, and wants to be told that no key is no oversight.
        "general_settings": {"dangerously_permit_weak_or_unset_master_key": True},
        "router_settings": {"routing_strategy": start.policy or "simple-shuffle"},
    }
    config = start.folder / "litellm.yaml"
    config.write_text(json.dumps(settings), "utf-8")
    program = _program(start, "litellm", "litellm")
    return [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(start.port)]


PACKAGES = {"sglang-router": "sglang-router", "vllm-router": "vllm-router", "litellm": "'litellm[proxy]'"}
KINDS: dict[str, Kind] = {
    "warmgate": Kind("warmgate", _ours("warmgate"), is_ours=True),
    "warmgate-text": Kind("vllm", _ours("vllm"), is_ours=True),
    "sglang-router": Kind("vllm", _sglang_router),
    "vllm-router": Kind("vllm", _vllm_router),
    "litellm": Kind("vllm", _litellm),
}
