"""Keys and values of all tokens in the cache, for each layer, cut into blocks by index arithmetic alone.

Layout: `[num_slots, num_kv_heads, head_dim]`, or narrower with scales (kv_format.py says how); slot = block id * block
size + offset in the block. A token's row is contiguous, so a write is a row copy; and neighbouring blocks are
neighbouring memory, so a request whose blocks happen to be consecutive is read as one view, without copying.

Shapes come from the first keys and values that a layer produces, never from a config: latent attention has wider keys
than values, some families repeat heads, some have other head sizes in other layers.

Tensors start as zeros and must stay finite wherever a request may read: attention multiplies masked values by a weight
of 0, and 0 * NaN is NaN. Slots behind a request's last token, and whatever pads a gather, hold leftovers of earlier
requests. So blocks into which a non-finite row was written are remembered, and zeroed when the next owner starts on
them. The last layer's keys and values tell: a NaN that arises anywhere below reaches them through the residual stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine_worker.model.kv_format import DENSE, KVFormat, RowFormat, Rows
from engine_worker.model.memory import NotEnoughMemory
from engine_worker.model.transfer import to_device


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's cache row: `num_kv_heads` keys of `key_dim` and values of `value_dim`."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, key: torch.Tensor, value: torch.Tensor) -> LayerShape:
        """The shape of a layer that gives keys [1, H, T, Dk] and values [1, H, T, Dv]."""
        return cls(key.shape[1], key.shape[3], value.shape[3])


@dataclass(frozen=True, slots=True)
class KVLayout:
    """All layers' rows, in layer order, the model's type and the cache's format: what its size follows from."""

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    format: KVFormat = DENSE

    def block_bytes(self, block_size: int) -> int:
        """Bytes of a block over all layers: numbers, scales and padding."""
        keys, values = self.format.keys, self.format.values
        return block_size * sum(
            layer.num_kv_heads
            * (keys.row_bytes(layer.key_dim, self.dtype) + values.row_bytes(layer.value_dim, self.dtype))
            for layer in self.layers
        )


