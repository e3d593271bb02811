"""Small host data on its way to the device, without waiting for it.

A copy from ordinary memory to a CUDA device makes the host wait until the device has reached it, which ends all
overlap. From page-locked memory it is queued like a kernel. torch's allocator of page-locked memory keeps a block until
the copies out of it are done, so nothing here needs to live longer than the call.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def to_device(
    values: Tensor | np.ndarray | Sequence[int], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """A tensor on the device with these values. On the CPU it may share their memory."""
    if isinstance(values, np.ndarray):
        tensor = torch.from_numpy(values)
    elif isinstance(values, Tensor):
        tensor = values
    else:
        tensor = torch.tensor(values, dtype=dtype or torch.int64)
    if dtype is not None:
        tensor = tensor.to(dtype)
    if device.type != "cuda" or tensor.device.type == "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class ToHost:
    """Tensors on their way to the host. `get` waits for these, not for what was queued behind them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        if tensors[0].device.type != "cuda":
            self._tensors = list(tensors)
            return
        self._tensors = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for target, source in zip(self._tensors, tensors, strict=True):
            target.copy_(source, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(tensors[0].device))

    def get(self) -> list[Tensor]:
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
