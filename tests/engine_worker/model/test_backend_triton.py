"""The Triton kernels against the reference, in Triton's interpreter: no GPU is needed, nor any used."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from transformers.masking_utils import causal_mask_function

from engine_worker.model.attention import AttentionCall
from engine_worker.model.backend_reference import ReferenceBackend
from engine_worker.model.kv_format import choose_format
from engine_worker.model.kv_tensors import KVTensors
from engine_worker.model.masks import MaskTag
from tests.engine_worker.model.interpreted import triton_backend
from tests.engine_worker.model.test_backends import Case, outputs

pytestmark = pytest.mark.engine

# First chunks, decodes and a chunk behind a past; 25 queries of 3 heads are more than one tile.
MIXED = ((9, 1), (1, 1), (3, 25))

CASES = {
    "plain": Case(MIXED),
    "no grouping of heads": Case(MIXED, num_kv_heads=4, group=1),
    "one key head for all": Case(MIXED, num_kv_heads=1, group=7),
    "more heads than a small tile has rows": Case(((9, 1), (3, 1)), num_kv_heads=1, group=20),
    "block of one token": Case(MIXED, block_size=1),
    "block of seven": Case(MIXED, block_size=7),
    "block larger than any request": Case(MIXED, block_size=64),
    "sliding window": Case(MIXED, mask="sliding"),
    "window of one": Case(MIXED, mask="sliding", width=1),
    "window larger than a tile of keys": Case(((72, 1), (5, 70)), num_kv_heads=1, group=1, mask="sliding", width=70),
    "chunked attention": Case(MIXED, mask="chunked", width=6),
    "holes in the mask": Case(MIXED, mask="holes"),
    "softcap": Case(MIXED, softcap=1.5, mask="sliding"),
    "sinks": Case(MIXED, sinks=True, mask="sliding"),
    "softcap and sinks": Case(MIXED, sinks=True, softcap=1.5),
    "narrow values": Case(MIXED, key_dim=24, value_dim=12),
    "wide values": Case(MIXED, key_dim=8, value_dim=40),
    "int8": Case(MIXED, kv_cache_dtype="int8"),
    "fp8, narrow values": Case(MIXED, kv_cache_dtype="fp8", key_dim=24, value_dim=12),
    "fp4, dims that no group fills": Case(MIXED, kv_cache_dtype="fp4", key_dim=40, value_dim=20),
    "int8 and fp4, sinks": Case(MIXED, kv_cache_dtype="k8v4", sinks=True, key_dim=16, value_dim=16),
    "wide heads": Case(((5, 1),), num_kv_heads=1, group=2, key_dim=300, value_dim=130),
}


def assert_equal(case: Case, tolerance: float = 2e-5, num_cores: int = 1) -> None:
    expected = outputs(case, ReferenceBackend())
    actual = outputs(case, triton_backend(num_cores=num_cores))
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == theirs.dtype == case.dtype
        torch.testing.assert_close(ours.float(), theirs.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_triton_equals_reference(case: Case) -> None:
    assert_equal(case)


@pytest.mark.parametrize("num_cores", [1, 20])
def test_splits_do_not_matter(num_cores: int) -> None:
    assert_equal(Case(((30, 1), (3, 1)), sinks=True, mask="sliding", width=20), num_cores=num_cores)
    backend = triton_backend(num_cores=num_cores)
    assert backend.num_splits(2, 2) == (1 if num_cores == 1 else 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_triton_equals_reference_in_narrow_types(dtype: torch.dtype) -> None:
    assert_equal(Case(MIXED, dtype=dtype, sinks=True), tolerance=3e-2)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_rows_are_stored_as_the_format_says(kv_cache_dtype: str) -> None:
    """Bit by bit, zeros, huge numbers, infinities and NaN included."""
    form = choose_format(kv_cache_dtype, torch.device("cpu"))
    key = torch.randn(1, 3, 6, 24, generator=torch.Generator().manual_seed(1)) * 3
    key[0, :, 1] = 0
    key[0, :, 2] *= 1e30
    key[0, 1, 3, 5] = torch.nan
    key[0, 2, 3, 7] = torch.inf
    value, slots = key[..., :20] * 0.1, torch.tensor([3, 0, 7, 1, 6, 2])
    ours, theirs = (KVTensors(1, 2, 4, torch.device("cpu"), format=form) for _ in range(2))
    call = AttentionCall(0, key, key, value, MaskTag(causal_mask_function), 1.0)
    triton_backend()._write(call, slots, ours)
    theirs.write(0, slots, key, value)
    for mine, other in zip(ours.rows(0), theirs.rows(0), strict=True):
        assert torch.equal(mine.data, other.data)
        assert mine.scales is not None
        assert other.scales is not None
        torch.testing.assert_close(mine.scales, other.scales, rtol=0, atol=0, equal_nan=True)


def test_leftovers_behind_a_request_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks come with NaN in every slot that the request has not written: none of it shows."""

    backend = triton_backend()
    case = Case(((5, 1), (9, 1)), num_kv_heads=1)
    clean = outputs(case, backend)
    monkeypatch.setattr(KVTensors, "_zeros", lambda self, shape, dtype: torch.full(shape, torch.nan, dtype=dtype))
    dirty = outputs(case, backend)
    for ours, theirs in zip(dirty, clean, strict=True):
        assert torch.equal(ours, theirs)


def test_unknown_masks_are_counted_not_hidden() -> None:
    backend = triton_backend()
    outputs(Case(((5, 1),), mask="sliding"), backend)
    assert backend.unknown_masks == 0
    outputs(Case(((5, 1),), mask="holes"), backend)
    assert backend.unknown_masks == 1


def test_a_wrong_mask_would_be_noticed() -> None:
    backend = triton_backend()

    class Naive(ReferenceBackend):
        def attend(self, call: AttentionCall, batch, kv):  # type: ignore[no-untyped-def]
            return backend.attend(replace(call, mask=MaskTag(causal_mask_function)), batch, kv)

    case = Case(((9, 1), (3, 14)), mask="sliding")
    pairs = itertools.zip_longest(outputs(case, Naive()), outputs(case, ReferenceBackend()))
    assert max(float((ours - theirs).abs().max()) for ours, theirs in pairs) > 0.1
