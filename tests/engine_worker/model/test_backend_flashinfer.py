"""The FlashInfer backend against the reference, with a stand-in for the package: what it is told, and when."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from engine_worker.core.types import BlockId, Request, SamplingParams, Segment
from engine_worker.model import backend_flashinfer, backends
from engine_worker.model.attention import AttentionCall
from engine_worker.model.backend_flashinfer import FlashInferBackend, pages_of
from engine_worker.model.backend_reference import ReferenceBackend
from engine_worker.model.backends import make_backend
from engine_worker.model.errors import ModelError
from engine_worker.model.kv_format import INT8
from engine_worker.model.kv_tensors import KVTensors
from engine_worker.model.masks import MaskTag
from engine_worker.model.packing import BlockTables, PackedBatch, pack
from tests.engine_worker.model.fake_flashinfer import FakeFlashInfer
from tests.engine_worker.model.test_backends import Case, outputs

pytestmark = pytest.mark.engine

CPU = torch.device("cpu")
MIXED = ((9, 1), (1, 1), (3, 25))
BASE = Case(MIXED, key_dim=64, value_dim=64, dtype=torch.bfloat16)

CASES = {
    "plain": BASE,
    "decodes alone": replace(BASE, chunks=((9, 1, 1), (1, 1, 1))),
    "float16, no grouping": replace(BASE, dtype=torch.float16, num_kv_heads=4, group=1),
    "blocks of one token": replace(BASE, block_size=1),
    "blocks of seven": replace(BASE, block_size=7),
    "a block larger than any request": replace(BASE, block_size=64),
    "sliding window": replace(BASE, mask="sliding"),
    "window of one": replace(BASE, mask="sliding", width=1),
    "soft cap": replace(BASE, softcap=1.5),
    "wide heads": replace(BASE, key_dim=128, value_dim=128, num_kv_heads=1),
}


@pytest.fixture(autouse=True)
def small_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_flashinfer, "_WORKSPACE_BYTES", 1024)


def backend_of(library: FakeFlashInfer | None = None) -> FlashInferBackend:
    return FlashInferBackend(512, CPU, library or FakeFlashInfer())


def packed(*chunks: tuple[int, int, list[int]], block_size: int = 4) -> PackedBatch:
    """A step of requests given as (position it starts at, tokens, blocks)."""
    segments = []
    for index, (start, count, blocks) in enumerate(chunks):
        ids = (1,) * (start + count)
        request = Request(request_id=str(index), prompt_ids=ids, params=SamplingParams(max_tokens=1), arrival_s=0.0)
        segments.append(Segment(request, start, ids[start:], [BlockId(block) for block in blocks], sample=True))
    return pack(segments, BlockTables(len(chunks), 2, block_size), CPU)


def call_of(batch: PackedBatch, layer: int = 0, **changes: Any) -> AttentionCall:
    query, key = torch.ones(1, 6, batch.num_tokens, 64), torch.ones(1, 2, batch.num_tokens, 64)
    query, key = query.bfloat16(), key.bfloat16()
    return replace(AttentionCall(layer, query, key, key, MaskTag(causal_mask_function), 0.125), **changes)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_it_equals_the_reference(case: Case) -> None:
    for ours, theirs in zip(outputs(case, backend_of()), outputs(case, ReferenceBackend()), strict=True):
        assert ours.dtype == theirs.dtype == case.dtype
        torch.testing.assert_close(ours.float(), theirs.float(), atol=2e-2, rtol=2e-2)


def test_the_arrays_of_a_step() -> None:
    """Two decodes, the shorter first, then a chunk behind a past."""
    batch = packed((5, 6, [7, 2, 9]), (8, 1, [4, 1, 3]), (0, 1, [5]))
    decodes, prefills = pages_of(batch, CPU)
    assert decodes is not None
    assert prefills is not None
    found = [
        [tensor.tolist() for tensor in (pages.qo_indptr, pages.indptr, pages.indices, pages.last_page_len)]
        for pages in (decodes, prefills)
    ]
    assert found == [
        [[0, 1, 2], [0, 1, 4], [5, 4, 1, 3], [1, 1]],
        [[0, 6], [0, 3], [7, 2, 9], [3]],
    ]
    assert pages_of(packed((0, 8, [3, 1])), CPU)[0] is None
    full = pages_of(packed((7, 1, [3, 1])), CPU)
    assert full[1] is None
    assert full[0] is not None
    assert full[0].last_page_len.tolist() == [4]


def test_a_step_plans_once_for_each_kind_of_layer() -> None:
    library = FakeFlashInfer()
    backend, kv = backend_of(library), KVTensors(6, 12, 4, CPU)
    window = MaskTag(sliding_window_causal_mask_function(3))
    for _ in range(4):
        batch = packed((5, 6, [7, 2, 9]), (8, 1, [4, 1, 3]))
        for layer in range(6):
            backend.attend(call_of(batch, layer, **({"mask": window} if layer % 3 == 0 else {})), batch, kv)
    # Two phases, two kinds, two steps in turn: each wrapper plans every other step and runs for the layers of its kind.
    assert [wrapper.num_plans for wrapper in library.made] == [2] * 8
    assert sorted(wrapper.num_runs for wrapper in library.made) == [4] * 4 + [8] * 4
    assert {wrapper.window_left for wrapper in library.made} == {2, -1}
    assert {wrapper.use_tensor_cores for wrapper in library.made if "Decode" in type(wrapper).__name__} == {True}


def test_kinds_carry_scale_and_soft_cap() -> None:
    backend, batch = backend_of(), packed((0, 3, [1]))
    kind = backend.kind_of(call_of(batch, scaling=0.3, softcap=20.0), batch)
    assert (kind.scaling, kind.softcap, kind.window_left) == (0.3, 20.0, -1)
    assert (kind.num_heads, kind.num_kv_heads, kind.head_dim) == (6, 2, 64)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (replace(BASE, dtype=torch.float32), "--dtype bfloat16"),
        (replace(BASE, value_dim=128), "its values 128"),
        (replace(BASE, key_dim=80, value_dim=80), "this model's have 80"),
        (replace(BASE, sinks=True), "sinks"),
        (replace(BASE, mask="chunked"), "masks beyond causal"),
        (replace(BASE, mask="holes"), "masks beyond causal"),
        (replace(BASE, kv_cache_dtype="int8"), "KV cache in int8"),
    ],
)
def test_what_it_cannot_do_is_refused(case: Case, reason: str) -> None:
    with pytest.raises(ModelError, match=reason) as caught:
        outputs(case, backend_of())
    assert "--attention-backend triton" in str(caught.value)


def test_it_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    with pytest.raises(ModelError, match="can't run on cpu"):
        make_backend("flashinfer", CPU)
    with pytest.raises(ModelError, match="--kv-cache-dtype auto"):
        make_backend("flashinfer", cuda, kv_format=INT8)

    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(backends.importlib, "import_module", absent)
    with pytest.raises(ModelError, match=r"No module named 'flashinfer'.*pip install 'warmgate\[flashinfer\]'"):
        make_backend("flashinfer", cuda)
    monkeypatch.setattr(importlib, "import_module", lambda name: FakeFlashInfer())
    assert make_backend("flashinfer", cuda).name == "flashinfer"
