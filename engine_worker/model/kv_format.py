"""How keys and values are stored in the cache: as they are, or narrower with scales of their own.

    format  a number                    scales                              a row of 64 numbers, against 16 bits
    dense   the model's own type        none                                128 bytes (in a 16-bit type)
    int8    -127 .. 127                 bfloat16, one a token and head       66 bytes, 1.94 times the blocks
    fp8     e4m3                        bfloat16, one a token and head       66 bytes, 1.94 times
    fp4     e2m1, two in a byte         8 bits, one for 16 neighbours        36 bytes, 3.56 times
    k8v4    keys as int8, values as fp4                                     102 bytes a pair, 2.51 times

**A scale belongs to one token, never to a block.** A scale shared by a block would grow as louder tokens arrive, and
each growth would round the block's earlier tokens again: what is stored would then depend on how the prompt was cut
into chunks, on what was cached and on preemptions. Here the stored row is a function of that token's own key or value,
so a prefix hit reads what computing the prefix again would have stored, and writing touches nothing but the row. The
price is two bytes a row, 3 % of 64 numbers.

**Attention reads what is stored, always**: also the tokens of the very step that wrote them. A backend that attended to
a chunk's own keys before they were rounded would give other answers for other chunks.

fp4 is what hardware calls NVFP4, but for its scales. Those are unsigned, 5 bits of exponent and 3 of fraction (the top
of a float16 without its sign), which reach from 2^-14 to 61,440, so that no second scale for the whole tensor is
needed: it could not be known when the first token arrives. Each group takes the scale that puts its largest number on
6 or the one that puts it on 4, whichever errs less: between 4 and 6 the format has a hole. On the demo model and the
evaluation text that halves what is lost (perplexity +5.1 % instead of +9.8 %); signed 4-bit integers lose more (+6.0 %
with the best of five scales, +6.8 % plain), and rotating keys before rounding (Hadamard) changes little (+4.9 %). Most
of the loss comes from keys, whose channels differ in size: hence k8v4, which loses half a percent there.

Rows that are not finite keep that: their scales are NaN, and so is whatever reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_worker.model.errors import ModelError

NAMES = ("auto", "int8", "fp8", "fp4", "k8v4")  # what --kv-cache-dtype takes
GROUP = 16  # neighbours along head_dim that share a scale in fp4
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # codes 0 .. 7; 8 .. 15 are the same with a minus
FP8_LARGEST = 448.0
_BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # a number on one takes the smaller neighbour
_SMALLEST_SCALE = 2.0**-100  # of int8 and fp8: rows of zeros need some scale
_FP4_SCALES = (8, 247)  # codes of the smallest and the largest scale: 2^-14 and 61,440
_FP4_NAN = 255


@dataclass(frozen=True, slots=True)
class RowFormat:
    """One way to store a row [D]: `data` [width] and, unless dense, `scales` [num_scales].

    int8  data int8 [D], scales bfloat16 [1]
    fp8   data uint8 [D] (the bits of float8_e4m3fn), scales bfloat16 [1]
    fp4   data uint8 [8 * groups], scales uint8 [groups]; groups = ceil(D / 16), padded with zeros. Byte 8 g + j holds
          number 16 g + j in its low half and number 16 g + 8 + j in its high half. A scale's code is the upper half of
          float16's bits: scale = float16_from_bits(code << 7)
    """

    name: str

    @property
    def is_dense(self) -> bool:
        return self.name == "dense"

    def data_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of the stored numbers, where the model's keys have `dtype`."""
        return dtype if self.is_dense else torch.int8 if self.name == "int8" else torch.uint8

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.uint8 if self.name == "fp4" else torch.bfloat16

    def width(self, dim: int) -> int:
        """Stored elements of a row of `dim` numbers."""
        return GROUP // 2 * _num_groups(dim) if self.name == "fp4" else dim

    def num_scales(self, dim: int) -> int:
        return 0 if self.is_dense else _num_groups(dim) if self.name == "fp4" else 1

    def row_bytes(self, dim: int, dtype: torch.dtype) -> int:
        """Bytes of one token's row of one head, scales and padding included."""
        scales = self.num_scales(dim) * self.scale_dtype.itemsize
        return self.width(dim) * self.data_dtype(dtype).itemsize + scales

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows x [..., D] -> (data [..., width], scales [..., num_scales])."""
        return _TO_STORED[self.name](x.float())

    def dequantize(self, data: Tensor, scales: Tensor, dim: int) -> Tensor:
        """The inverse of `quantize` up to rounding: [..., dim] in float32."""
        if self.name == "fp4":
            return _from_fp4(data, scales, dim)
        numbers = data if self.name == "int8" else data.view(torch.float8_e4m3fn)
        return numbers.float() * scales.float()


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How a cache stores keys and how values; `name` is what --kv-cache-dtype calls it, "dense" for auto."""

    name: str
    keys: RowFormat
    values: RowFormat

    @property
    def is_dense(self) -> bool:
        return self.keys.is_dense and self.values.is_dense


DENSE, INT8, FP8, FP4, K8V4 = (
    KVFormat(name, RowFormat(keys), RowFormat(values))
    for name, keys, values in (
        ("dense", "dense", "dense"),
        ("int8", "int8", "int8"),
        ("fp8", "fp8", "fp8"),
        ("fp4", "fp4", "fp4"),
        ("k8v4", "int8", "fp4"),
    )
)


