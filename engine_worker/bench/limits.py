"""How fast this machine reads memory and multiplies matrices, on the cores that this process may use.

A limit is what the best way at hand reaches: a library's sum reads memory at half the speed of its dot product, and
which library multiplies fastest depends on the processor. So several ways are tried and the fastest counts, the
worker's own kernels among them where they can be had: no share of a limit should come out above one.

`python -m engine_worker.bench.limits` prints both as a JSON list: bytes a second, operations a second.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from engine_worker.model.native import kernels, library

_STREAM_FLOATS = 1 << 26  # 256 MiB: more than any cache
_SHAPE = (512, 2048, 2048)  # rows, columns and inner length of the product
_TURNS = 7


def measured_limits() -> tuple[float, float]:
    """(bytes a second of a read stream, float32 operations a second of a matrix product)."""
    stream = np.ones(_STREAM_FLOATS, dtype=np.float32)
    rows, cols, inner = _SHAPE
    read_s = min(_least_s(read) for read in (lambda: stream @ stream, stream.max))
    product_s = min(map(_least_s, _products(rows, cols, inner)))
    return stream.nbytes / read_s, 2.0 * rows * cols * inner / product_s


def _products(rows: int, cols: int, inner: int) -> Iterator[Callable[[], object]]:
    """The same product by every library at hand."""
    left, right = np.ones((rows, inner), dtype=np.float32), np.ones((inner, cols), dtype=np.float32)
    yield lambda: left @ right
    a, b = torch.from_numpy(left), torch.from_numpy(right)
    yield lambda: a @ b
    native = library.load(lambda line: None)
    if native is not None:
        packed = kernels.PackedWeight(kernels.quantize(b.t().contiguous(), "float32"), None)
        yield lambda: kernels.linear(native, a, packed)


def _least_s(work: Callable[[], object]) -> float:
    def once() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return min(once() for _ in range(_TURNS))


if __name__ == "__main__":
    print(json.dumps(measured_limits()))
