"""Keys and values of all tokens in the cache: two tensors a layer, cut into blocks by index arithmetic alone.

Layout: `[num_slots, num_kv_heads, head_dim]`, slot = block id * block size + offset in the block. A token's row is
contiguous, so a write is a row copy; and neighbouring blocks are neighbouring memory, so a request whose blocks happen
to be consecutive is read as one view, without copying.

Shapes come from the first keys and values that a layer produces, never from a config: latent attention has wider keys
than values, some families repeat heads, some have other head sizes in other layers.

Tensors start as zeros and must stay finite wherever a request may read: attention multiplies masked values by a weight
of 0, and 0 * NaN is NaN. Slots behind a request's last token, and whatever pads a gather, hold leftovers of earlier
requests. So blocks into which a non-finite row was written are remembered, and zeroed when the next owner starts on
them. The last layer's keys and values tell: a NaN that arises anywhere below reaches them through the residual stream.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's cache row: `num_kv_heads` keys of `key_dim` and values of `value_dim`."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_elements(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """All layers' rows, in layer order, and their type: what must be known to size the cache."""

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype

    def block_bytes(self, block_size: int) -> int:
        return block_size * self.dtype.itemsize * sum(layer.num_elements for layer in self.layers)


class KVTensors:
    """The paged cache.

    With a `layout` all tensors are allocated at once; without, each layer's at its first write (to learn the layout).
    """

    def __init__(
        self, num_layers: int, num_blocks: int, block_size: int, device: torch.device, layout: KVLayout | None = None
    ) -> None:
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self._layers: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * num_layers
        self._polluted: set[int] = set()
        if layout is not None:
            for layer, shape in enumerate(layout.layers):
                self._layers[layer] = self._allocate(shape, layout.dtype)

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store key [1, Hkv, T, Dk] and value [1, Hkv, T, Dv] of the step's tokens in their slots [T]."""
        pair = self.ensure(layer, LayerShape(key.shape[1], key.shape[3], value.shape[3]), key.dtype)
        pair[0].index_copy_(0, slots, key[0].transpose(0, 1))
        pair[1].index_copy_(0, slots, value[0].transpose(0, 1))
        if layer == self.num_layers - 1:
            self._note_pollution(slots, key, value)

    def ensure(self, layer: int, shape: LayerShape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's tensors, allocated now if this is its first write. `written` must follow what is put there."""
        pair = self._layers[layer]
        if pair is None:
            pair = self._layers[layer] = self._allocate(shape, dtype)
        return pair

    def written(self, layer: int, slots: torch.Tensor, is_finite: bool) -> None:
        """Note that rows [T] of a layer were written in place, and whether all of them are finite."""
        if layer == self.num_layers - 1 and not is_finite:
            key, value = (tensor[slots].transpose(0, 1)[None] for tensor in self.layer(layer))
            self._note_pollution(slots, key, value)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys [num_slots, Hkv, Dk], values [num_slots, Hkv, Dv]) of a layer that was written before."""
        pair = self._layers[layer]
        assert pair is not None, f"layer {layer} was read before its first write"
        return pair

    def layout(self) -> KVLayout:
        """The shapes that a forward left behind. Every layer must have been written once."""
        layers = [self.layer(index) for index in range(self.num_layers)]
        shapes = tuple(LayerShape(keys.shape[1], keys.shape[2], values.shape[2]) for keys, values in layers)
        return KVLayout(shapes, layers[0][0].dtype)

    @property
    def has_polluted_blocks(self) -> bool:
        return bool(self._polluted)

    def scrub(self, fresh_blocks: list[int]) -> None:
        """Zero those of the blocks about to be written from their start that hold non-finite leftovers."""
        for block in self._polluted.intersection(fresh_blocks):
            for index in range(self.num_layers):
                for tensor in self.layer(index):
                    tensor[block * self.block_size : (block + 1) * self.block_size].zero_()
            self._polluted.discard(block)

    def check_invariants(self) -> None:
        """Every non-finite row lies in a block that is known to be polluted. Reads the whole cache: tests only."""
        for pair in self._layers:
            for tensor in pair or ():
                bad = torch.nonzero(~torch.isfinite(tensor).flatten(1).all(1)).flatten() // self.block_size
                assert set(bad.tolist()) <= self._polluted, "a non-finite row is unaccounted for"

    def _allocate(self, shape: LayerShape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        rows = (self.num_blocks * self.block_size, shape.num_kv_heads)
        return self._zeros((*rows, shape.key_dim), dtype), self._zeros((*rows, shape.value_dim), dtype)

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """On the CPU through calloc, whose pages are zero without being touched: torch.zeros takes seconds for a GB."""
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=self.device)
        raw = torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8))
        return raw.view(dtype).view(shape)

    def _note_pollution(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if bool(torch.isfinite(key.sum() + value.sum())):
            return
        finite = torch.isfinite(key).all(-1).all(1)[0] & torch.isfinite(value).all(-1).all(1)[0]  # [T]
        self._polluted.update((slots[~finite] // self.block_size).tolist())