@dataclass(frozen=True, slots=True)
class Rows:
    """One layer's keys, or its values, of all slots: `dim` numbers a head.

    data [num_slots, H, width], scales [num_slots, H, num_scales], None where they are dense.
    """

    format: RowFormat
    dim: int
    data: Tensor
    scales: Tensor | None

    def write(self, slots: Tensor, x: Tensor) -> None:
        """Store rows x [T, H, dim] in their slots [T]."""
        if self.scales is None:
            self.data.index_copy_(0, slots, x)
            return
        data, scales = self.format.quantize(x)
        self.data.index_copy_(0, slots, data)
        self.scales.index_copy_(0, slots, scales)

    def read(self, slots: Tensor | slice, dtype: torch.dtype) -> Tensor:
        """What attention sees of the slots [L]: [L, H, dim]."""
        if self.scales is None:
            return self.data[slots].to(dtype)
        return self.format.dequantize(self.data[slots], self.scales[slots], self.dim).to(dtype)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.data,) if self.scales is None else (self.data, self.scales)

    def is_finite(self) -> Tensor:
        """For each slot [num_slots]: whether all that is stored there is finite."""
        if self.scales is None:
            return torch.isfinite(self.data).flatten(1).all(1)
        scales = fp4_scale(self.scales) if self.format.name == "fp4" else self.scales
        return torch.isfinite(scales).flatten(1).all(1)


def choose_format(name: str, device: torch.device) -> KVFormat:
    """The format that --kv-cache-dtype names; auto stores what the model computes, as it is. Raises ModelError.

    fp8 runs on a CPU, too, as the definition that CUDA's is tested against: int8 has the same size and is faster there.
    """
    if name == "auto":
        return DENSE
    if name not in NAMES:
        raise ModelError(f"There is no KV cache type {name!r}. Use one of {', '.join(NAMES)}.")
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"A KV cache in {name} can't be had on {device}. Use --kv-cache-dtype auto.")
    return next(found for found in (INT8, FP8, FP4, K8V4) if found.name == name)


def fp4_scale(codes: Tensor) -> Tensor:
    """Scales of fp4 in float32, from their codes (uint8)."""
    return (codes.to(torch.int16) << 7).view(torch.float16).float()


@cache
def _e2m1(device: torch.device) -> Tensor:
    """What the 16 codes stand for. Made once: a copy from the host would make a step wait, and can't be recorded."""
    with torch.inference_mode(False):
        return torch.tensor((*E2M1, *(-value for value in E2M1)), device=device)


def _num_groups(dim: int) -> int:
    return -(-dim // GROUP)


def _row_scale(x: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """(x / scale with what is not finite as 0, scale in bfloat16 [..., 1]); rounded up, so that nothing overflows."""
    peak = x.abs().amax(-1, keepdim=True)
    scale = (peak / largest).clamp(min=_SMALLEST_SCALE)
    scale = ((scale.view(torch.int32) + 0xFFFF) >> 16 << 16).view(torch.float32)
    is_finite = torch.isfinite(peak)
    numbers = torch.where(is_finite, x / scale, 0.0)
    return numbers, torch.where(is_finite, scale, float("nan")).to(torch.bfloat16)


def _to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    numbers, scales = _row_scale(x, 127.0)
    return numbers.round().to(torch.int8), scales


def _to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    numbers, scales = _row_scale(x, FP8_LARGEST)
    return numbers.to(torch.float8_e4m3fn).view(torch.uint8), scales


def _to_fp4(x: Tensor) -> tuple[Tensor, Tensor]:
    groups = F.pad(x, (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))  # [..., groups, 16]
    peak = groups.abs().amax(-1, keepdim=True)
    is_finite = torch.isfinite(peak)
    groups = torch.where(is_finite, groups, 0.0)
    on_six, error_six = _round_fp4(groups, peak / 6)
    on_four, error_four = _round_fp4(groups, peak / 4)
    is_four = error_four < error_six
    numbers = torch.where(is_four, on_four[0], on_six[0])
    scales = torch.where(is_finite, torch.where(is_four, on_four[1], on_six[1]), _FP4_NAN)
    low, high = numbers[..., : GROUP // 2], numbers[..., GROUP // 2 :]
    return (low | high << 4).flatten(-2).to(torch.uint8), scales[..., 0].to(torch.uint8)


def _round_fp4(groups: Tensor, scale: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """((codes of the numbers, codes of the scales [..., groups, 1]), squared error [..., groups, 1])."""
    # float32's exponent counts from 127 and float16's from 15: 112 apart
    codes = (scale.contiguous().view(torch.int32) + (1 << 19) >> 20) - (112 << 3)
    codes = codes.clamp(*_FP4_SCALES)
    rounded = (codes << 20) + (112 << 23)
    scale = rounded.view(torch.float32)
    size = (groups / scale).abs()
    numbers = sum((size > boundary).to(torch.int32) for boundary in _BOUNDARIES)
    assert isinstance(numbers, Tensor)
    values = _e2m1(groups.device)[numbers] * scale
    error = (groups.abs() - values).square().sum(-1, keepdim=True)
    return (numbers | (groups < 0).to(torch.int32) << 3, codes), error


def _from_fp4(data: Tensor, scales: Tensor, dim: int) -> Tensor:
    halves = data.unflatten(-1, (-1, GROUP // 2))
    codes = torch.cat((halves & 15, halves >> 4), -1).int()  # [..., groups, 16]
    return (_e2m1(data.device)[codes] * fp4_scale(scales)[..., None]).flatten(-2)[..., :dim]


_TO_STORED = {"int8": _to_int8, "fp8": _to_fp8, "fp4": _to_fp4}
