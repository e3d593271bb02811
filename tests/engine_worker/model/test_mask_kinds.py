"""Which mask a function is, found by asking it."""

from __future__ import annotations

import pytest
import torch
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from engine_worker.model import mask_kinds
from engine_worker.model.mask_kinds import CHUNKED, FULL, SLIDING, MaskClassifier, MaskKind
from engine_worker.model.masks import MaskTag

pytestmark = pytest.mark.engine

CPU = torch.device("cpu")
MAX_LEN = 200


def kind_of(function: object, max_len: int = MAX_LEN) -> MaskKind | None:
    return MaskClassifier(max_len).classify(MaskTag(function), CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [1, 2, 7, 128, MAX_LEN - 1])
def test_widths_are_read_off_the_function(width: int) -> None:
    assert kind_of(sliding_window_causal_mask_function(width)) == MaskKind(SLIDING, width)
    chunked = chunked_causal_mask_function(width, torch.zeros(1, dtype=torch.int64))
    same = MaskKind(SLIDING, 1) if width == 1 else MaskKind(CHUNKED, width)
    found = kind_of(chunked)
    assert found is not None
    queries, keys = torch.arange(MAX_LEN)[:, None], torch.arange(MAX_LEN)[None, :]
    assert torch.equal(found.allow(queries, keys), same.allow(queries, keys))


def test_a_window_that_nothing_reaches_is_none() -> None:
    assert kind_of(sliding_window_causal_mask_function(MAX_LEN)) == MaskKind(FULL)
    assert kind_of(causal_mask_function) == MaskKind(FULL)
    assert kind_of(and_masks(causal_mask_function)) == MaskKind(FULL)


def test_other_masks_are_unknown() -> None:
    def holes(batch: int, head: int, q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        return (kv_pos <= q_pos) & (kv_pos % 3 != 1)

    def first_too(batch: int, head: int, q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        return kv_pos < 1

    assert kind_of(holes) is None
    # A window beside which the first key stays visible looks causal to the first probe.
    assert kind_of(or_masks(sliding_window_causal_mask_function(8), first_too)) is None


def test_unknown_masks_are_named_once_however_often_made() -> None:
    def holes(batch: int, head: int, q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        return kv_pos % 3 != 1

    classifier = MaskClassifier(MAX_LEN)
    for width in (8, 8, 9):
        mask = and_masks(sliding_window_causal_mask_function(width), holes)
        assert classifier.classify(MaskTag(mask), CPU) is None
    own = "test_unknown_masks_are_named_once_however_often_made"
    assert classifier.num_unknown == 2
    assert classifier.unknown_names == (f"and_masks(and_masks(sliding_window_overlay, causal_mask_function), {own})",)
    assert MaskClassifier(MAX_LEN).unknown_names == ()


def test_functions_made_anew_are_known_again(monkeypatch: pytest.MonkeyPatch) -> None:
    classifier, asked = MaskClassifier(MAX_LEN), []
    recognise = mask_kinds._recognise
    monkeypatch.setattr(mask_kinds, "_recognise", lambda *args: asked.append(1) or recognise(*args))
    for width in (4, 5, 4, 5, 4):
        tag = MaskTag(sliding_window_causal_mask_function(width))
        assert classifier.classify(tag, CPU) == MaskKind(SLIDING, width)
    assert len(asked) == 2


def test_what_closes_over_data_is_unknown() -> None:
    """A function over a tensor of many elements may mean something else next time."""
    data = torch.zeros(5)

    def by_data(batch: int, head: int, q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        return (kv_pos <= q_pos) & (data.sum() == 0)

    classifier = MaskClassifier(MAX_LEN)
    assert classifier.classify(MaskTag(by_data), CPU) is None
    assert classifier.num_unknown == 1
