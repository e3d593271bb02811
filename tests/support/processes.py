"""Real processes for tests: started, awaited by polling with a deadline, always ended, output shown on failure."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import httpx

ROOT = Path(__file__).resolve().parents[2]
HANG_GUARD_S = 120.0

# Below the range that the system hands out itself. Of processes that share the tests each takes of its own: one that
# another has found free may be taken by the time it is used.
_SHARE = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 4
PORTS = range(20_000 + 3_000 * _SHARE, 23_000 + 3_000 * _SHARE)


class NeverHappened(AssertionError):
    """What a test waited for didn't come; the message carries the process's output."""


def free_ports(count: int = 1) -> int:
    """The first of `count` consecutive ports that are free now."""
    for _ in range(200):
        first = random.SystemRandom().randrange(PORTS.start, PORTS.stop - count)
        if all(_is_free(port) for port in range(first, first + count)):
            return first
    raise RuntimeError("no free ports")


def free_port() -> int:
    return free_ports(1)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return True
    return False


class Process:
    """A command in a process group of its own, its output in a file. Use as a context manager."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> None:
        self.command = list(command)
        self._output = tempfile.NamedTemporaryFile(prefix="warmgate-test-", suffix=".log")  # noqa: SIM115
        self._popen = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
            cwd=cwd,
            process_group=0,
        )
        self.pid = self._popen.pid

    @property
    def output(self) -> str:
        return Path(self._output.name).read_text("utf-8", "replace")

    @property
    def status(self) -> int | None:
        return self._popen.poll()

    def until(self, what: str, check: Callable[[], object], timeout_s: float = HANG_GUARD_S, *, alive: bool = True):
        """Polls `check` until it is truthy and returns that. Fails at once when the process ends first."""
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if result := check():
                    return result
            if alive and self.status is not None:
                raise NeverHappened(f"{what}: the process ended with {self.status}\n{self._shown()}")
            if time.monotonic() > deadline:
                raise NeverHappened(f"{what}: not within {timeout_s:g} s\n{self._shown()}")
            time.sleep(0.05)

    def until_http(self, url: str, status: int = 200, timeout_s: float = HANG_GUARD_S) -> httpx.Response:
        def answers() -> httpx.Response | None:
            response = httpx.get(url, timeout=5, trust_env=False)
            return response if response.status_code == status else None

        return self.until(f"{url} answers {status}", answers, timeout_s)

    def until_output(self, pattern: str, timeout_s: float = HANG_GUARD_S) -> re.Match[str]:
        return self.until(f"output matches {pattern!r}", lambda: re.search(pattern, self.output), timeout_s)

    def until_exit(self, timeout_s: float = HANG_GUARD_S) -> int:
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise NeverHappened(f"still running after {timeout_s:g} s\n{self._shown()}") from None

    def send(self, number: signal.Signals) -> None:
        """To the process alone, as a terminal's kill would."""
        self._popen.send_signal(number)

    def close(self, grace_s: float = 20.0) -> None:
        """SIGTERM, then SIGKILL to whatever is left of the group."""
        if self.status is None:
            self.send(signal.SIGCONT)
            self.send(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(grace_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()
        if error is not None and not isinstance(error, NeverHappened):
            print(self._shown())
        self._output.close()

    def _shown(self) -> str:
        return f"--- {' '.join(self.command)}\n{self.output[-12_000:]}\n---"


def python(*arguments: str, env: Mapping[str, str] | None = None) -> Process:
    return Process([sys.executable, *arguments], env)


def process_exists(pid: int) -> bool:
    """Whether it runs; a zombie doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def descendants(pid: int) -> list[int]:
    """Children, grandchildren and so on, as they are now (Linux)."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found
