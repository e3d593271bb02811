"""What administrators have ordered of the processes behind one port (processes.py), for one that takes another's place.

Orders are kept in a file beside the processes' sockets: the folder is the parent's, so they last as long as it does and
are forgotten with it, as those of a single process are. A new process follows them before it takes a request.
"""

from __future__ import annotations

import fcntl
import logging
import time
from pathlib import Path

import msgspec

_log = logging.getLogger("warmgate")


class Orders(msgspec.Struct):
    """draining    new requests are refused
    replicas    drained ones, with the time (time.monotonic, which a machine's processes share) until which the drain
                lets ever fewer through
    """

    draining: bool = False
    replicas: dict[str, float] = {}


class OrderBook:
    """The file in `folder`. A disk that is full costs what a new process would know, not the order itself."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "orders.json"

    def read(self) -> Orders:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Orders)
        except FileNotFoundError:
            return Orders()
        except (OSError, msgspec.DecodeError) as error:
            _log.warning("what an administrator ordered can't be read from %s: %s", self._path, error)
            return Orders()

    def drain(self, draining: bool) -> None:
        self._change(draining, "", None)

    def drain_replica(self, name: str, drained: bool, over_s: float = 0.0) -> None:
        self._change(None, name, time.monotonic() + over_s if drained else None)

    def _change(self, draining: bool | None, name: str, until: float | None) -> None:
        temporary = self._path.with_suffix(".new")
        try:
            with open(self._path.with_suffix(".lock"), "ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                orders = self.read()
                if draining is not None:
                    orders.draining = draining
                if name:
                    orders.replicas.pop(name, None)
                    if until is not None:
                        orders.replicas[name] = until
                temporary.write_bytes(msgspec.json.encode(orders))
                temporary.replace(self._path)
        except OSError as error:
            _log.warning("what was ordered can't be kept in %s for new processes: %s", self._path, error.strerror)
