"""Linear layers and embeddings over weights laid out for the kernels: float32, int8 or int4.

One copy serves every number of rows. Twelve layers' linears of a 135 M Llama (query, key and value joined, gate and up
joined: 170 MB in float32, more than the caches hold), one core, least CPU time in ms of alternating runs. The processor
(AMD Zen 5) read 40 GB/s and could multiply and add at 262 GFLOP/s with AVX-512 and 131 with AVX2, so that nothing in
float32 can be faster than the last line of each part. The machine was shared: differences of a few per cent are noise.

    AVX-512, rows               1     2     4     8    16    32    64   128   512
    F.linear (MKL)             11    20    15    18    25    39    68   121   435
    oneDNN, packed            7.0   7.4   7.9   9.6  12.3  18.5  30.5  52.5   188
    here, float32             4.8   5.0   5.3   5.2   6.5  12.5  24.4  48.7   184
    here, on pages of 4 KB    5.0   5.4   7.0   7.2   8.1  13.4  25.5  49.6   185
    here, int8                1.8   1.8   2.2   3.6   6.8  13.0  25.1  49.2   188
    here, int4                1.4   1.5   2.1   3.9   7.3  13.6  25.3  49.9   190
    limit, float32            4.2   4.2   4.2   4.2   5.2  10.4  20.7  41.5   166

    AVX2, rows                  1     2     4     8    16    32    64   128   512
    F.linear (MKL)             11    19    16    19    26    41    69   124   439
    oneDNN, packed            9.7  10.3  12.3  14.7  20.7  31.7  54.5  98.6   366
    here, float32             4.9   5.1   5.2   7.3  12.4  24.7  47.7  92.5   355
    here, on pages of 4 KB    5.5   6.2   6.2   7.8  13.0  25.5  48.1  91.8   360
    here, int8                3.5   2.7   5.1   8.6  14.0  25.7  48.6  93.2   360
    here, int4                2.2   2.9   5.7   9.6  14.3  26.6  49.0  93.9   363
    limit, float32            4.2   4.2   4.2   5.2  10.4  20.8  41.5  83.0   332

An older processor (AMD Zen 4, 29 GB/s, 108 GFLOP/s either way) needs for the same in float32, with its limit:

    rows                        1     2     4     8    16    32    64
    here, AVX-512             6.0   5.6   6.2   6.6  12.8  26.2  51.7
    here, AVX2                5.7   8.2   7.9   7.7  13.6  27.6  55.1
    limit                     5.6   5.6   5.6   6.3  12.6  25.2  50.4

So float32 needs one copy where oneDNN needs two, and no more time; parts can be joined, and run within a fused
layer. Narrow weights take a quarter (int8) or a sixth (int4 with its scales) of the memory that is read at each step
of decoding, hence their gain at few rows; with many rows all are bound by the same float32 arithmetic. What they cost
in quality is bounded in engine_worker/evaluate.py and held to by tests/engine_worker/model/test_quantize.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine_worker.model.importance import importance_of
from engine_worker.model.native import kernels
from engine_worker.model.native.kernels import PackedWeight, Quantized
from engine_worker.model.native.library import Library


class NativeLinear(nn.Module):
    """nn.Linear over a packed weight. `weight` is a meta tensor: its shape and type are right, its memory is gone."""

    def __init__(self, library: Library, packed: PackedWeight, quantized: Quantized | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = packed.shape
        self.packed = packed
        self.quantized = quantized  # kept only until a decoder layer may want to join it with its neighbours
        self.bias = packed.bias
        self.weight = torch.empty(packed.shape, device="meta")
        self._library = library

    @classmethod
    def of(cls, library: Library, linear: nn.Linear, kind: str) -> NativeLinear:
        quantized = kernels.quantize(linear.weight, kind, importance=importance_of(linear))
        return cls(library, PackedWeight(quantized, linear.bias))

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]"""
        if x.dtype != torch.float32:
            return kernels.linear(self._library, x.float(), self.packed).to(x.dtype)
        return kernels.linear(self._library, x, self.packed)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, kind={self.packed.kind}"


class NativeEmbedding(nn.Module):
    """The embedding whose weight is the LM head's: rows are read out of the head's layout. ids [...] -> [..., K]"""

    def __init__(self, embedding: nn.Embedding, packed: PackedWeight) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.packed = packed
        self.weight = torch.empty(packed.shape, device="meta")

    def forward(self, ids: Tensor) -> Tensor:
        return self.packed.rows(ids)


def nativize(module: nn.Module, library: Library, kind: str) -> int:
    """Swap what is exactly nn.Linear in float32 on the CPU for NativeLinear, in place. Returns bytes of packed weights.

    A tied embedding follows its head, so that the dense matrix is freed. Everything else stays as it is. With int4 the
    head gets 8 bits: its rounding goes straight into the logits and, where tied, into every token's embedding.
    """
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    places: dict[nn.Linear, list[tuple[nn.Module, str]]] = {}
    for parent in module.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear and fits(child, kind):
                places.setdefault(child, []).append((parent, name))
    tied: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent in module.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Embedding and child.max_norm is None:
                tied.setdefault(child.weight.data_ptr(), []).append((parent, name))
    total = 0
    while places:
        linear, spots = places.popitem()
        swapped = NativeLinear.of(library, linear, "int8" if linear is head and kind == "int4" else kind).eval()
        total += swapped.packed.num_bytes
        for parent, name in spots:
            setattr(parent, name, swapped)
        for parent, name in tied.get(linear.weight.data_ptr(), ()):
            setattr(parent, name, NativeEmbedding(getattr(parent, name), swapped.packed))
        head = None if linear is head else head  # the last hold on its memory
        del linear
    return total


def fits(linear: nn.Linear, kind: str) -> bool:
    weight = linear.weight
    is_plain = weight.device.type == "cpu" and weight.dtype == torch.float32
    return is_plain and (kind != "int4" or linear.in_features % 32 == 0)


def join(parts: Sequence[PackedWeight]) -> PackedWeight | None:
    """One weight that gives the parts' outputs side by side, None if they are of different kinds or widths.

    Where all but the last fill whole panels, the parts become views of it; otherwise they stay, and it is a copy.
    """
    first = parts[0]
    if any(part.kind != first.kind or part.shape[1] != first.shape[1] for part in parts):
        return None
    return PackedWeight.joined(parts)
