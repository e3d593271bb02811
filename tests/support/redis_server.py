"""A redis-server of the test's own: on a free port of this machine, nothing saved, ended with the test."""

from __future__ import annotations

import shutil
import signal
import socket
import time

from tests.support.processes import Process, free_port

MISSING = "redis-server is not installed: `make test` installs it, or `apt-get install redis-server`"


class RedisServer:
    """Starts at once; `start` again after `kill` comes back empty on the same port. Use as a context manager."""

    def __init__(self) -> None:
        self.binary = shutil.which("redis-server")
        assert self.binary is not None, MISSING
        self.port = free_port()
        self.process = self._started()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self.process = self._started()

    def _started(self) -> Process:
        assert self.binary is not None
        options = ["--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--appendonly", "no", "--dir", "/tmp"]
        process = Process([self.binary, *options])
        process.until("redis-server answers", self._answers)
        return process

    def _answers(self) -> bool:
        try:
            return self.command("PING") == b"+PONG\r\n"
        except OSError:
            return False

    def command(self, *words: str) -> bytes:
        """One command on a connection of its own; the answer as it comes (up to 64 KiB)."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            parts = [f"*{len(words)}\r\n", *(f"${len(word.encode())}\r\n{word}\r\n" for word in words)]
            connection.sendall("".join(parts).encode())
            return connection.recv(65536)

    def freeze(self) -> None:
        self.process.send(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send(signal.SIGCONT)

    def kill(self) -> None:
        self.process.send(signal.SIGKILL)
        deadline = time.monotonic() + 30
        while self.process.status is None and time.monotonic() < deadline:
            time.sleep(0.01)

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.close()
