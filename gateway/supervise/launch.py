"""Starts a command that dies with its supervisor: `python launch.py PARENT_PID COMMAND ...`, replaced by COMMAND.

Linux sends a process the signal it asked for with PR_SET_PDEATHSIG when its parent dies, however the parent dies; the
request survives exec. A parent that died before the request was made shows as a changed parent pid. Elsewhere (macOS)
there is no such request, and a supervisor killed with SIGKILL leaves its children behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            sys.exit("the supervisor is gone")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"can't start {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
