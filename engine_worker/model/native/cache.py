"""Which caches the kernels read and write, and how they are told where one lies."""

from __future__ import annotations

import torch

from engine_worker.model.kv_format import Rows
from engine_worker.model.native.library import CacheStruct

_KINDS = {"dense": 0, "int8": 1, "fp4": 2}  # rows.h's RowKind
_PAIRS = {("dense", "dense"), ("int8", "int8"), ("fp4", "fp4"), ("int8", "fp4")}  # keys and values


def is_known(keys: Rows, values: Rows) -> bool:
    """Whether the kernels have code for this pair: float32, or a narrow format other than fp8."""
    if (keys.format.name, values.format.name) not in _PAIRS:
        return False
    return all(rows.scales is not None or rows.data.dtype == torch.float32 for rows in (keys, values))


def cache_struct(keys: Rows, values: Rows) -> CacheStruct:
    """A layer's cache for the kernels. The rows must outlive it."""
    assert is_known(keys, values)
    return CacheStruct(
        keys=keys.data.data_ptr(),
        values=values.data.data_ptr(),
        key_scales=None if keys.scales is None else keys.scales.data_ptr(),
        value_scales=None if values.scales is None else values.scales.data_ptr(),
        key_kind=_KINDS[keys.format.name],
        value_kind=_KINDS[values.format.name],
    )
