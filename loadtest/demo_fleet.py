"""A fresh fleet of real workers for one measurement: `warmgate up` in a process of its own, with cold caches."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from loadtest.ending import bound_to_us

START_LIMIT_S = 900.0


class FleetFailed(Exception):
    """The fleet didn't come up; the message ends with its last output."""


@dataclass(frozen=True, slots=True)
class Fleet:
    base_url: str
    model: str


@contextlib.contextmanager
def running_fleet(policy: str, model: str, num_workers: int, worker_args: tuple[str, ...] = ()) -> Iterator[Fleet]:
    """Up while the block runs. Raises FleetFailed."""
    port, worker_port = _free_port(), _free_ports(num_workers)
    command = [
        *(sys.executable, "-m", "gateway.cli", "up", "--policy", policy, "--model", model),
        *("--workers", str(num_workers), "--port", str(port), "--worker-port", str(worker_port), *worker_args),
    ]
    with tempfile.NamedTemporaryFile(prefix="warmgate-demo-", suffix=".log") as output:
        process = subprocess.Popen(
            bound_to_us(command), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, process_group=0
        )
        try:
            yield _wait_ready(process, Path(output.name))
        finally:
            _stop(process)


def _wait_ready(process: subprocess.Popen[bytes], output: Path) -> Fleet:
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        text = output.read_text("utf-8", "replace")
        if found := re.search(r"Warmgate is ready at (\S+)/v1 \(model (.+?), \d+ workers", text):
            return Fleet(found[1], found[2])
        if process.poll() is not None or time.monotonic() > deadline:
            last = "\n".join(text.splitlines()[-15:])
            raise FleetFailed(f"the fleet did not come up:\n{last}")
        time.sleep(0.1)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Asked first; killed when it takes too long or we are interrupted once more. Its children die with it."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _free_ports(count: int) -> int:
    """The first of `count` consecutive free ports."""
    for first in range(18_101, 30_000, 17):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return first
    raise FleetFailed("no free ports for the workers")
