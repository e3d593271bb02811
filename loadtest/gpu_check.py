"""Prove and time the worker on a CUDA device: `python -m loadtest.gpu_check` (docs/gpu.md says how).

The check needs torch, which nothing here imports: it is started as a process of its own.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    os.execv(sys.executable, [sys.executable, "-m", "engine_worker.gpu_check", *sys.argv[1:]])


if __name__ == "__main__":
    main()
