"""Lines for a file, gathered and written in batches by a thread: a slow disk delays lines and never a request.

What can't be written in time is dropped and counted, not kept without bound.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Generic, TypeVar

Entry = TypeVar("Entry")
FLUSH_EVERY_S = 0.1


class Batches(Generic[Entry]):
    """Entries for `fd` (-1: nothing is kept), which is closed at the end if `owns_fd`; `max_entries` wait at most.

    A subclass says in `render` (called in a thread) what lines they are, and in `name` what the log calls the file.
    """

    name = "the file"

    def __init__(self, fd: int, owns_fd: bool, max_entries: int, log: logging.Logger) -> None:
        self.enabled = fd >= 0
        self.num_dropped = 0
        self._fd = fd
        self._owns_fd = owns_fd
        self._max_entries = max_entries
        self._log = log
        self._entries: list[Entry] = []
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Future[None] | None = None

    def render(self, entries: list[Entry]) -> bytes:
        raise NotImplementedError

    def add(self, entry: Entry) -> None:
        """Queue an entry, or drop it where too many wait."""
        if not self.enabled:
            return
        if len(self._entries) >= self._max_entries:
            self.num_dropped += 1
            return
        self._entries.append(entry)
        if self._timer is None and self._writing is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_EVERY_S, self._flush)

    async def close(self) -> None:
        """Write what is queued. Nothing can be added after it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writing is not None:
            await asyncio.wait([self._writing])
        if self._entries:
            entries, self._entries = self._entries, []
            await asyncio.to_thread(self._write_out, entries)
        self.enabled = False
        if self._owns_fd:
            os.close(self._fd)

    def _flush(self) -> None:
        self._timer = None
        entries, self._entries = self._entries, []
        self._writing = asyncio.get_running_loop().run_in_executor(None, self._write_out, entries)
        self._writing.add_done_callback(self._written)

    def _written(self, future: asyncio.Future[None]) -> None:
        self._writing = None
        if not future.cancelled() and (error := future.exception()) is not None:
            self._log.warning("%s could not be written: %s", self.name, error)
        if self._entries and self.enabled and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_EVERY_S, self._flush)

    def _write_out(self, entries: list[Entry]) -> None:
        view = memoryview(self.render(entries))
        while view:
            view = view[os.write(self._fd, view) :]
