"""How much memory is free, whether the weights fit, and how many KV blocks do.

Free memory is what the kernel could hand out without swapping (MemAvailable), cut down to what the cgroup still allows;
page cache counts as free in both. On CUDA it is what the driver reports.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine_worker.config import EngineConfig
from engine_worker.model.errors import ModelError
from engine_worker.model.threads import cgroup_folders, workers_on_machine

if TYPE_CHECKING:
    from engine_worker.model.checkpoint_files import TensorHeader

_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_UNLIMITED = 1 << 60  # cgroup v1 writes a huge number where v2 writes "max"


class NotEnoughMemory(ModelError):
    """The model or its KV cache doesn't fit. The message gives the numbers and how to mend it."""


def parse_bytes(text: str) -> int:
    """A size such as "2GiB", "512 MB", "1.5g" or "4096" in bytes. k, M, G, T are decimal; Ki, Mi, Gi, Ti binary.

    Raises ValueError with a sentence.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is no size. Write a number with a unit, such as 2GiB or 512MB.")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def format_bytes(num_bytes: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def available_bytes(device: torch.device, root: Path = Path("/")) -> int:
    """Bytes that could be allocated on the device now. `root` stands in for / in tests."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = _meminfo(root)
    for folder in cgroup_folders(root, "memory"):
        left = _cgroup_left(folder)
        if left is not None:
            available = min(available, left)
    return max(0, available)


def check_room_for_weights(
    headers: Iterable[TensorHeader], dtype: torch.dtype, device: torch.device, name: str
) -> None:
    """Raise NotEnoughMemory if weights of these sizes can't fit, before any of them is read."""
    needed = sum(header.num_elements for header in headers) * dtype.itemsize
    available = available_bytes(device)
    if needed > available:
        raise NotEnoughMemory(
            f"{name} needs {format_bytes(needed)} for its weights, but {format_bytes(available)} are free on {device}. "
            "Free some, or take a smaller model or dtype."
        )


def num_kv_blocks(
    config: EngineConfig,
    kv_block_bytes: int,
    max_model_len: int,
    device: torch.device | str = "cpu",
    available: int | None = None,
    profiled: int | None = None,
) -> int:
    """KV blocks to allocate, once the weights are loaded.

    `config.kv_cache_memory` bytes, or the `profiled` ones that a run of the largest step left (profile.py), or
    `config.memory_fraction` of what is free, shared with the other workers on this machine (a CUDA device is not
    shared); never more than `max_num_seqs` sequences of `max_model_len` tokens could use.
    `kv_block_bytes` is one block of `config.block_size` tokens over all layers. Raises NotEnoughMemory when not even
    one sequence of `max_model_len` tokens fits.
    """
    assert kv_block_bytes > 0, kv_block_bytes
    assert max_model_len > 0, max_model_len
    device = torch.device(device)
    free = available_bytes(device) if available is None else available
    blocks_per_seq = -(-max_model_len // config.block_size)
    if config.kv_cache_memory is not None:
        budget, source = config.kv_cache_memory, "--kv-cache-memory"
        if budget > free:
            raise NotEnoughMemory(
                f"--kv-cache-memory asks for {format_bytes(budget)}, but {format_bytes(free)} are free on {device}. "
                "Ask for less, or leave it out."
            )
    elif profiled is not None:
        budget = profiled
        source = f"what --gpu-memory-utilization {config.gpu_memory_utilization} leaves beside weights and a step"
    else:
        if not 0 < config.memory_fraction <= 1:
            raise ModelError(f"--memory-fraction is {config.memory_fraction}; it must lie above 0 and be 1 at most.")
        share = config.memory_fraction / (workers_on_machine() if device.type == "cpu" else 1)
        budget, source = int(free * share), f"a share of {share:.2f} of the {format_bytes(free)} free on {device}"
    num_blocks = min(budget // kv_block_bytes, config.max_num_seqs * blocks_per_seq)
    if num_blocks < blocks_per_seq:
        room = num_blocks * config.block_size
        shorten = f", or set --max-model-len to {room} or less" if room > 1 else ""  # a sequence has two tokens or more
        raise NotEnoughMemory(
            f"The KV cache may take {format_bytes(budget)} ({source}), but one sequence of {max_model_len} tokens "
            f"needs {format_bytes(blocks_per_seq * kv_block_bytes)}. Raise --kv-cache-memory{shorten}."
        )
    return num_blocks


def _meminfo(root: Path) -> int:
    try:
        text = (root / "proc/meminfo").read_text()
    except OSError as error:
        raise ModelError("Free memory can't be read from /proc/meminfo. Set --kv-cache-memory.") from error
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    if match is None:
        raise ModelError("/proc/meminfo has no MemAvailable. Set --kv-cache-memory.")
    return int(match[1]) * 1024


def _cgroup_left(folder: Path) -> int | None:
    """Limit minus use of one cgroup (v2 or v1), None without a limit. File cache that can be dropped is not use."""
    for limit_name, usage_name in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, usage = _read_int(folder / limit_name), _read_int(folder / usage_name)
        if limit is None or usage is None or limit >= _UNLIMITED:
            continue
        return limit - usage + _inactive_file(folder)
    return None


def _inactive_file(folder: Path) -> int:
    try:
        text = (folder / "memory.stat").read_text()
    except OSError:
        return 0
    match = re.search(r"^(?:total_)?inactive_file (\d+)", text, re.MULTILINE)
    return int(match[1]) if match else 0


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
