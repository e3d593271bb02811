"""Which attention backend runs on which device."""

from __future__ import annotations

import importlib

import torch

from engine_worker.config import ATTENTION_BACKENDS
from engine_worker.model.attention import AttentionBackend
from engine_worker.model.backend_cpu import CPUBackend
from engine_worker.model.backend_flashinfer import FlashInferBackend, narrow_cache
from engine_worker.model.backend_native import NativeBackend
from engine_worker.model.backend_reference import ReferenceBackend
from engine_worker.model.errors import ModelError
from engine_worker.model.kv_format import DENSE, KVFormat
from engine_worker.model.native import library as native


def make_backend(
    name: str, device: torch.device, max_model_len: int = 1 << 17, kv_format: KVFormat = DENSE
) -> AttentionBackend:
    """The backend called `name`, for a cache in `kv_format`; auto takes the fastest one for the device.

    The kernel library must have been looked for before (native.load): where there is none, auto takes torch's kernels.
    No position reaches `max_model_len`. Raises ModelError.
    """
    if name not in ATTENTION_BACKENDS:
        *others, last = ATTENTION_BACKENDS
        raise ModelError(f"There is no attention backend called {name}; choose {', '.join(others)} or {last}.")
    if name == "auto":
        name = "triton" if device.type == "cuda" else "cpu" if native.current() is None else "native"
    if name == "reference":
        return ReferenceBackend()
    if name == "triton":
        return _triton(device, max_model_len)
    if name == "flashinfer":
        return _flashinfer(device, max_model_len, kv_format)
    if device.type != "cpu":
        raise ModelError(f"Attention backend {name} can't run on {device.type}; use --attention-backend auto.")
    if name == "cpu":
        return CPUBackend()
    library = native.current()
    if library is None:
        raise ModelError(f"Attention backend native can't be used: {native.status()}. Use --attention-backend auto.")
    return NativeBackend(library)


def _triton(device: torch.device, max_model_len: int) -> AttentionBackend:
    try:
        from engine_worker.model.backend_triton import TritonBackend, is_interpreted
    except ImportError as error:
        raise ModelError(
            "Attention backend triton needs the package triton, which CUDA builds of torch for Linux bring along: "
            "install it, or use --attention-backend reference, which is slow."
        ) from error
    if device.type == "cuda":
        return TritonBackend(max_model_len, torch.cuda.get_device_properties(device).multi_processor_count)
    if not is_interpreted():
        raise ModelError(f"Attention backend triton can't run on {device.type}; use --attention-backend auto.")
    return TritonBackend(max_model_len, num_cores=1)


def _flashinfer(device: torch.device, max_model_len: int, kv_format: KVFormat) -> AttentionBackend:
    if device.type != "cuda":
        raise ModelError(f"Attention backend flashinfer can't run on {device.type}; use --attention-backend auto.")
    if not kv_format.is_dense:
        raise narrow_cache(kv_format.name)
    try:
        library = importlib.import_module("flashinfer")
    except (ImportError, OSError, RuntimeError) as error:  # the latter where it finds no CUDA that it can use
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise ModelError(
            f"Attention backend flashinfer can't be loaded ({reason[0]}): pip install 'warmgate[flashinfer]', or use "
            "--attention-backend triton."
        ) from error
    return FlashInferBackend(max_model_len, device, library)
