"""The CPU backends equal the reference backend, whatever the shapes, masks, chunks and block tables."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from engine_worker.core.types import BlockId, Request, SamplingParams, Segment
from engine_worker.model import backend_cpu, backend_cpu_plan, packing
from engine_worker.model.attention import AttentionBackend, AttentionCall
from engine_worker.model.backend_cpu import CPUBackend
from engine_worker.model.backend_native import NativeBackend
from engine_worker.model.backend_reference import ReferenceBackend
from engine_worker.model.backends import make_backend
from engine_worker.model.errors import ModelError
from engine_worker.model.kv_format import choose_format
from engine_worker.model.kv_tensors import KVTensors
from engine_worker.model.masks import MaskTag
from engine_worker.model.native import library as native
from engine_worker.model.packing import BlockTables, pack
from tests.engine_worker.model.native import available_libraries

pytestmark = pytest.mark.engine

CPU = torch.device("cpu")


def every_third_hidden(batch: int, head: int, q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
    """A mask with holes: what a row may see is no range."""
    return (kv_pos <= q_pos) & ((q_pos - kv_pos) % 3 != 1)


def mask_function(kind: str, width: int):  # type: ignore[no-untyped-def]
    match kind:
        case "sliding":
            return sliding_window_causal_mask_function(width)
        case "chunked":
            return chunked_causal_mask_function(width, torch.zeros(1, dtype=torch.int64))
        case "holes":
            return every_third_hidden
        case _:
            return causal_mask_function


@dataclass(frozen=True)
class Case:
    """Requests given as lists of chunk lengths; all chunks of the same number share a step."""

    chunks: tuple[tuple[int, ...], ...]
    num_kv_heads: int = 2
    group: int = 3
    key_dim: int = 8
    value_dim: int = 8
    block_size: int = 4
    mask: str = "causal"
    width: int = 5
    softcap: float | None = None
    sinks: bool = False
    shuffled: bool = True
    dtype: torch.dtype = torch.float32
    seed: int = 0
    kv_cache_dtype: str = "auto"


def outputs(case: Case, backend: AttentionBackend) -> list[torch.Tensor]:
    """What the backend answers in every step of the case, tokens in pack order. Inputs depend on the case alone."""
    generator = torch.Generator().manual_seed(case.seed)
    lengths = [sum(chunks) for chunks in case.chunks]
    counts = [-(-length // case.block_size) for length in lengths]
    num_blocks = sum(counts) + 2
    order = torch.randperm(num_blocks, generator=generator).tolist() if case.shuffled else list(range(num_blocks))
    requests = []
    for index, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        request = Request(
            request_id=str(index), prompt_ids=(1,) * length, params=SamplingParams(max_tokens=1), arrival_s=0.0
        )
        request.block_ids = [BlockId(order.pop(0)) for _ in range(count)]
        requests.append(request)
    tables = BlockTables(len(requests), 1, case.block_size)
    kv = KVTensors(2, num_blocks, case.block_size, CPU, format=choose_format(case.kv_cache_dtype, CPU))
    num_heads = case.num_kv_heads * case.group
    sinks = torch.randn(num_heads, generator=generator) if case.sinks else None
    results = []
    for step in range(max(map(len, case.chunks))):
        segments = []
        for request, chunks in zip(requests, case.chunks, strict=True):
            if step < len(chunks) and chunks[step]:
                start = sum(chunks[:step])
                end = start + chunks[step]
                blocks = request.block_ids[: -(-end // case.block_size)]
                segments.append(Segment(request, start, request.prompt_ids[start:end], blocks, sample=True))
        if not segments:
            continue
        batch = pack(segments, tables, CPU)
        tables.check_invariants()
        num_tokens = batch.num_tokens

        def random(heads: int, dim: int, num_tokens: int = num_tokens) -> torch.Tensor:
            tensor = torch.randn(1, num_tokens, heads, dim, generator=generator)
            return tensor.to(case.dtype).transpose(1, 2)  # as projections leave them: not contiguous

        for layer, kind in enumerate((case.mask, "causal")):  # two masks in one step, as hybrid models have
            call = AttentionCall(
                layer=layer,
                query=random(num_heads, case.key_dim),
                key=random(case.num_kv_heads, case.key_dim),
                value=random(case.num_kv_heads, case.value_dim),
                mask=MaskTag(mask_function(kind, case.width)),
                scaling=0.7,
                softcap=case.softcap,
                sinks=sinks,
            )
            results.append(backend.attend(call, batch, kv))
    return results


def assert_equal(case: Case, tolerance: float = 2e-5) -> None:
    expected = outputs(case, ReferenceBackend())
    natives = [NativeBackend(library) for library in available_libraries()]
    for backend in (CPUBackend(), *natives):
        actual = outputs(case, backend)
        assert len(actual) == len(expected) > 0
        for ours, theirs in zip(actual, expected, strict=True):
            assert ours.shape == theirs.shape
            assert ours.dtype == theirs.dtype == case.dtype
            torch.testing.assert_close(ours.float(), theirs.float(), atol=tolerance, rtol=tolerance)


MIXED = ((9, 1, 1, 7), (1, 1, 1, 1), (3, 14, 2, 1), (0, 5, 1, 1), (20, 1, 6, 1))
# Of more tokens than the kernels' chunk of keys: 127 to 341, decoding beside each other and beside chunks.
LONG = ((300, 1, 1, 39), (129, 1, 1, 1), (126, 1, 2, 1), (0, 5, 1, 1))

CASES = {
    "plain": Case(MIXED),
    "blocks side by side": Case(MIXED, shuffled=False),
    "no grouping of heads": Case(MIXED, num_kv_heads=4, group=1),
    "one key head for all": Case(MIXED, num_kv_heads=1, group=7),
    "block of one token": Case(MIXED, block_size=1),
    "block larger than any request": Case(MIXED, block_size=64),
    "sliding window": Case(MIXED, mask="sliding"),
    "sliding window, side by side": Case(MIXED, mask="sliding", shuffled=False),
    "window of one": Case(MIXED, mask="sliding", width=1),
    "window larger than any request": Case(MIXED, mask="sliding", width=100),
    "chunked attention": Case(MIXED, mask="chunked", width=6),
    "chunked attention, side by side": Case(MIXED, mask="chunked", width=6, shuffled=False),
    "holes in the mask": Case(MIXED, mask="holes"),
    "holes in the mask, side by side": Case(MIXED, mask="holes", shuffled=False),
    "softcap": Case(MIXED, softcap=1.5, mask="sliding"),
    "sinks": Case(MIXED, sinks=True, mask="sliding"),
    "sinks, side by side": Case(MIXED, sinks=True, shuffled=False),
    "softcap and sinks": Case(MIXED, sinks=True, softcap=1.5),
    "narrow values": Case(MIXED, key_dim=24, value_dim=12),
    "narrow values, window": Case(MIXED, key_dim=24, value_dim=12, mask="sliding", shuffled=False),
    "narrow values, sinks": Case(MIXED, key_dim=24, value_dim=12, sinks=True),
    "wide values": Case(MIXED, key_dim=8, value_dim=16),
    "long": Case(LONG, key_dim=40, value_dim=72, block_size=16),
    "long, sinks": Case(LONG, key_dim=64, value_dim=64, block_size=16, sinks=True),
    "long, window": Case(LONG, key_dim=64, value_dim=64, block_size=16, mask="sliding", width=150),
    "long, many query heads a key head": Case(LONG, num_kv_heads=2, group=11, key_dim=16, value_dim=48),
    "long, many key heads": Case(LONG, num_kv_heads=17, group=2, key_dim=64, value_dim=16),
}


@pytest.fixture(autouse=True)
def _short_contexts_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the small cases here have long contexts too, which are read in place."""
    monkeypatch.setattr(backend_cpu_plan, "SHORT_CONTEXT", 12)
    monkeypatch.setattr(packing, "SHORT_CONTEXT", 12)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_cpu_equals_reference(case: Case) -> None:
    assert_equal(case)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8", "fp4", "k8v4"])
