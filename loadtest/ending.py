"""Nothing that a command here starts outlives it, however the command ends.

    SIGTERM, SIGHUP   do what Ctrl-C does: the command ends its processes on the way out
    SIGKILL, a crash  the kernel ends the processes (on Linux; see gateway/supervise/launch.py)

Processes get groups of their own, so that Ctrl-C reaches the command alone; without this nobody would end them.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType


def interrupted_by_signals() -> None:
    """Call it once, in the main thread, before anything is started. A SIGHUP that nohup ignores stays ignored."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(_: int, frame: FrameType | None) -> None:
    """By the handler of Ctrl-C that is there now (asyncio's cancels the main task); a shell's background jobs have
    none."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        raise KeyboardInterrupt
    handler(signal.SIGINT, frame)


def bound_to_us(command: Sequence[str]) -> list[str]:
    """`command`, ended with SIGKILL should this process end first. Start it from the main thread (Linux ties a
    process to the thread that made it)."""
    return [sys.executable, "-m", "gateway.supervise.launch", str(os.getpid()), *command]
