"""Triton's kernels on the CPU, in Triton's interpreter (tests/conftest.py switches it on)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from engine_worker.model.backend_triton import TritonBackend


def triton_backend(max_model_len: int = 256, num_cores: int = 4) -> TritonBackend:
    """The Triton backend, interpreted. Skips the test where triton is not installed (it exists for Linux only)."""
    pytest.importorskip("triton")
    from engine_worker.model.backend_triton import TritonBackend, is_interpreted

    if not is_interpreted():
        pytest.skip("TRITON_INTERPRET is off")
    return TritonBackend(max_model_len, num_cores)