@pytest.mark.parametrize(
    "name",
    [
        *("plain", "blocks side by side", "sliding window", "chunked attention, side by side", "holes in the mask"),
        *("sinks", "softcap and sinks", "narrow values", "narrow values, sinks", "wide values"),
        *("one key head for all", "long", "long, many query heads a key head"),
    ],
)
def test_quantized_caches_are_read_alike(name: str, kv_cache_dtype: str) -> None:
    assert_equal(replace(CASES[name], kv_cache_dtype=kv_cache_dtype))


@pytest.mark.parametrize("dim", [16, 24, 64, 80, 96, 128])
def test_quantized_caches_of_any_head_dim(dim: int) -> None:
    for kv_cache_dtype in ("int8", "fp4"):
        assert_equal(Case(((9, 1, 7), (1, 1, 1)), key_dim=dim, value_dim=dim, kv_cache_dtype=kv_cache_dtype))


@pytest.mark.parametrize("name", ["plain", "long", "long, many key heads"])
def test_threads_share_out_requests_and_heads(name: str) -> None:
    torch.set_num_threads(3)
    try:
        assert_equal(CASES[name])
    finally:
        torch.set_num_threads(1)


def test_runs_are_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes over neighbouring blocks copy nothing, unless they are short and many."""

    def must_not_gather(*_: object) -> None:
        raise AssertionError("blocks were gathered")

    monkeypatch.setattr(CPUBackend, "_gather", must_not_gather)
    outputs(Case(((13, 1, 1), (20, 1, 1), (17, 1, 1), (14, 1, 1), (9,)), shuffled=False), CPUBackend())
    outputs(Case(((3, 1, 1), (2, 1, 1)), shuffled=False), CPUBackend())
    with pytest.raises(AssertionError, match="gathered"):
        outputs(Case(((3, 1),) * 4, shuffled=False), CPUBackend())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cpu_equals_reference_in_narrow_types(dtype: torch.dtype) -> None:
    assert_equal(Case(MIXED, dtype=dtype, mask="sliding"), tolerance=3e-2)
    assert_equal(Case(MIXED, dtype=dtype, sinks=True), tolerance=3e-2)


@pytest.mark.parametrize("case", [Case(MIXED), Case(MIXED, mask="sliding"), Case(MIXED, sinks=True)])
def test_cpu_does_without_the_private_kernel(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch may drop its private operator: everything still works, through the public one."""
    monkeypatch.setattr(backend_cpu, "_FLASH", None)
    assert_equal(case)


