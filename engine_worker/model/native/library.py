"""The loaded kernel library: C signatures, structures, and the check that it computes what torch computes.

`load` is called once at start-up; `current` gives what it found. A library that can't be had, or that fails its check,
leaves `current` None with the reason in `status`, and every caller takes its torch twin.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p

from engine_worker.model.native import build

_ABI = 6


class WeightStruct(ctypes.Structure):
    """weight.h's Weight."""

    _fields_ = (
        ("data", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("rows", c_int64),
        ("cols", c_int64),
        ("kind", c_int32),
        ("group", c_int32),
    )


class CacheStruct(ctypes.Structure):
    """rows.h's Cache."""

    _fields_ = (
        *((name, c_void_p) for name in ("keys", "values", "key_scales", "value_scales")),
        *((name, c_int64) for name in ("key_kind", "value_kind")),
    )


class AttentionStruct(ctypes.Structure):
    """attention.h's Attention."""

    _fields_ = (
        ("query", c_void_p),
        ("cache", CacheStruct),
        *((name, c_void_p) for name in ("sinks", "out", "first", "table", "spans")),
        *((name, c_int64) for name in ("num_spans", "query_pitch", "table_pitch", "block_size")),
        *((name, c_int64) for name in ("q_heads", "kv_heads", "key_dim", "value_dim")),
        ("scale", c_float),
        ("softcap", c_float),
    )


class LayerStruct(ctypes.Structure):
    """layer.h's Layer."""

    _fields_ = (
        *((name, WeightStruct) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        ("cache", CacheStruct),
        *((name, c_int64) for name in ("hidden", "inner", "rotary")),
        *((name, c_float) for name in ("input_eps", "post_eps", "q_eps", "k_eps", "scaling")),
    )


class HeadStruct(ctypes.Structure):
    """model.h's Head."""

    _fields_ = (
        *((name, WeightStruct) for name in ("head", "tied")),
        *((name, c_void_p) for name in ("embedding", "norm", "cos", "sin")),
        *((name, c_int64) for name in ("vocab", "hidden", "rotary")),
        ("eps", c_float),
    )


class Library:
    """The functions, typed. Pointers are addresses of contiguous float32 or int64 memory that outlives the call."""

    def __init__(self, path: str, isa: str) -> None:
        self.isa = isa
        library = ctypes.CDLL(path)  # releases the GIL while a kernel runs
        library.wg_abi.restype = c_int64
        if library.wg_abi() != _ABI:
            raise build.NativeUnavailable(f"{path} has another interface")
        pointer, number = c_void_p, c_int64
        self.rms_norm = _typed(library.wg_rms_norm, *[pointer] * 3, c_float, pointer, number, number)
        self.silu_mul = _typed(library.wg_silu_mul, pointer, pointer, number, number)
        self.matmul = _typed(library.wg_matmul, POINTER(WeightStruct), pointer, number, pointer, number, number)
        self.attend = _typed(library.wg_attend, POINTER(AttentionStruct), number)
        self.shared_tokens = _typed(library.wg_shared_tokens, POINTER(AttentionStruct), pointer, returns=c_int64)
        self.rope_write = _typed(
            library.wg_rope_write,
            *[pointer] * 3,
            number,
            *[pointer] * 2,
            c_float,
            c_float,
            pointer,
            POINTER(CacheStruct),
            *[number] * 4,
            returns=c_int64,
        )
        self.layer = _typed(
            library.wg_layer,
            POINTER(LayerStruct),
            POINTER(AttentionStruct),
            *[pointer] * 4,
            number,
            number,
            returns=c_int64,
        )
        self.layers = _typed(
            library.wg_layers,
            POINTER(LayerStruct),
            number,
            POINTER(AttentionStruct),
            *[pointer] * 4,
            number,
            pointer,
            number,
            number,
            returns=c_int64,
        )
        self.find_likeliest = _typed(library.wg_find_likeliest, pointer, number, number, pointer, pointer, number)
        self.model = _typed(
            library.wg_model,
            POINTER(HeadStruct),
            POINTER(LayerStruct),
            number,
            POINTER(AttentionStruct),
            *[pointer] * 3,
            number,
            pointer,
            number,
            *[pointer] * 3,
            number,
            returns=c_int64,
        )


def _typed(function: ctypes._NamedFuncPointer, *arguments: type, returns: type | None = None):  # type: ignore[no-untyped-def, name-defined]
    function.argtypes, function.restype = list(arguments), returns
    return function


class _State:
    library: Library | None = None
    status = "not loaded"
    is_loaded = False


def load(progress: Callable[[str], None], choice: str | None = None) -> Library | None:
    """Find or build the library, once a process (again only for another `choice`). Never raises."""
    if _State.is_loaded and choice is None:
        return _State.library
    _State.is_loaded, _State.library = True, None
    try:
        isa = build.choose(choice)
        library = Library(str(build.find_or_build(isa, progress)), isa.name)
        from engine_worker.model.native.kernels import check  # it is built on this module

        check(library)
        _State.library, _State.status = library, f"native kernels ({isa.name})"
    except (build.NativeUnavailable, OSError, AttributeError) as error:
        _State.status = f"no native kernels: {error}"
    return _State.library


def current() -> Library | None:
    return _State.library


def status() -> str:
    return _State.status
