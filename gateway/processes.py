"""Several gateway processes behind one port: the parent, which starts them, keeps them up and stops them.

Python runs on one core, so a machine's other cores are used by other processes. They share what they know as gateways
on different machines do, through Redis; without it each would route by a part of the traffic, so it is required.

Each process has a listening socket of its own for the port (SO_REUSEPORT), among which the kernel spreads connections
evenly. The parent keeps all of them open: what waits in the socket of a process that died is served by the one that
takes its place. The parent runs no event loop and no threads, so that it may fork at any time; it waits for signals.

    SIGTERM, Ctrl-C    passed on: every process drains (server.py); a second one ends them at once
    a process dies     another one takes its place and its sockets, after a pause that doubles while they die young
    the parent dies    the processes see their end of a pipe close, and drain
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

_log = logging.getLogger("warmgate")
_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 5.0
_YOUNG_S = 10.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


@dataclass(frozen=True, slots=True)
class Place:
    """What one process gets: its number, its sockets, where the others' are, and a pipe that ends with the parent."""

    number: int
    count: int
    listener: socket.socket
    own_socket: socket.socket  # where the other processes reach it
    folder: Path
    parent_fd: int

    def path_of(self, number: int) -> str:
        return str(_path(self.folder, number))


@dataclass(slots=True)
class _Slot:
    place: Place
    pid: int = 0
    started_at: float = 0.0
    start_at: float = 0.0
    pause_s: float = _FIRST_PAUSE_S


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number}.sock"


def listeners(listen: Callable[[int, bool], socket.socket], port: int, count: int) -> list[socket.socket]:
    """`count` sockets for one port. `listen(port, reuse_port)` makes one. Raises OSError."""
    first = listen(port, False)  # fails where somebody else listens, which SO_REUSEPORT would not notice
    port = first.getsockname()[1]
    first.close()
    return [listen(port, True) for _ in range(count)]


def run_processes(sockets: list[socket.socket], serve: Callable[[Place], int]) -> int:
    """Run `serve` in a process for each of `sockets` until a signal. Returns the exit code: 0, or that of a process
    which could not even begin."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    folder = Path(tempfile.mkdtemp(prefix="warmgate-"))
    alive_fd, parent_fd = os.pipe()
    try:
        slots = []
        for number, listener in enumerate(sockets):
            own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            own.bind(str(_path(folder, number)))
            own.listen(64)
            own.setblocking(False)
            slots.append(_Slot(Place(number, len(sockets), listener, own, folder, alive_fd)))
        return _Parent(slots, parent_fd, serve).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Parent:
    def __init__(self, slots: list[_Slot], parent_fd: int, serve: Callable[[Place], int]) -> None:
        self._slots = slots
        self._parent_fd = parent_fd
        self._serve = serve
        self._is_stopping = False
        self._exit_code = 0

    def run(self) -> int:
        while True:
            now = time.monotonic()
            if not self._is_stopping:
                for slot in self._slots:
                    if not slot.pid and slot.start_at <= now:
                        self._start(slot, now)
            elif not any(slot.pid for slot in self._slots):
                return self._exit_code
            waits = [slot.start_at - now for slot in self._slots if not slot.pid]
            found = signal.sigtimedwait(_SIGNALS, max(min(waits, default=60.0), 0.0))
            if found is not None and found.si_signo != signal.SIGCHLD:
                self._stop()
            self._reap()

    def _start(self, slot: _Slot, now: float) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            self._become(slot)
        slot.pid, slot.started_at = pid, now

    def _become(self, slot: _Slot) -> NoReturn:
        """In the child. A group of its own, so that Ctrl-C on the terminal reaches the parent alone."""
        code = 70
        try:
            os.setpgid(0, 0)
            os.close(self._parent_fd)
            for other in self._slots:
                if other is not slot:
                    other.place.listener.close()
                    other.place.own_socket.close()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            code = self._serve(slot.place)
        except BaseException:
            _log.exception("process %d ends", slot.place.number)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _stop(self) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            for slot in self._slots:  # else connections would be taken that nobody serves
                slot.place.listener.close()
        for slot in self._slots:
            if slot.pid:
                os.kill(slot.pid, signal.SIGTERM)

    def _reap(self) -> None:
        for slot in self._slots:
            if not slot.pid:
                continue
            pid, status = os.waitpid(slot.pid, os.WNOHANG)
            if not pid:
                continue
            slot.pid = 0
            code = os.waitstatus_to_exitcode(status)
            if self._is_stopping:
                continue
            if code == 2:  # it said what is wrong with the settings, and would say so again
                self._exit_code = code
                self._stop()
                continue
            lived_s = time.monotonic() - slot.started_at
            slot.pause_s = _FIRST_PAUSE_S if lived_s > _YOUNG_S else min(slot.pause_s * 2, _MAX_PAUSE_S)
            slot.start_at = time.monotonic() + slot.pause_s
            how = f"with status {code}" if code >= 0 else f"by signal {-code}"
            _log.error("process %d (pid %d) ended %s and is started again", slot.place.number, pid, how)


def share_of(total: int, count: int) -> int:
    """Each process's part of a limit for all; 0 stays 0."""
    return math.ceil(total / count)
