"""The kernels on tensors, and beside each its twin in torch: the definition it is tested against.

Weights are laid out once (`PackedWeight`): panels of 32 output rows, so that the inner loop reads memory in one stream.

- float32: the values themselves.
- int8: one float32 scale an output row, value = scale * q, q in -127 .. 127.
- int4: a scale and a minimum for `group` neighbours of a row, value = scale * q + minimum, q in 0 .. 15, two in a byte.
  Both are half floats, so that a weight takes 5 bits with groups of 32.

Activations stay float32. Quantizing them, too, would let the products run on integer units, but language models have
activation outliers: one scale a tensor, which is what torch's int8 kernels for CPUs use, multiplies the perplexity of
the demo model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_worker.model.kv_format import Rows
from engine_worker.model.native.build import NativeUnavailable
from engine_worker.model.native.cache import cache_struct
from engine_worker.model.native.int4 import round_groups
from engine_worker.model.native.library import Library, WeightStruct

PANEL = 32
KINDS = {"float32": 0, "int8": 1, "int4": 2}


@dataclass(frozen=True, slots=True)
class Quantized:
    """A weight [N, K] as numbers and what they are counted in.

    float32: the values alone. int8: integers and scales [N, 1] in float32. int4: integers 0 .. 15, scales and minima
    [N, K / group] in float16, where a scale may be negative.
    """

    kind: str
    values: Tensor
    scales: Tensor | None
    group: int
    minima: Tensor | None = None

    def dequantize(self) -> Tensor:
        """[N, K] in float32: what the products are defined by."""
        if self.scales is None:
            return self.values
        groups = self.values.float().unflatten(1, (self.scales.shape[1], -1)) * self.scales[:, :, None].float()
        return (groups if self.minima is None else groups + self.minima[:, :, None].float()).flatten(1)


def quantize(weight: Tensor, kind: str, group: int = 32, importance: Tensor | None = None) -> Quantized:
    """Round to nearest: int8 symmetrically, int4 as int4.py says. Raises ModelError for what int4 can't hold.

    `importance` [K] is what int4's error in each column counts for, None where that isn't known.
    """
    weight = weight.detach().float()
    if kind == "float32":
        return Quantized(kind, weight, None, 0)
    if kind == "int8":
        scales = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        return Quantized(kind, (weight / scales).round().to(torch.int8), scales, 0)
    assert kind == "int4", kind
    assert weight.shape[1] % group == 0
    values, scales, minima = round_groups(
        weight.unflatten(1, (-1, group)), None if importance is None else importance.unflatten(0, (-1, group))
    )
    return Quantized(kind, values.flatten(1), scales, group, minima)


class PackedWeight:
    """A quantized or plain weight in the library's layout, with its C description. `bias` [N] or None."""

    def __init__(self, weight: Quantized, bias: Tensor | None) -> None:
        rows, cols = weight.values.shape
        padding = -rows % PANEL
        values = F.pad(weight.values, (0, 0, 0, padding))
        if weight.kind == "int4":
            values = values[:, 0::2] | values[:, 1::2] << 4  # [N, K / 2]
        data = values.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()  # [panels, K, PANEL]
        scales = None
        if weight.scales is not None:
            scales = weight.scales
            if weight.minima is not None:
                scales = torch.stack((scales, weight.minima), 2).flatten(1)  # [N, K / group * 2]
            scales = F.pad(scales, (0, 0, 0, padding))
            scales = scales.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()
        self._set(
            (rows, cols), weight.kind, weight.group, data, scales, None if bias is None else bias.detach().float()
        )

    @classmethod
    def joined(cls, parts: Sequence[PackedWeight]) -> PackedWeight:
        """One weight with the parts' rows in order. The parts become views of its memory, if they fill whole panels."""
        first = parts[0]
        made = cls.__new__(cls)
        fills_panels = all(part.shape[0] % PANEL == 0 for part in parts[:-1])
        bias = None
        if any(part.bias is not None for part in parts):
            bias = torch.cat([torch.zeros(p.shape[0]) if p.bias is None else p.bias for p in parts])
        data = _concatenate([part.data for part in parts], [part.shape[0] for part in parts], fills_panels)
        scales = None
        if first.scales is not None:
            tables = [part.scales for part in parts if part.scales is not None]
            scales = _concatenate(tables, [part.shape[0] for part in parts], fills_panels)
        rows = sum(part.shape[0] for part in parts)
        made._set((rows, first.shape[1]), first.kind, first.group, data, scales, bias)
        panel = 0
        for part in parts if fills_panels else ():
            end = panel + part.data.shape[0]
            part_scales = None if scales is None else scales[panel:end]
            part._set(part.shape, part.kind, part.group, data[panel:end], part_scales, part.bias)
            panel = end
        return made

    def _set(
        self,
        shape: tuple[int, int],
        kind: str,
        group: int,
        data: Tensor,
        scales: Tensor | None,
        bias: Tensor | None,
    ) -> None:
        self.shape, self.kind, self.group = shape, kind, group
        self.data, self.scales = data, scales
        self.bias = None if bias is None else bias.contiguous()
        self.struct = WeightStruct(address(data), address(scales), address(self.bias), *shape, KINDS[kind], group)
        self.pointer = ctypes.pointer(self.struct)

    @property
    def num_bytes(self) -> int:
        tensors = (self.data, self.scales, self.bias)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows [..., K] of the weight in float32: an embedding's look-up from the same memory as the LM head."""
        panel, column = ids // PANEL, ids % PANEL
        packed = self.data[panel, :, column]  # [..., K] or, for int4, [..., K / 2]
        if self.kind == "float32":
            return packed
        assert self.scales is not None
        scales = self.scales[panel, :, column]  # [..., 1] or [..., K / group * 2]
        if self.kind == "int8":
            return packed.float() * scales
        scale, minimum = scales.float().unflatten(-1, (-1, 2))[..., None, :].unbind(-1)  # [..., K / group, 1]
        values = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).float()  # [..., K]
        return (values.unflatten(-1, (scale.shape[-2], -1)) * scale + minimum).flatten(-2)


