"""How many threads a worker may compute with.

Threads beyond the cores that are free for them are worse than useless: torch's threads spin at every barrier, and two
on one busy core turned steps of 0.2 s into 4 s. So a worker takes its share of the cores it may use and no more.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from engine_worker.config import EngineConfig
from engine_worker.model.errors import ModelError

WORKERS_ON_MACHINE = "WARMGATE_WORKERS_ON_MACHINE"


def choose_num_threads(config: EngineConfig) -> int:
    """`config.num_threads`, or this machine's usable cores shared between its workers, at least 1."""
    if config.num_threads is not None:
        if config.num_threads < 1:
            raise ModelError(f"--num-threads is {config.num_threads}; it must be at least 1.")
        return config.num_threads
    return max(1, usable_cores() // workers_on_machine())


def workers_on_machine() -> int:
    """Workers that share this machine, as whoever starts them says in WARMGATE_WORKERS_ON_MACHINE."""
    text = os.environ.get(WORKERS_ON_MACHINE, "1")
    try:
        workers = int(text)
    except ValueError:
        workers = 0
    if workers < 1:
        raise ModelError(f"{WORKERS_ON_MACHINE} is {text!r}; it must be a number of at least 1.")
    return workers


def usable_cores(root: Path = Path("/")) -> int:
    """Cores this process may run on: its affinity mask, cut down to the cgroup's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    return cores if quota is None else max(1, min(cores, math.floor(quota)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time that the cgroup (v2 or v1) grants, None if unlimited. `root` stands in for / in tests."""
    quotas = []
    for folder in cgroup_folders(root, "cpu"):
        words = _read_words(folder / "cpu.max") or [
            *_read_words(folder / "cpu.cfs_quota_us"),
            *_read_words(folder / "cpu.cfs_period_us"),
        ]
        if len(words) == 2 and words[0] != "max" and int(words[0]) > 0:
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def cgroup_folders(root: Path, controller: str) -> list[Path]:
    """The folders whose limits for `controller` bind this process: its cgroup and every one above, v2 and v1.

    Inside a container the path that /proc/self/cgroup names often lies outside the mount; the mount's own root, which
    is then the container's cgroup, is always in the list.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    mount = root / "sys/fs/cgroup"
    folders = [mount, mount / controller]
    for line in lines:
        hierarchy, controllers, path = (*line.split(":", 2), "", "")[:3]
        if hierarchy == "0" and not controllers:
            base = mount
        elif controller in controllers.split(","):
            base = mount / controller
        else:
            continue
        parts = [part for part in path.split("/") if part]
        folders += [base.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1)]
    return list(dict.fromkeys(folders))


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
