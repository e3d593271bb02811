"""Weight-only quantization: which kinds a device has, and linear layers that hold narrow weights where no kernel does.

- int8: 8 bits, one scale an output row. int4: 4 bits, a scale and a minimum for 32 neighbours of a row, see
  native/int4.py. Both on CPU and CUDA.
- fp8: e4m3 with a scale a row, multiplied by the tensor cores with a scale a token for activations. CUDA from compute
  capability 8.9 on.

On a CPU the kernels of native/ multiply narrow weights by float32 activations; native_linear.py has their timings
beside those of dense weights. torch's int8 product of weights and quantized activations was left out, whatever
its speed: with one scale a tensor for activations (torch.ao's quantize_dynamic) the demo model's perplexity on the
text of engine_worker/evaluate.py rises from 21 to 55.

Without kernels, and on CUDA, `QuantizedLinear` widens a weight at each use and multiplies with torch. That saves the
memory, and on CUDA with many rows costs little; at few rows it costs the widening.

How int4 rounds was chosen on the demo model with each linear's columns in another order. In the file's own order any
asymmetric rounding looks perfect, for the weights lie on just such a grid, that of their GGUF file; a model that was
never quantized is like the former. Over 511 tokens of the evaluation text, for two orders, the head left dense:

                                   error of weights    KL from dense    greedy tokens agree    perplexity
    symmetric, searched scales                8.4 %      0.22   0.24         73 %   73 %     +17 %   +15 %
    least to largest                          8.0 %      0.24                74 %            +26 %
    searched pairs (here)                     7.3 %      0.16   0.18         76 %   76 %     +14 %   +17 %

Perplexity is too noisy there (about 3 %) to tell the first from the last; the divergence tells them apart. Sixteen
ranges instead of four, with five symmetric scales, gain another 2 % of the error for three times the time. Errors
weighed by the gain of the norm before a layer, squared, brought nothing (0.167 where the same ranges had 0.161). Errors
weighed by what really comes into the layer (importance.py) do: perplexity +4.1 % instead of +19.2 %, over 955 tokens of
the demo model with its channels in another order.

Embeddings follow the LM head where the two are tied, and stay dense otherwise: looking up rows costs no bandwidth.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_worker.model.errors import ModelError
from engine_worker.model.importance import importance_of
from engine_worker.model.native.kernels import quantize

KINDS = ("int8", "int4", "fp8")
_FP8_LARGEST = 448.0
_FP8_CAPABILITY = (8, 9)


def check_quantization(kind: str, device: torch.device) -> None:
    """Raise ModelError for a kind that doesn't exist or that the device can't do. "" is none and always fine."""
    if kind in ("", "none"):
        return
    if kind not in KINDS:
        raise ModelError(f"There is no quantization {kind!r}. Use {', '.join(KINDS)}, or leave it out.")
    if kind == "fp8":
        if device.type != "cuda":
            raise ModelError(f"Quantization fp8 needs a CUDA device, and this is {device}. Use int8 or int4.")
        if not has_fp8_units(device):
            raise ModelError("This CUDA device has no fp8 units (compute capability 8.9). Use int8 or int4.")


def has_fp8_units(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY


class QuantizedLinear(nn.Module):
    """nn.Linear over a narrow weight, in plain torch: any device, any activation type."""

    def __init__(self, linear: nn.Linear, kind: str) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        self.kind = kind
        self.weight = torch.empty(linear.weight.shape, device="meta", dtype=linear.weight.dtype)
        self.bias = linear.bias
        quantized = quantize(linear.weight, kind, importance=importance_of(linear))
        values = quantized.values
        if kind == "int4":
            values = values[:, 0::2] | values[:, 1::2] << 4  # [N, K / 2]
        self.register_buffer("values", values, persistent=False)
        self.register_buffer("scales", quantized.scales, persistent=False)
        self.register_buffer("minima", quantized.minima, persistent=False)

    def dequantize(self) -> Tensor:
        """[N, K] in float32."""
        return self.rows(slice(None))

    def rows(self, index: Tensor | slice) -> Tensor:
        """Chosen rows [..., K] in float32."""
        values, scales = self.values[index], self.scales[index].float()[..., None]
        if self.kind == "int8":
            return values.float() * scales[..., 0]
        values = torch.stack((values & 15, values >> 4), dim=-1).flatten(-2).float()
        groups = values.unflatten(-1, (scales.shape[-2], -1))
        return (groups * scales + self.minima[index].float()[..., None]).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dequantize().to(x.dtype), self.bias)


class FP8Linear(nn.Module):
    """nn.Linear with e4m3 weights, a scale a row, and activations quantized with a scale a token. CUDA only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        self.weight = torch.empty(linear.weight.shape, device="meta", dtype=linear.weight.dtype)
        self.bias = linear.bias
        values, scales = to_fp8(linear.weight)
        self.register_buffer("values", values, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features)
        values, scales = to_fp8(flat)
        out = scaled_product(values, scales, self.values, self.scales, self.bias, x.dtype)
        return out.view(*x.shape[:-1], self.out_features)