def _concatenate(panels: list[Tensor], rows: list[int], fills_panels: bool) -> Tensor:
    """Join tensors [panels, K, PANEL], of which each holds so many rows, into one without gaps."""
    if fills_panels:
        return torch.cat(panels)
    flat = torch.cat([part.transpose(1, 2).flatten(0, 1)[:n] for part, n in zip(panels, rows, strict=True)])
    padded = F.pad(flat, (0, 0, 0, -flat.shape[0] % PANEL))
    return padded.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()


def address(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def linear(library: Library, x: Tensor, weight: PackedWeight) -> Tensor:
    """x [..., K] float32 -> [..., N]. Raises ValueError for another width: the kernel would read and write beyond."""
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"a linear layer of {weight.shape[1]} inputs was given {x.shape[-1]}")
    x = x.contiguous()
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    num_rows = x.numel() // weight.shape[1]
    library.matmul(weight.pointer, x.data_ptr(), num_rows, out.data_ptr(), 0, torch.get_num_threads())
    return out


def linear_twin(x: Tensor, weight: Quantized, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight.dequantize(), bias)


def rms_norm(library: Library, x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, x [..., n]. With `delta`, x += delta first, kept."""
    assert x.is_contiguous()
    out = torch.empty_like(x)
    n = x.shape[-1]
    library.rms_norm(x.data_ptr(), address(delta), weight.data_ptr(), eps, out.data_ptr(), x.numel() // n, n)
    return out


def rms_norm_twin(x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None) -> Tensor:
    if delta is not None:
        x += delta
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def silu_mul(library: Library, gate_up: Tensor) -> Tensor:
    """[..., 2 n] -> silu(first half) * second half [..., n]."""
    gate_up = gate_up.contiguous()
    n = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], n))
    library.silu_mul(gate_up.data_ptr(), out.data_ptr(), gate_up.numel() // (2 * n), n)
    return out


def silu_mul_twin(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMS norm of each query or key head before rotation."""

    weight: Tensor
    eps: float


def rope_write(
    library: Library,
    qkv: Tensor,
    rotation: tuple[Tensor, Tensor] | None,
    norms: tuple[HeadNorm | None, HeadNorm | None],
    slots: Tensor,
    cache: tuple[Rows, Rows],
) -> bool:
    """Norm and rotate the queries of qkv [T, (Hq + 2 Hkv) D] in place, and write keys and values into the cache.

    rotation: cos and sin [T, R], R <= D even; None leaves positions out. Returns whether what was written is finite.
    """
    num_tokens, width = qkv.shape
    kv_heads, dim = cache[0].data.shape[1], cache[0].dim
    cos, sin = rotation if rotation is not None else (None, None)
    q_norm, k_norm = norms
    return bool(
        library.rope_write(
            qkv.data_ptr(),
            address(cos),
            address(sin),
            0 if cos is None else cos.shape[-1],
            None if q_norm is None else q_norm.weight.data_ptr(),
            None if k_norm is None else k_norm.weight.data_ptr(),
            0.0 if q_norm is None else q_norm.eps,
            0.0 if k_norm is None else k_norm.eps,
            slots.data_ptr(),
            cache_struct(*cache),
            num_tokens,
            width // dim - 2 * kv_heads,
            kv_heads,
            dim,
        )
    )


def rope_write_twin(
    qkv: Tensor,
    rotation: tuple[Tensor, Tensor] | None,
    norms: tuple[HeadNorm | None, HeadNorm | None],
    slots: Tensor,
    cache: tuple[Rows, Rows],
) -> bool:
    keys, values = cache
    kv_heads, dim = keys.data.shape[1], keys.dim
    heads = qkv.unflatten(1, (-1, dim))  # [T, Hq + 2 Hkv, D], a view
    q_heads = heads.shape[1] - 2 * kv_heads
    for norm, part in zip(norms, (heads[:, :q_heads], heads[:, q_heads:-kv_heads]), strict=True):
        if norm is not None:
            part.copy_(rms_norm_twin(part.clone(), norm.weight, norm.eps))
    if rotation is not None:
        cos, sin = (tensor[:, None] for tensor in rotation)
        part = heads[:, :-kv_heads, : cos.shape[-1]]
        a, b = part.chunk(2, -1)
        part.copy_(part * cos + torch.cat((-b, a), -1) * sin)
    keys.write(slots, heads[:, q_heads:-kv_heads])
    values.write(slots, heads[:, -kv_heads:])
    return bool(torch.isfinite(heads[:, q_heads:]).all())


def check(library: Library) -> None:
    """Run every product and activation against its twin, at load. Raises NativeUnavailable if one differs.

    The input is another one each time: outputs are not initialised, so with the same input a kernel that writes
    nothing could pass on what an earlier check left in that memory.
    """
    generator = torch.Generator()
    generator.seed()
    x = torch.randn(13, 96, generator=generator)
    weight = torch.randn(70, 96, generator=generator)
    bias = torch.randn(70, generator=generator)
    pairs = []
    for kind in KINDS:
        quantized = quantize(weight, kind)
        packed = PackedWeight(quantized, bias)
        for rows in (1, 2, 13):
            pairs.append((linear(library, x[:rows], packed), linear_twin(x[:rows], quantized, bias), kind))
    norm_weight = bias[:1].expand(96).contiguous()
    pairs.append((rms_norm(library, x, norm_weight, 1e-5), rms_norm_twin(x, norm_weight, 1e-5), "rms_norm"))
    pairs.append((silu_mul(library, x), silu_mul_twin(x), "silu_mul"))
    for ours, theirs, name in pairs:
        if not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4):
            raise NativeUnavailable(
                f"the {name} kernel differs from torch's by {float((ours - theirs).abs().max()):.2g}"
            )
