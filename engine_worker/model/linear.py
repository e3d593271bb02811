"""Linear layers for a CPU in float32: a second, blocked copy of the weight for the batch sizes of decoding.

MKL's GEMM, behind F.linear, packs the weight anew on every call. With hundreds of rows that is lost in the work; with
2 to 64, where decoding lives, it can cost more than the product itself. oneDNN can multiply a weight packed once. How
many times as fast as F.linear that is, on one core, for the layers and the LM head of a 135 M Llama (CPU time of
alternating runs; AVX2 by restricting both libraries; AMD's AVX2 gains more at 2 to 16 rows):

    rows               1     2     4     8    16    32    64   128   256   512
    AVX512  layers   0.8   0.8   1.2   1.5   1.1   1.2   1.1   1.1   1.1   1.0
            head     1.1   1.1   2.1   3.1   1.8   1.7   1.6
    AVX2    layers   0.9   1.3   1.1   1.1   1.1   1.2   1.1   1.1   1.1   1.1
            head     0.8   2.2   2.0   1.8   1.6   1.5   1.5

On AMD plain MKL wins again from 256 rows by 10 to 20 %. So both copies are kept while memory allows: F.linear for one
row and for 256 and more, the packed weight in between. The plain weight stays the module's parameter, so tied
embeddings and state_dict are untouched.

The two operators are private to torch; they are looked up, tried against F.linear, and left alone if anything differs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_worker.model.memory import available_bytes
from engine_worker.model.threads import workers_on_machine

MIN_PACKED_ROWS = 2
MAX_PACKED_ROWS = 255
_PACK_FOR_ROWS = 16  # the batch size oneDNN lays the weight out for; it serves the others nearly as well
_MIN_ELEMENTS = 1 << 15  # below it the call costs more than the product
_MEMORY_SHARE = 0.25  # of what is free, for the packed copies of all workers on the machine


@dataclass(frozen=True, slots=True)
class PrepackReport:
    """What prepack did: layers swapped, layers it would have swapped with more memory, bytes taken."""

    num_packed: int
    num_left: int
    packed_bytes: int


class PackedLinear(nn.Module):
    """nn.Linear with a packed second copy of its weight [N, K]. Same result up to float32 rounding."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight  # the same Parameter, so that tying survives
        self.bias = linear.bias
        # Not a buffer: an mkldnn tensor has no storage, and must not appear in a state_dict.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().contiguous(), _PACK_FOR_ROWS)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]"""
        num_rows = x.numel() // self.in_features
        if MIN_PACKED_ROWS <= num_rows <= MAX_PACKED_ROWS:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def prepack(module: nn.Module, max_bytes: int | None = None) -> PrepackReport:
    """Swap the float32 CPU nn.Linear layers of `module`, in place, for PackedLinear where that pays.

    The copies take at most `max_bytes`, by default this worker's share of a quarter of the memory that is free; the
    largest layers come first. Anything that is not exactly nn.Linear (quantized layers, fused experts) is left alone.
    The module's weights must not change afterwards: the packed copies would not follow.
    """
    places: dict[nn.Linear, list[tuple[nn.Module, str]]] = {}
    for parent in module.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear and _pays(child):
                places.setdefault(child, []).append((parent, name))
    if not places or not is_available():
        return PrepackReport(0, 0, 0)
    budget = _default_budget() if max_bytes is None else max_bytes
    taken = num_packed = 0
    for linear in sorted(places, key=lambda linear: linear.weight.numel(), reverse=True):
        size = linear.weight.numel() * linear.weight.element_size()
        if taken + size > budget:
            continue
        packed = PackedLinear(linear).eval()
        for parent, name in places[linear]:
            setattr(parent, name, packed)
        taken, num_packed = taken + size, num_packed + 1
    return PrepackReport(num_packed, len(places) - num_packed, taken)


def is_available() -> bool:
    """Do this torch's packed operators exist and give F.linear's results?"""
    if not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((3, 40), (24, 40), (24,)))
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_FOR_ROWS)
        result = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    except (AttributeError, RuntimeError, TypeError):
        return False
    return torch.allclose(result, F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)


def _default_budget() -> int:
    return int(available_bytes(torch.device("cpu")) * _MEMORY_SHARE / workers_on_machine())


def _pays(linear: nn.Linear) -> bool:
    weight = linear.weight
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= _MIN_ELEMENTS
