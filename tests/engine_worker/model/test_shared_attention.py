"""Decoding requests behind one prefix: the kernels attend to its blocks once, for all, and nobody's answer changes.

The reference backend, which knows nothing of sharing, is the twin. Which requests share what is compared with the best
of all cuts into groups, found by trying every one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from engine_worker.core.types import BlockId, Request, SamplingParams, Segment
from engine_worker.model.attention import AttentionCall
from engine_worker.model.backend_native import NativeBackend
from engine_worker.model.backend_reference import ReferenceBackend
from engine_worker.model.kv_format import choose_format
from engine_worker.model.kv_tensors import KVTensors, LayerShape
from engine_worker.model.masks import MaskTag
from engine_worker.model.native.library import Library
from engine_worker.model.packing import BlockTables, PackedBatch, pack
from tests.engine_worker.model.native import AUTO, INSTRUCTION_SETS, can_be_had, library_for
from tests.engine_worker.model.serving import TinyEngine, transformers_greedy
from tests.engine_worker.model.test_greedy_equality import assert_equal, model, native_model
from tests.engine_worker.model.tiny_models import VOCAB

pytestmark = pytest.mark.engine

CPU = torch.device("cpu")
PAYS_FROM, KEEP = 3.5, 25  # attention_shared.h's


@pytest.fixture(params=INSTRUCTION_SETS)
def library(request: pytest.FixtureRequest) -> Library:
    torch.set_num_threads(1)
    return library_for(request.param)


@dataclass(frozen=True)
class Case:
    """Requests as (common blocks, of which prefix, tokens in the cache, tokens in this step)."""

    requests: tuple[tuple[int, int, int, int], ...]
    block_size: int = 16
    num_kv_heads: int = 2
    group: int = 3
    key_dim: int = 64
    value_dim: int = 64
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    kv_cache_dtype: str = "auto"


# Two prefixes of 10 and 20 blocks, members of other lengths, somebody alone, and two who prefill behind a prefix.
SHARED = tuple((10, 0, 161 + 7 * i, 1) for i in range(7)) + tuple((20, 1, 320 + i, 1) for i in range(6))
MIXED = (*SHARED, (0, 2, 77, 1), (10, 0, 170, 9), (20, 1, 330, 40))

CASES = {
    "plain": Case(MIXED),
    "no grouping of heads": Case(MIXED, num_kv_heads=3, group=1),
    "many query heads a key head": Case(MIXED, group=11, key_dim=16, value_dim=48),
    "odd dims": Case(MIXED, key_dim=40, value_dim=72),
    "small blocks": Case(tuple((30, 0, 150 + i, 1) for i in range(9)), block_size=5),
    "more than a group may have": Case(tuple((10, 0, 161 + i % 9, 1) for i in range(70))),
    "softcap": Case(MIXED, softcap=1.5),
    "sinks": Case(MIXED, sinks=True),
    "a window that all have left": Case(MIXED, window=50),
    "a window that some have left": Case(MIXED, window=190),
    "int8": Case(MIXED, kv_cache_dtype="int8"),
    "fp4": Case(MIXED, kv_cache_dtype="fp4", sinks=True),
    "int8 keys and fp4 values": Case(MIXED, kv_cache_dtype="k8v4", softcap=2.0),
}


def lay_out(case: Case) -> PackedBatch:
    """A step whose block tables begin alike where the case says so."""
    shuffled = random.Random(3)
    ids = list(range(2000))
    shuffled.shuffle(ids)
    common = {prefix: [ids.pop() for _ in range(40)] for prefix in range(3)}
    segments = []
    for index, (shared, prefix, start, count) in enumerate(case.requests):
        num_blocks = -(-(start + count) // case.block_size)
        blocks = common[prefix][:shared] + [ids.pop() for _ in range(num_blocks - shared)]
        params = SamplingParams(max_tokens=1)
        request = Request(request_id=str(index), prompt_ids=(1,) * (start + count), params=params, arrival_s=0.0)
        request.block_ids = [BlockId(block) for block in blocks]
        segments.append(Segment(request, start, (1,) * count, request.block_ids, sample=True))
    return pack(segments, BlockTables(len(segments), 8, case.block_size), CPU)


def filled(case: Case) -> KVTensors:
    """A cache full of other requests' work."""
    kv = KVTensors(1, 2000, case.block_size, CPU, format=choose_format(case.kv_cache_dtype, CPU))
    generator = torch.Generator().manual_seed(1)
    shape = LayerShape(case.num_kv_heads, case.key_dim, case.value_dim)
    for rows in kv.ensure(0, shape, torch.float32):
        slots = torch.arange(2000 * case.block_size)
        rows.write(slots, torch.randn(len(slots), case.num_kv_heads, rows.dim, generator=generator))
    return kv


