"""Between the gateway and a replica: an exchange's phases, who takes its body, what goes wrong and in which words."""

from __future__ import annotations

import os
import socket
from enum import IntEnum, StrEnum
from typing import Protocol


class UpstreamFailure(StrEnum):
    """CONNECT: nothing was sent. BROKEN: the connection ended before the response did. TIMEOUT: no answer in time."""

    CONNECT = "connect"
    BROKEN = "broken"
    TIMEOUT = "timeout"


class UpstreamError(Exception):
    def __init__(self, kind: UpstreamFailure, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Sink(Protocol):
    """Takes a body as it arrives, from the connection's own callback."""

    def on_data(self, data: bytes) -> None:
        """Never empty."""
        ...

    def on_end(self, error: UpstreamError | None) -> None:
        """Once: the body is whole, or `error` says why it never will be."""
        ...


class Phase(IntEnum):
    IDLE = 0
    HEAD = 1
    BODY = 2
    WHOLE = 3
    CLOSED = 4


def broken(message: str) -> UpstreamError:
    return UpstreamError(UpstreamFailure.BROKEN, message)


def why(error: BaseException | None) -> str:
    return f" ({reason_of(error)})" if error is not None else ""


def reason_of(error: BaseException) -> str:
    """The system's own word for it where there is one; asyncio's texts repeat the address."""
    if isinstance(error, OSError) and error.errno and not isinstance(error, socket.gaierror):
        return os.strerror(error.errno).lower()
    return str(error) or type(error).__name__
