"""Which of the masks that a kernel has built in a model's mask function is.

A kernel can't call a Python function for each pair of positions. Nearly all layers of nearly all families use one of
three masks, though: causal, causal within a sliding window, causal within a chunk. Which one, and how wide, is read off
the function itself, by evaluating it: the first query that can't see key 0 tells the width, and then the candidate must
agree with the function on all keys, for queries at every edge there could be and at random places. Nothing is read
from a config, so a family that names or places its window differently is served all the same.

Functions are made anew in every forward (closures over the same numbers). So what was found is remembered by what a
closure consists of: its code and the values it closes over. One-element tensors among those are taken for constants:
with the attention mask of ones that we always pass, the only one there is (left padding, in chunked masks) is zero.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch

from engine_worker.model.masks import MaskTag

FULL, SLIDING, CHUNKED = 0, 1, 2
_NUM_RANDOM_QUERIES = 48
_PIECE = 1 << 22  # pairs of positions that are evaluated at once


@dataclass(frozen=True, slots=True)
class MaskKind:
    """FULL; SLIDING: the last `width` keys, the query's own included; CHUNKED: those of the same `width` positions."""

    kind: int
    width: int = 0

    def allow(self, q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        causal = kv_pos <= q_pos
        if self.kind == SLIDING:
            return causal & (kv_pos > q_pos - self.width)
        if self.kind == CHUNKED:
            return causal & (kv_pos // self.width == q_pos // self.width)
        return causal


class MaskClassifier:
    """Remembers what each mask function is. `max_len` bounds the positions that ever occur."""

    def __init__(self, max_len: int) -> None:
        self.max_len = max_len
        self._known: dict[Hashable, MaskKind | None] = {}
        self._unknown_names: set[str] = set()

    @property
    def num_unknown(self) -> int:
        """How many different mask functions were found to be of no known kind."""
        return sum(kind is None for kind in self._known.values())

    @property
    def unknown_names(self) -> tuple[str, ...]:
        """Those functions, as their code calls them."""
        return tuple(sorted(self._unknown_names))

    def kind_in_step(self, tag: MaskTag, device: torch.device, memo: dict[object, object]) -> MaskKind | None:
        """As `classify`, asked once a step for all layers; `memo` lives as long as the step's batch."""
        key = (MaskKind, tag.mask_function)
        if key not in memo:
            memo[key] = self.classify(tag, device)
        kind = memo[key]
        assert kind is None or isinstance(kind, MaskKind)
        return kind

    def classify(self, tag: MaskTag, device: torch.device) -> MaskKind | None:
        """The tag's kind; None where it is none of the known ones. `device` is where the function's tensors live."""
        if tag.is_causal:
            return MaskKind(FULL)
        key = _fingerprint(tag.mask_function)
        if key is not None and key not in self._known:
            self._known[key] = _recognise(tag, self.max_len, device)
        kind = self._known.setdefault(key, None)
        if kind is None:
            self._unknown_names.add(_name(tag.mask_function))
        return kind


def _recognise(tag: MaskTag, max_len: int, device: torch.device) -> MaskKind | None:
    positions = torch.arange(max_len, device=device)
    sees_first = tag.allow(positions[:, None], positions[None, :1])[:, 0]
    width = max_len if bool(sees_first.all()) else int(sees_first.to(torch.int8).argmin())
    candidates = [MaskKind(FULL)] if width == max_len else [MaskKind(SLIDING, width), MaskKind(CHUNKED, width)]
    if width == 0:
        return None
    edges = {at + shift for at in (0, width, 2 * width, 3 * width, max_len // 2, max_len - 1) for shift in (-1, 0, 1)}
    rng = random.Random(0)
    edges |= {rng.randrange(max_len) for _ in range(_NUM_RANDOM_QUERIES)}
    queries = torch.tensor(sorted(at for at in edges if 0 <= at < max_len), device=device)
    for kind in candidates:
        pieces = queries.split(max(1, _PIECE // max_len))
        if all(_agree(tag, kind, piece[:, None], positions[None, :]) for piece in pieces):
            return kind
    return None


def _agree(tag: MaskTag, kind: MaskKind, q_pos: torch.Tensor, kv_pos: torch.Tensor) -> bool:
    # Keys behind the query don't matter: a decoder's kernels never show them, whatever the function says.
    causal = kv_pos <= q_pos
    return torch.equal(tag.allow(q_pos, kv_pos) & causal, kind.allow(q_pos, kv_pos))


def _name(function: Any) -> str:
    """The function's name, or that of the one which made it, with those of the functions that it combines."""
    if not isinstance(function, FunctionType):
        return type(function).__name__
    inner: list[Any] = []
    for cell in function.__closure__ or ():
        value = cell.cell_contents
        inner += value if isinstance(value, tuple | list) else [value]
    names = [_name(value) for value in inner if isinstance(value, FunctionType)]
    return function.__qualname__.split(".<locals>")[0] + (f"({', '.join(names)})" if names else "")


def _fingerprint(value: Any) -> Hashable | None:
    """What a function or a value that it closes over consists of; None where that can't be told."""
    if isinstance(value, FunctionType):
        parts = [_fingerprint(cell.cell_contents) for cell in value.__closure__ or ()]
        parts += [_fingerprint(default) for default in value.__defaults__ or ()]
        return None if None in parts else (value.__code__, *parts)
    if isinstance(value, tuple | list):
        parts = [_fingerprint(item) for item in value]
        return None if None in parts else ("items", *parts)
    if isinstance(value, torch.Tensor):
        return ("scalar", value.dtype) if value.numel() == 1 else None
    if value is None or isinstance(value, int | float | str | bool | CodeType | torch.dtype):
        return (type(value), value)
    return ("object", value) if isinstance(value, Callable) and hasattr(value, "__hash__") else None  # type: ignore[arg-type]
