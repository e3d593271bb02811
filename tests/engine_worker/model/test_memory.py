"""Free memory from the kernel's own files, and the number of KV blocks that follows from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine_worker.config import EngineConfig
from engine_worker.model.checkpoint_files import TensorHeader
from engine_worker.model.errors import ModelError
from engine_worker.model.memory import (
    NotEnoughMemory,
    available_bytes,
    check_room_for_weights,
    format_bytes,
    num_kv_blocks,
    parse_bytes,
)
from engine_worker.model.threads import WORKERS_ON_MACHINE

pytestmark = pytest.mark.engine

CPU = torch.device("cpu")
MIB = 1 << 20


@pytest.fixture(autouse=True)
def one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKERS_ON_MACHINE, raising=False)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def blocks(available: int, *, block_bytes: int = MIB, max_model_len: int = 256, **settings: Any) -> int:
    return num_kv_blocks(EngineConfig(model="m", **settings), block_bytes, max_model_len, CPU, available)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096),
        ("2GiB", 2 << 30),
        ("2gib", 2 << 30),
        (" 1.5 Gi ", 3 << 29),
        ("512MB", 512_000_000),
        ("512 M", 512_000_000),
        ("1k", 1000),
        ("1KiB", 1024),
        ("3T", 3 * 10**12),
        ("7b", 7),
    ],
)
def test_sizes_are_parsed(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "2 XB", "2,5GiB", "1e9", "two"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="2GiB"):
        parse_bytes(text)


def test_sizes_are_written_for_people() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 3 << 29, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "1.5 GiB",
        "5.0 TiB",
    ]


def test_available_is_the_least_of_kernel_and_cgroups(tmp_path: Path) -> None:
    meminfo = {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable:   {8 << 20} kB\n"}
    root = write(tmp_path / "plain", meminfo)
    assert available_bytes(CPU, root) == 8 << 30
    group = {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max\n"}
    group |= {"sys/fs/cgroup/a/b/memory.current": "5\n"}
    root = write(tmp_path / "unlimited", meminfo | group)
    assert available_bytes(CPU, root) == 8 << 30
    above = {"sys/fs/cgroup/a/memory.max": f"{1 << 30}\n", "sys/fs/cgroup/a/memory.current": f"{700 * MIB}\n"}
    above |= {"sys/fs/cgroup/a/memory.stat": f"anon 1\ninactive_file {100 * MIB}\n"}
    root = write(tmp_path / "above", meminfo | group | above)
    assert available_bytes(CPU, root) == (1 << 30) - 600 * MIB
    mounted = {"proc/self/cgroup": "0::/elsewhere\n", "sys/fs/cgroup/memory.max": f"{2 << 30}\n"}
    mounted |= {"sys/fs/cgroup/memory.current": f"{1 << 30}\n"}
    root = write(tmp_path / "container", meminfo | mounted)
    assert available_bytes(CPU, root) == 1 << 30
    full = {"sys/fs/cgroup/memory.max": "1000\n", "sys/fs/cgroup/memory.current": "2000\n"}
    assert available_bytes(CPU, write(tmp_path / "full", meminfo | full)) == 0


def test_cgroup_v1_limits_count_too(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory/box"
    files = {"proc/meminfo": f"MemAvailable: {8 << 20} kB\n", "proc/self/cgroup": "4:memory:/box\n0::/\n"}
    files |= {f"{base}/memory.limit_in_bytes": f"{1 << 30}\n", f"{base}/memory.usage_in_bytes": f"{500 * MIB}\n"}
    files |= {f"{base}/memory.stat": f"cache 7\ntotal_inactive_file {20 * MIB}\n"}
    files |= {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}
    files |= {"sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n"}
    assert available_bytes(CPU, write(tmp_path, files)) == (1 << 30) - 480 * MIB


def test_this_machine_has_memory() -> None:
    assert available_bytes(CPU) > 0


def test_a_kernel_without_the_figure_is_told_about(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="--kv-cache-memory"):
        available_bytes(CPU, tmp_path)
    with pytest.raises(ModelError, match="--kv-cache-memory"):
        available_bytes(CPU, write(tmp_path, {"proc/meminfo": "MemTotal: 3 kB\n"}))


def test_blocks_come_from_the_fraction_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert blocks(100 * MIB) == 50
    assert blocks(100 * MIB, memory_fraction=0.25) == 25
    monkeypatch.setenv(WORKERS_ON_MACHINE, "2")
    assert blocks(100 * MIB) == 25


def test_blocks_come_from_the_bytes_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKERS_ON_MACHINE, "2")  # asked for is asked for
    assert blocks(100 * MIB, kv_cache_memory=40 * MIB + 7) == 40
    with pytest.raises(NotEnoughMemory, match=r"asks for 200\.0 MiB, but 100\.0 MiB are free"):
        blocks(100 * MIB, kv_cache_memory=200 * MIB)


def test_no_more_blocks_than_all_sequences_could_use() -> None:
    assert blocks(100_000 * MIB, max_num_seqs=3, max_model_len=250) == 3 * 16


def test_room_for_less_than_one_sequence_is_refused_with_numbers() -> None:
    assert blocks(32 * MIB) == 16
    with pytest.raises(NotEnoughMemory) as raised:
        blocks(30 * MIB)
    sentence = str(raised.value)
    assert "15.0 MiB" in sentence
    assert "16.0 MiB" in sentence
    assert "--max-model-len to 240 or less" in sentence
    assert blocks(30 * MIB, max_model_len=240) == 15


def test_room_for_less_than_one_block_is_refused_without_a_length_that_would_not_fit_either() -> None:
    with pytest.raises(NotEnoughMemory) as raised:
        blocks(100 * MIB, kv_cache_memory=MIB - 1)
    assert str(raised.value).endswith("Raise --kv-cache-memory.")
    assert isinstance(raised.value, ModelError)


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.5])
def test_fractions_that_make_no_sense_are_refused(fraction: float) -> None:
    with pytest.raises(ModelError, match="--memory-fraction"):
        blocks(100 * MIB, memory_fraction=fraction)


def test_weights_are_measured_in_the_type_they_will_have() -> None:
    header = TensorHeader(Path("f"), "w", "BF16", available_bytes(CPU) // 3, 0, 1)
    check_room_for_weights([header], torch.bfloat16, CPU, "m")
    with pytest.raises(NotEnoughMemory, match="m needs"):
        check_room_for_weights([header], torch.float32, CPU, "m")
