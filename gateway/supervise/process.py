"""One child process: in a group of its own, its output line by line, gone when we are gone.

A group of its own, so that Ctrl-C on the terminal reaches only the supervisor, which stops the children in its own
order, and so that a signal reaches a worker's engine process too. When the child itself has died, what is left of its
group is killed: an engine without its API process holds ports and memory that the restarted one needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from gateway.supervise.plan import ChildSpec

LAUNCHER = Path(__file__).with_name("launch.py")
MAX_LINE_BYTES = 8192
DRAIN_S = 2.0  # how long to wait for the last output of a dead child


class ChildProcess:
    """A running child. `exited` resolves to its status (negative for a signal), after its last line was delivered."""

    def __init__(self, spec: ChildSpec, on_line: Callable[[str, str], None]) -> None:
        """Starts it. Call from the main thread (Linux ties a child's death to the thread that made it)."""
        assert threading.current_thread() is threading.main_thread()
        self.spec = spec
        self.tail: deque[str] = deque(maxlen=20)
        self._on_line = on_line
        self._lock = threading.Lock()
        self._gone = False
        self._popen = subprocess.Popen(
            [sys.executable, str(LAUNCHER), str(os.getpid()), *spec.command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **spec.env, "PYTHONUNBUFFERED": "1"},
            process_group=0,
        )
        self.pid = self._popen.pid
        loop = asyncio.get_running_loop()
        self._status: asyncio.Future[int] = loop.create_future()
        threading.Thread(target=self._wait, args=(loop,), name=f"wait-{spec.name}", daemon=True).start()
        self._reader = loop.create_task(self._read(), name=f"read-{spec.name}")

    async def exited(self) -> int:
        status = await asyncio.shield(self._status)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._reader, DRAIN_S)
        return status

    def signal_group(self, number: signal.Signals) -> None:
        """To every process of the group; does nothing once the child is gone (its pid may be another's by then)."""
        with self._lock:
            if not self._gone:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, number)

    def last_words(self) -> str:
        """The last line that says something: of a traceback, its last."""
        return next((line.strip() for line in reversed(self.tail) if line.strip()), "")

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        if hasattr(os, "waitid"):
            os.waitid(
                os.P_PID, self.pid, os.WEXITED | os.WNOWAIT
            )  # not reaped yet, so the group's number is still ours
        else:
            self._popen.wait()
        self.signal_group(signal.SIGKILL)
        with self._lock:
            self._gone = True
        status = self._popen.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is waiting any more
            loop.call_soon_threadsafe(self._set_status, status)

    def _set_status(self, status: int) -> None:
        if not self._status.done():
            self._status.set_result(status)

    async def _read(self) -> None:
        assert self._popen.stdout is not None
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self._popen.stdout)
        buffered = b""
        try:
            while chunk := await reader.read(65536):
                *lines, buffered = (buffered + chunk).split(b"\n")
                for line in lines:
                    self._deliver(line)
                if len(buffered) > MAX_LINE_BYTES:
                    self._deliver(buffered)
                    buffered = b""
            if buffered:
                self._deliver(buffered)
        finally:
            transport.close()

    def _deliver(self, line: bytes) -> None:
        text = line[:MAX_LINE_BYTES].decode("utf-8", "replace").rstrip()
        self.tail.append(text)
        self._on_line(self.spec.name, text)
