"""What was used of budgets, kept over a restart of a gateway that has no Redis: in a file beside the keys' own.

It is written every WRITE_S when something has changed, and at the end; a crash forgets what was used since.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from gateway.tenancy.keys import KeysError
from gateway.tenancy.limits import Ledger
from gateway.tenancy.store import FileStore, write_privately

_log = logging.getLogger("warmgate.tenants")
WRITE_S = 5.0


class Spent:
    """The budgets of a gateway on its own, kept in a file over a restart: `PATH.usage`."""

    def __init__(self, file: FileStore, ledger: Ledger) -> None:
        self._path = file.path.with_name(file.path.name + ".usage")
        self._ledger = ledger
        self._written: dict[str, tuple[int, int]] = {}

    def restore(self) -> None:
        """Raises KeysError."""
        try:
            spent = msgspec.json.decode(self._path.read_bytes(), type=dict[str, tuple[int, int]])
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as error:
            raise KeysError(
                f"the file of used budgets {self._path} can't be read ({error}); mend or remove it"
            ) from None
        self._ledger.restore(spent)

    def take(self) -> dict[str, tuple[int, int]] | None:
        """What has changed since it was written; None for nothing."""
        spent = self._ledger.spent()
        return None if spent == self._written else spent

    def write(self, spent: dict[str, tuple[int, int]]) -> None:
        """Raises OSError."""
        write_privately(self._path, msgspec.json.encode(spent))
        self._written = spent

    async def run(self) -> None:
        while True:
            await asyncio.sleep(WRITE_S)
            await self.save()

    async def save(self) -> None:
        spent = self.take()
        if spent is None:
            return
        try:
            await asyncio.to_thread(self.write, spent)
        except OSError as error:
            _log.warning("used budgets can't be written to %s: %s", self._path, error.strerror)
