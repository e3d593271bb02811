"""A worker's share of the cores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine_worker.config import EngineConfig
from engine_worker.model import threads
from engine_worker.model.errors import ModelError
from engine_worker.model.threads import WORKERS_ON_MACHINE, choose_num_threads, cpu_quota, usable_cores


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKERS_ON_MACHINE, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


def choose(num_threads: int | None = None) -> int:
    return choose_num_threads(EngineConfig(model="m", num_threads=num_threads))


@pytest.mark.parametrize(("workers", "expected"), [("1", 8), ("2", 4), ("3", 2), ("8", 1), ("20", 1)])
def test_cores_are_shared_between_the_workers(workers: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "cpu_quota", lambda root: None)
    monkeypatch.setenv(WORKERS_ON_MACHINE, workers)
    assert choose() == expected


def test_the_number_asked_for_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKERS_ON_MACHINE, "4")
    assert choose(num_threads=7) == 7
    with pytest.raises(ModelError, match="--num-threads is 0"):
        choose(num_threads=0)


@pytest.mark.parametrize("text", ["0", "-1", "two", ""])
def test_nonsense_in_the_environment_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKERS_ON_MACHINE, text)
    with pytest.raises(ModelError, match=WORKERS_ON_MACHINE):
        choose()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"sys/fs/cgroup/cpu.max": "250000 100000"}, 2.5),
        (
            {
                "proc/self/cgroup": "0::/pod/box",
                "sys/fs/cgroup/pod/cpu.max": "150000 100000",
                "sys/fs/cgroup/pod/box/cpu.max": "300000 100000",
            },
            1.5,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/box\n0::/",
                "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "400000",
                "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000",
            },
            4.0,
        ),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_the_tightest_quota_above_this_process_counts(
    files: dict[str, str], expected: float | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert cpu_quota(tmp_path) == expected
    assert usable_cores(tmp_path) == (8 if expected is None else int(expected))


def test_half_a_core_is_still_one_thread(tmp_path: Path) -> None:
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("50000 100000")
    assert usable_cores(tmp_path) == 1