def scaled_product(
    x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """e4m3 x [M, K] with scales [M, 1] by e4m3 weight [N, K] with scales [N, 1], plus bias [N]: [M, N] in `dtype`."""
    if x.device.type == "cuda":
        # With a scale a row, the tensor cores' products come out in bfloat16 only.
        out = torch._scaled_mm(x, weight.t(), scale_a=x_scales, scale_b=weight_scales.t(), out_dtype=torch.bfloat16).to(
            dtype
        )
        return out if bias is None else out + bias
    return scaled_product_twin(x, x_scales, weight, weight_scales, bias, dtype)


def scaled_product_twin(
    x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """What the tensor cores compute, in float32: on a CPU this stands in for them, so that tests reach the layer."""
    out = x.float() @ weight.float().t() * x_scales * weight_scales.t()
    return (out if bias is None else out + bias.float()).to(dtype)


def to_fp8(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [M, K] -> e4m3 values [M, K] and scales [M, 1], tensor = values * scales up to rounding."""
    scales = tensor.detach().float().abs().amax(1, keepdim=True).clamp(min=1e-12) / _FP8_LARGEST
    return (tensor.float() / scales).to(torch.float8_e4m3fn), scales


class _TiedEmbedding(nn.Module):
    """An embedding whose rows are those of the quantized LM head that it shares its weight with."""

    def __init__(self, embedding: nn.Embedding, head: QuantizedLinear) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.weight = head.weight
        self._head = (head,)  # in a tuple, so that it is not registered a second time

    def forward(self, ids: Tensor) -> Tensor:
        return self._head[0].rows(ids).to(self.weight.dtype)


def quantize_linears(module: nn.Module, kind: str) -> int:
    """Swap every nn.Linear of the module, in place, for a quantized one. Returns how many there were.

    Layers whose width the kind can't hold (int4: a multiple of 32; fp8: multiples of 16) stay dense.
    """
    places: dict[nn.Linear, list[tuple[nn.Module, str]]] = {}
    embeddings: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent in module.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear and _fits(child, kind):
                places.setdefault(child, []).append((parent, name))
            elif type(child) is nn.Embedding:
                embeddings.setdefault(child.weight.data_ptr(), []).append((parent, name))
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    count = len(places)
    while places:
        linear, spots = places.popitem()
        tied = embeddings.get(linear.weight.data_ptr(), [])
        if kind == "fp8":
            if tied:
                continue
            swapped: nn.Module = FP8Linear(linear)
        else:
            swapped = QuantizedLinear(linear, "int8" if linear is head and kind == "int4" else kind)
            for parent, name in tied:
                setattr(parent, name, _TiedEmbedding(getattr(parent, name), swapped))
        for parent, name in spots:
            setattr(parent, name, swapped.eval())
    return count


def _fits(linear: nn.Linear, kind: str) -> bool:
    rows, cols = linear.weight.shape
    if kind == "fp8":
        return rows % 16 == 0 and cols % 16 == 0
    return kind == "int8" or cols % 32 == 0