def call_of(case: Case, num_tokens: int) -> AttentionCall:
    generator = torch.Generator().manual_seed(2)

    def drawn(heads: int, dim: int) -> torch.Tensor:
        return torch.randn(1, heads, num_tokens, dim, generator=generator)

    heads = case.num_kv_heads * case.group
    mask = causal_mask_function if case.window is None else sliding_window_causal_mask_function(case.window)
    return AttentionCall(
        layer=0,
        query=drawn(heads, case.key_dim),
        key=drawn(case.num_kv_heads, case.key_dim),
        value=drawn(case.num_kv_heads, case.value_dim),
        mask=MaskTag(mask),
        scaling=0.3,
        softcap=case.softcap,
        sinks=torch.randn(heads, generator=generator) if case.sinks else None,
    )


def shared_tokens(library: Library, case: Case) -> list[int]:
    """What the kernels let each span share, in the pack's order."""
    batch, backend = lay_out(case), NativeBackend(library)
    ranges = backend.ranges(call_of(case, batch.num_tokens).mask, batch)
    struct = backend.describe(batch, ranges, case.num_kv_heads * case.group, *filled(case).rows(0))
    tokens = np.full(len(batch.spans), -1, dtype=np.int64)
    library.shared_tokens(struct, tokens.ctypes.data)
    return tokens.tolist()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_shared_blocks_are_attended_to_as_each_request_would(library: Library, case: Case) -> None:
    batch = lay_out(case)
    call = call_of(case, batch.num_tokens)
    expected = ReferenceBackend().attend(call, batch, filled(case))
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            actual = NativeBackend(library).attend(call, batch, filled(case))
        finally:
            torch.set_num_threads(1)
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
    is_shared = [tokens > 0 for tokens in shared_tokens(library, case)]
    assert any(is_shared) == (case.window != 50)
    assert not (case.requests is MIXED and all(is_shared))


def test_only_those_whose_window_reaches_the_prefix_share_it(library: Library) -> None:
    case = Case(tuple((10, 0, 161 + i, 1) for i in range(12)), window=168)
    spans = lay_out(case).spans
    assert shared_tokens(library, case) == [160 if span.end <= 168 else 0 for span in spans]


def groupings(order: Sequence[int]) -> Iterator[list[list[int]]]:
    """All cuts of a sequence into groups of neighbours."""
    if not order:
        yield []
    for size in range(1, len(order) + 1):
        for rest in groupings(order[size:]):
            yield [list(order[:size]), *rest]


@pytest.mark.parametrize("seed", range(6))
def test_the_cut_into_groups_saves_most(library: Library, seed: int) -> None:
    """Prefixes within prefixes: many share a little, some much more."""
    rng = random.Random(seed)
    block_size = 16
    shorter = rng.randint(3, 12)
    requests = [(rng.choice([0, shorter, 20, 24]), 0, 16 * 24 + rng.randint(0, 40), 1) for _ in range(11)]
    case = Case(tuple(requests), block_size=block_size, num_kv_heads=1, group=1, key_dim=16, value_dim=16)
    batch = lay_out(case)
    tables = [batch.block_row(span).tolist()[: span.start // block_size] for span in batch.spans]

    def common(members: list[int]) -> int:
        columns = zip(*(tables[i] for i in members), strict=False)
        return next((n for n, ids in enumerate(columns) if len(set(ids)) > 1), min(len(tables[i]) for i in members))

    def saved(members: list[int], tokens: int) -> float:
        return tokens * (len(members) - PAYS_FROM) - KEEP * len(members) if len(members) > 1 and tokens else 0.0

    order = sorted(range(len(tables)), key=tables.__getitem__)
    best = max(sum(saved(m, common(m) * block_size) for m in groups) for groups in groupings(order))
    found = shared_tokens(library, case)
    members: dict[tuple[int, int], list[int]] = {}
    for index, tokens in enumerate(found):
        assert tokens <= batch.spans[index].start
        if tokens:
            members.setdefault((tokens, tables[index][tokens // block_size - 1]), []).append(index)
    assert all(common(group) * block_size >= tokens for (tokens, _), group in members.items())
    assert best > 0
    assert sum(saved(group, tokens) for (tokens, _), group in members.items()) == pytest.approx(best)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "gpt_oss"])
def test_greedy_answers_behind_a_shared_prefix_are_transformers_own(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine requests decode together behind 112 cached tokens, in windows of 8 too where the family has them."""
    if not can_be_had(AUTO):
        pytest.skip("no kernels")
    torch.set_num_threads(1)
    rng = random.Random(11)
    prefix = [rng.randrange(3, VOCAB) for _ in range(112)]
    prompts = [prefix + [rng.randrange(3, VOCAB) for _ in range(1 + i)] for i in range(9)]
    module, backend, _ = native_model(family, AUTO)
    shared: list[int] = []
    describe = backend.describe

    def watched(batch, *args):  # type: ignore[no-untyped-def]
        struct = describe(batch, *args)
        tokens = np.zeros(len(batch.spans), dtype=np.int64)
        backend.library.shared_tokens(struct, tokens.ctypes.data)
        shared.append(int((tokens > 0).sum()))
        return struct

    monkeypatch.setattr(backend, "describe", watched)
    engine = TinyEngine(module, backend=backend, num_blocks=400)
    engine.run(prompts[:1], 14)
    answers = engine.run(prompts, 14)
    assert max(shared) == 9
    expected = [transformers_greedy(model(family), prompt, 14, "eager") for prompt in prompts]
    assert_equal(answers, expected)
