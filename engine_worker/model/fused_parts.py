"""Recognising a decoder layer by its parts, and joining those that the kernels compute together.

Nothing here decides that a layer may be fused: fuse.py tries it. This only says which numbers would play which part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor, nn

from engine_worker.model.native.kernels import HeadNorm, PackedWeight
from engine_worker.model.native_linear import NativeLinear, join

_LAYER_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_NORM_EPS = ("variance_epsilon", "eps", "epsilon")


@dataclass(frozen=True, slots=True)
class LayerParts:
    """A pre-norm layer: h += out(attention(qkv(norm(h)))); h += down(silu(gate(norm(h))) * up(norm(h)))."""

    layer: int
    input_norm: HeadNorm
    post_norm: HeadNorm
    qkv: PackedWeight
    out: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    q_norm: HeadNorm | None
    k_norm: HeadNorm | None
    rotates: bool = True

    def variants(self) -> Iterator[LayerParts]:
        """What the parts leave open: whether this layer rotates its heads."""
        yield self
        yield replace(self, rotates=False)


def find_parts(layer: nn.Module) -> LayerParts | None:
    """The layer's parts if it looks like a pre-norm layer over packed linears, None otherwise."""
    children = {name: child for name, child in layer.named_children() if _has_parameters(child)}
    if children.keys() != _LAYER_PARTS:
        return None
    norms = [find_norm(children[name]) for name in ("input_layernorm", "post_attention_layernorm")]
    attention, mlp = children["self_attn"], children["mlp"]
    qkv = _linears(attention, ("q_proj", "k_proj", "v_proj"), "qkv_proj")
    gate_up = _linears(mlp, ("gate_proj", "up_proj"), "gate_up_proj")
    out, down = getattr(attention, "o_proj", None), getattr(mlp, "down_proj", None)
    head_dim, layer_index = getattr(attention, "head_dim", None), getattr(attention, "layer_idx", None)
    if not (
        norms[0] is not None
        and norms[1] is not None
        and qkv is not None
        and gate_up is not None
        and isinstance(out, NativeLinear)
        and isinstance(down, NativeLinear)
        and isinstance(head_dim, int)
        and isinstance(layer_index, int)
    ):
        return None
    names = {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm"}
    if not {name for name, child in attention.named_children() if _has_parameters(child)} <= names:
        return None
    if any(True for _ in attention.parameters(recurse=False)):
        return None
    hidden = out.out_features
    widths = [qkv.shape[1], gate_up.shape[1], down.out_features, *(norm.weight.shape[0] for norm in norms if norm)]
    if any(width != hidden for width in widths) or out.in_features % head_dim:
        return None
    num_heads = out.in_features // head_dim
    num_kv_heads = (qkv.shape[0] // head_dim - num_heads) // 2
    if (num_heads + 2 * num_kv_heads) * head_dim != qkv.shape[0] or num_kv_heads < 1 or num_heads % num_kv_heads:
        return None
    if gate_up.shape[0] != 2 * down.in_features:
        return None
    head_norms = []
    for name in ("q_norm", "k_norm"):
        part = getattr(attention, name, None)
        norm = find_norm(part) if part is not None else None
        if part is not None and (norm is None or norm.weight.shape != (head_dim,)):
            return None
        head_norms.append(norm)
    return LayerParts(
        layer=layer_index,
        input_norm=norms[0],
        post_norm=norms[1],
        qkv=qkv,
        out=out.packed,
        gate_up=gate_up,
        down=down.packed,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scaling=float(getattr(attention, "scaling", head_dim**-0.5)),
        q_norm=head_norms[0],
        k_norm=head_norms[1],
    )


def find_norm(part: nn.Module) -> HeadNorm | None:
    """Weight and epsilon of what may be an RMS norm."""
    weight = getattr(part, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or len(list(part.parameters())) != 1:
        return None
    for name in _NORM_EPS:
        eps = getattr(part, name, None)
        if isinstance(eps, float):
            return HeadNorm(weight.detach().float().contiguous(), eps)
    return None


def _linears(owner: nn.Module, names: tuple[str, ...], joint_name: str) -> PackedWeight | None:
    joint = getattr(owner, joint_name, None)
    if isinstance(joint, NativeLinear):
        return joint.packed
    parts = [getattr(owner, name, None) for name in names]
    if not all(isinstance(part, NativeLinear) for part in parts):
        return None
    return join([part.packed for part in parts])  # type: ignore[union-attr]


def _has_parameters(part: nn.Module) -> bool:
    """Whether a child computes with weights: activations, dropouts and rotary tables don't."""
    return any(isinstance(child, NativeLinear) for child in part.modules()) or any(True for _ in part.parameters())