def test_the_private_kernel_is_there() -> None:
    """Its loss would cost speed without a failing test, so its presence in the pinned torch is one."""
    assert backend_cpu._FLASH is not None


def test_gathers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """More decodes than one gather may hold are split over several, with the same result."""
    monkeypatch.setattr(backend_cpu_plan, "_MAX_GATHER_TOKENS", 40)
    assert_equal(Case(tuple((5 + i, 1, 1) for i in range(9))))


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # it sets a constant
)
@given(
    chunks=st.lists(
        st.lists(st.sampled_from([0, 1, 1, 1, 2, 3, 5, 9, 17]), min_size=1, max_size=5).filter(any).map(tuple),
        min_size=1,
        max_size=6,
    ).map(tuple),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    dims=st.sampled_from([(8, 8), (16, 16), (24, 12)]),
    block_size=st.sampled_from([1, 2, 3, 4, 16]),
    mask=st.sampled_from(["causal", "sliding", "chunked", "holes"]),
    width=st.integers(1, 12),
    softcap=st.sampled_from([None, None, 2.0]),
    sinks=st.booleans(),
    shuffled=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_cpu_equals_reference_anywhere(
    chunks: tuple[tuple[int, ...], ...],
    num_kv_heads: int,
    group: int,
    dims: tuple[int, int],
    block_size: int,
    mask: str,
    width: int,
    softcap: float | None,
    sinks: bool,
    shuffled: bool,
    seed: int,
) -> None:
    assert_equal(
        Case(
            chunks,
            num_kv_heads=num_kv_heads,
            group=group,
            key_dim=dims[0],
            value_dim=dims[1],
            block_size=block_size,
            mask=mask,
            width=width,
            softcap=softcap,
            sinks=sinks,
            shuffled=shuffled,
            seed=seed,
        )
    )


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8", "fp4"])
@pytest.mark.parametrize("backend", [ReferenceBackend, CPUBackend])
def test_chunks_do_not_matter(backend: type[AttentionBackend], kv_cache_dtype: str) -> None:
    """The same tokens in one chunk or in many attend alike. Inputs are drawn a step at a time, so compare one layer."""
    generator = torch.Generator().manual_seed(5)
    length, block_size = 23, 4
    query, key, value = (torch.randn(1, heads, length, 8, generator=generator) for heads in (6, 2, 2))
    request = Request(request_id="r", prompt_ids=(1,) * length, params=SamplingParams(max_tokens=1), arrival_s=0.0)
    request.block_ids = [BlockId(block) for block in (5, 1, 4, 0, 3, 2)]

    def run(cuts: list[int]) -> torch.Tensor:
        tables = BlockTables(1, 6, block_size)
        kv = KVTensors(1, 6, block_size, CPU, format=choose_format(kv_cache_dtype, CPU))
        rows = []
        for start, end in pairwise(cuts):
            segment = Segment(request, start, request.prompt_ids[start:end], request.block_ids, sample=True)
            part = slice(start, end)
            call = AttentionCall(
                layer=0,
                query=query[:, :, part],
                key=key[:, :, part],
                value=value[:, :, part],
                mask=MaskTag(sliding_window_causal_mask_function(6)),
                scaling=0.5,
            )
            rows.append(backend().attend(call, pack([segment], tables, CPU), kv))
        return torch.cat(rows)

    whole = run([0, length])
    for cuts in ([0, 1, 2, length], [0, 11, 12, length], list(range(length + 1))):
        torch.testing.assert_close(run(cuts), whole, atol=1e-5, rtol=1e-5)


def test_a_wrong_backend_is_noticed() -> None:
    """The comparison can fail: a backend that ignores the window is told from one that honours it."""

    class Naive(CPUBackend):
        def attend(self, call: AttentionCall, batch, kv) -> torch.Tensor:  # type: ignore[no-untyped-def]
            return super().attend(replace(call, mask=MaskTag(causal_mask_function)), batch, kv)

    case = Case(MIXED, mask="sliding")
    expected, actual = outputs(case, ReferenceBackend()), outputs(case, Naive())
    assert max(float((a - b).abs().max()) for a, b in zip(actual, expected, strict=True)) > 0.1


def test_unknown_backends_are_refused_with_the_choices() -> None:
    with pytest.raises(ModelError, match="auto, reference, cpu, native, triton or flashinfer"):
        make_backend("flash", CPU)
    assert make_backend("auto", CPU).name == ("cpu" if native.current() is None else "native")
    with pytest.raises(ModelError, match="can't run on cuda"):
        make_backend("cpu", torch.device("cuda"))
