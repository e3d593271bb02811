"""Linear layers and embeddings over weights laid out for the kernels: float32, int8 or int4.

One copy serves every number of rows. Measured on one AVX-512 core, all linears of 12 layers of a 135 M model, in ms
(the machine was shared, so read along the rows):

    rows               1     2     4     8    16    32    64   128   512
    F.linear (MKL)    34    39    67    91    92    83   137   270   871
    oneDNN, packed    53    57    65    69    83    99   120   257   874
    here, float32     38    46    44    59    63    75   114   101   870
    here, int8        11    12    15    20    33    52    92   218  1050
    here, int4         8     9    11    16    36    45    92   223   950

Weights take a quarter (int8) or a sixth (int4 with its scales) of the memory that they are read from at each step of
decoding, hence the gain at few rows; from some 32 rows on all are bound by the same float32 arithmetic. Perplexity of
the demo model on the shipped text is in tests/engine_worker/model/test_quantize.py, with its bounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

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
        return cls(library, PackedWeight(kernels.quantize(linear.weight, kind), linear.bias))

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