class KVTensors:
    """The paged cache.

    With a `layout` all tensors are allocated at once, in its format; without, each layer's at its first write, in
    `format` (to learn the layout). Raises NotEnoughMemory.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        layout: KVLayout | None = None,
        format: KVFormat = DENSE,
    ) -> None:
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self.format = format if layout is None else layout.format
        self._layers: list[tuple[Rows, Rows] | None] = [None] * num_layers
        self._dtype = torch.float32 if layout is None else layout.dtype
        self._polluted: set[int] = set()
        if layout is not None:
            for layer, shape in enumerate(layout.layers):
                self._layers[layer] = self._allocate(shape, layout.dtype)

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store key [1, Hkv, T, Dk] and value [1, Hkv, T, Dv] of the step's tokens in their slots [T]."""
        keys, values = self.ensure(layer, LayerShape.of(key, value), key.dtype)
        keys.write(slots, key[0].transpose(0, 1))
        values.write(slots, value[0].transpose(0, 1))
        if layer == self.num_layers - 1:
            self._note_pollution(slots, key, value)

    def ensure(self, layer: int, shape: LayerShape, dtype: torch.dtype) -> tuple[Rows, Rows]:
        """A layer's rows, allocated now if this is its first write. `written` must follow what is put there."""
        pair = self._layers[layer]
        if pair is None:
            self._dtype = dtype
            pair = self._layers[layer] = self._allocate(shape, dtype)
        return pair

    def written(self, layer: int, slots: torch.Tensor, is_finite: bool) -> None:
        """Note that rows [T] of a layer were written in place, and whether all of them are finite."""
        if layer == self.num_layers - 1 and not is_finite:
            key, value = (rows.read(slots, torch.float32).transpose(0, 1)[None] for rows in self.rows(layer))
            self._note_pollution(slots, key, value)

    def rows(self, layer: int) -> tuple[Rows, Rows]:
        """Keys and values of a layer that was written before, in whatever format."""
        pair = self._layers[layer]
        assert pair is not None, f"layer {layer} was read before its first write"
        return pair

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys [num_slots, Hkv, Dk], values [num_slots, Hkv, Dv]) of a layer of a dense cache."""
        keys, values = self.rows(layer)
        assert self.format.is_dense, f"a cache in {self.format.name} has no dense rows"
        return keys.data, values.data

    def layout(self) -> KVLayout:
        """The shapes that a forward left behind. Every layer must have been written once."""
        layers = [self.rows(index) for index in range(self.num_layers)]
        shapes = tuple(LayerShape(keys.data.shape[1], keys.dim, values.dim) for keys, values in layers)
        return KVLayout(shapes, self._dtype, self.format)

    @property
    def has_polluted_blocks(self) -> bool:
        return bool(self._polluted)

    def scrub(self, fresh_blocks: list[int]) -> None:
        """Zero those of the blocks about to be written from their start that hold non-finite leftovers."""
        for block in self._polluted.intersection(fresh_blocks):
            for index in range(self.num_layers):
                for rows in self.rows(index):
                    for tensor in rows.tensors():
                        tensor[block * self.block_size : (block + 1) * self.block_size].zero_()
            self._polluted.discard(block)

    def copy_rows(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """For each (source block, target block, n): the target's first n rows become the source's, in all layers.

        Rows carry their scales, so a copy is to the bit what computing them again would store. No target is a source.
        The target was clean; rows that are not finite make it suspect. Two calls a tensor, however many copies.
        """
        size = self.block_size
        if len(copies) == 1:  # views are twice as fast as an index
            ((source, target, num_rows),) = copies
            to: slice | torch.Tensor = slice(target * size, target * size + num_rows)
            of: slice | torch.Tensor = slice(source * size, source * size + num_rows)
        else:
            to = to_device([t * size + row for _, t, n in copies for row in range(n)], self.device)
            of = to_device([s * size + row for s, _, n in copies for row in range(n)], self.device)
        for index in range(self.num_layers):
            for rows in self.rows(index):
                for tensor in rows.tensors():
                    tensor[to] = tensor[of]
        self._polluted.update(target for source, target, _ in copies if source in self._polluted)

    def wipe(self, slots: list[int]) -> None:
        """Zero what is in these slots. Blocks that were polluted by it stay suspect."""
        for index in range(self.num_layers):
            for rows in self.rows(index):
                for tensor in rows.tensors():
                    tensor[slots] = 0

    def check_invariants(self) -> None:
        """Every non-finite row lies in a block that is known to be polluted. Reads the whole cache: tests only."""
        for pair in self._layers:
            for rows in pair or ():
                bad = torch.nonzero(~rows.is_finite()).flatten() // self.block_size
                assert set(bad.tolist()) <= self._polluted, "a non-finite row is unaccounted for"

    def _allocate(self, shape: LayerShape, dtype: torch.dtype) -> tuple[Rows, Rows]:
        keys, values = self.format.keys, self.format.values
        try:
            return (
                self._rows(keys, shape.num_kv_heads, shape.key_dim, dtype),
                self._rows(values, shape.num_kv_heads, shape.value_dim, dtype),
            )
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise NotEnoughMemory(
                f"{self.num_blocks} KV blocks can't be had: memory on {self.device} ran out while they were allocated. "
                "Set a smaller --kv-cache-memory or --memory-fraction."
            ) from error

    def _rows(self, form: RowFormat, num_heads: int, dim: int, dtype: torch.dtype) -> Rows:
        where = (self.num_blocks * self.block_size, num_heads)
        data = self._zeros((*where, form.width(dim)), form.data_dtype(dtype))
        if form.is_dense:
            return Rows(form, dim, data, None)
        return Rows(form, dim, data, self._zeros((*where, form.num_scales(dim)), form.scale_dtype))

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
