"""Which attention backend runs on which device."""

from __future__ import annotations

import torch

from engine_worker.model.attention import AttentionBackend
from engine_worker.model.backend_cpu import CPUBackend
from engine_worker.model.backend_native import NativeBackend
from engine_worker.model.backend_reference import ReferenceBackend
from engine_worker.model.errors import ModelError
from engine_worker.model.native import library as native


def make_backend(name: str, device: torch.device) -> AttentionBackend:
    """The backend called `name`; auto takes the fastest one for the device. Raises ModelError.

    The kernel library must have been looked for before (native.load): where there is none, auto takes torch's kernels.
    """
    if name == "auto":
        name = "reference" if device.type != "cpu" else "cpu" if native.current() is None else "native"
    if name == "reference":
        return ReferenceBackend()
    if name not in ("cpu", "native"):
        raise ModelError(f"There is no attention backend called {name}; choose auto, reference, cpu or native.")
    if device.type != "cpu":
        raise ModelError(f"Attention backend {name} can't run on {device.type}; use --attention-backend auto.")
    if name == "cpu":
        return CPUBackend()
    library = native.current()
    if library is None:
        raise ModelError(f"Attention backend native can't be used: {native.status()}. Use --attention-backend auto.")
    return NativeBackend(library)
