"""Which attention backend runs on which device."""

from __future__ import annotations

import torch

from engine_worker.model.attention import AttentionBackend
from engine_worker.model.backend_cpu import CPUBackend
from engine_worker.model.backend_reference import ReferenceBackend
from engine_worker.model.errors import ModelError


def make_backend(name: str, device: torch.device) -> AttentionBackend:
    """The backend called `name`; auto takes the fastest one for the device. Raises ModelError."""
    if name == "auto":
        name = "cpu" if device.type == "cpu" else "reference"
    if name == "reference":
        return ReferenceBackend()
    if name == "cpu":
        if device.type != "cpu":
            raise ModelError(f"Attention backend cpu can't run on {device.type}; use --attention-backend auto.")
        return CPUBackend()
    raise ModelError(f"There is no attention backend called {name}; choose auto, reference or cpu.")
