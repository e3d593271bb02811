"""`python -m loadtest.streams`: idle streams, slow readers, memory.

    python -m loadtest.streams idle --streams 10000
    python -m loadtest.streams slow --readers 1000 --rounds 3
    python -m loadtest.streams memory --requests 1000000

Each prints what it measured beside its target; the exit status is 1 when one is missed, 2 when it could not be run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import uvloop

from loadtest.chaos.processes import NotStarted, free_ports, make_gateway, make_worker
from loadtest.ending import interrupted_by_signals
from loadtest.options import Parser, above_zero, count
from loadtest.streams.measure import Failed, Idle, Memory, Slow, idle, memory, slow

NUM_WORKERS = 2
IDLE_TOKEN_S = 3600.0
BYTES_A_STREAM = 64 * 1024
LAG_S = 0.05
SLOWER = 1.10
GROWTH = 1.05
_FDS_KEPT = 256
_FLAGS = ("--policy", "round_robin", "--stream-idle-s", "3600", "--first-token-s", "600", "--request-s", "7200")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    interrupted_by_signals()
    try:
        _raise_fd_limit(options)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(_run(options))
    except (NotStarted, Failed, OSError) as problem:
        print(f"streams: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    lines = _judged(result)
    for what, target, measured, ok in lines:
        print(f"{what:44} {target:18} {measured:28} {'pass' if ok else 'MISS'}")
    if options.json:
        options.json.write_text(json.dumps({"command": options.command, **asdict(result)}, indent=1))
    return 0 if all(ok for *_, ok in lines) else 1


def _judged(result: Idle | Slow | Memory) -> list[tuple[str, str, str, bool]]:
    match result:
        case Idle(num_streams, size, lag_s, num_beats):
            what, lag = (
                f"memory of {num_streams} idle streams, each",
                f"at most {lag_s * 1000:g} ms ({num_beats} beats)",
            )
            return [
                (what, "at most 64 KiB", f"{size / 1024:.1f} KiB", size <= BYTES_A_STREAM),
                ("event-loop lag, p99", "at most 50 ms", lag, lag_s <= LAG_S),
            ]
        case Slow():
            first, whole = result.ratios
            stayed = f"{result.num_left} of {result.num_readers} stayed"
            return [
                ("others' first token, p99 beside/alone", "at most 1.10", f"{first:.2f}", first <= SLOWER),
                ("others' whole answer, p99 beside/alone", "at most 1.10", f"{whole:.2f}", whole <= SLOWER),
                ("slow readers", "all stay", stayed, result.num_left == result.num_readers),
            ]
        case Memory(_, early, late, rate):
            shown = f"{early / 2**20:.1f} to {late / 2**20:.1f} MiB, {rate:.0f}/s"
            return [("memory from a tenth of the requests to all", "at most 5 % more", shown, late <= GROWTH * early)]


async def _run(options: argparse.Namespace) -> Any:
    """Start a gateway over scripted workers, measure, end them. Raises NotStarted, Failed, OSError."""
    ports = free_ports(NUM_WORKERS + 1)
    token_s = IDLE_TOKEN_S if options.command == "idle" else 0.0
    command = [sys.executable, "-m", "loadtest.fake_worker", "--state", "--token-s", str(token_s)]
    with tempfile.TemporaryDirectory(prefix="warmgate-streams-") as name:
        folder = Path(name)
        workers = [make_worker(n, ports.pop(), command, folder, "/health") for n in range(NUM_WORKERS)]
        urls = [f"http://127.0.0.1:{worker.port}" for worker in workers]
        gateway = make_gateway(0, ports.pop(), urls, None, folder, _FLAGS)
        try:
            async with httpx.AsyncClient(trust_env=False, verify=False) as client:
                for worker in workers:
                    await worker.start(client)
                await gateway.start(client)
            pids = [gateway.child.pid, *(worker.child.pid for worker in workers)]
            match options.command:
                case "idle":
                    return await idle(gateway, options.streams, options.hold, _tell)
                case "slow":
                    return await slow(gateway, pids, options.readers, options.rounds, options.phase, _tell)
            return await memory(gateway, options.requests, options.clients, _tell)
        except ExceptionGroup as group:
            raise Failed(str(_first(group))) from group
        finally:
            for worker in workers:
                await worker.link.close()
            for child in (gateway.child, *(worker.child for worker in workers)):
                if child.is_running:
                    await child.end(signal.SIGKILL)


def _raise_fd_limit(options: argparse.Namespace) -> None:
    """As far as the system lets us. Raises Failed where that is not enough: the gateway needs two for each stream."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    wanted = 2 * {"idle": lambda: options.streams, "slow": lambda: options.readers}.get(options.command, lambda: 0)()
    if hard != resource.RLIM_INFINITY and wanted + _FDS_KEPT > hard:
        most = (hard - _FDS_KEPT) // 2
        raise Failed(f"{wanted // 2} streams need {wanted + _FDS_KEPT} file descriptors and the limit is {hard}: raise "
                     f"it (ulimit -Hn) or ask for at most {most}")  # fmt: skip


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


def _tell(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    """Every flag with its default."""
    p = Parser(
        prog="python -m loadtest.streams", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--json", type=Path, help="write the figures there")
    commands = p.add_subparsers(dest="command", required=True)
    one = commands.add_parser("idle", help="streams that wait for their second token")
    one.add_argument("--streams", type=count, default=10_000)
    one.add_argument("--hold", type=above_zero, default=30.0, help="seconds for which they are held (default 30)")
    two = commands.add_parser("slow", help="clients that read one byte a second")
    two.add_argument("--readers", type=count, default=1000)
    two.add_argument("--rounds", type=count, default=3)
    two.add_argument("--phase", type=above_zero, default=15.0, help="seconds of each half of a round (default 15)")
    three = commands.add_parser("memory", help="resident memory over many requests")
    three.add_argument("--requests", type=count, default=1_000_000)
    three.add_argument("--clients", type=count, default=32)
    return p
