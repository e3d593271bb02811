"""Every kernel equals its torch twin, on every instruction set that this machine has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine_worker.model.errors import ModelError
from engine_worker.model.kv_format import DENSE, FP4, INT8, K8V4, KVFormat, Rows
from engine_worker.model.kv_tensors import KVTensors, LayerShape
from engine_worker.model.native import build, kernels
from engine_worker.model.native import library as native
from engine_worker.model.native.build import NativeUnavailable
from engine_worker.model.native.kernels import HeadNorm, PackedWeight, quantize
from engine_worker.model.native.library import Library
from engine_worker.model.native_linear import join
from engine_worker.model.quantize import QuantizedLinear
from tests.engine_worker.model.native import INSTRUCTION_SETS, library_for

pytestmark = pytest.mark.engine


@pytest.fixture(params=INSTRUCTION_SETS)
def library(request: pytest.FixtureRequest) -> Library:
    torch.set_num_threads(1)
    return library_for(request.param)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def empty_cache(form: KVFormat, num_slots: int, num_heads: int, dim: int) -> tuple[Rows, Rows]:
    kv = KVTensors(1, num_slots, 1, torch.device("cpu"), format=form)
    return kv.ensure(0, LayerShape(num_heads, dim, dim), torch.float32)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=2e-5 * max(1.0, float(theirs.abs().max())), rtol=1e-5)


@pytest.mark.parametrize("kind", ["float32", "int8", "int4"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "cols"), [(32, 32), (70, 96), (1, 64), (224, 640), (33, 1536)])
def test_linear(library: Library, kind: str, bias: bool, rows: int, cols: int) -> None:
    weight = quantize(random(rows, cols), kind)
    offset = random(rows, seed=1) if bias else None
    packed = PackedWeight(weight, offset)
    for num_rows in (0, 1, 2, 3, 4, 5, 11, 12, 13, 23, 24, 25, 48, 131, 300):
        x = random(num_rows, cols, seed=num_rows)
        ours = kernels.linear(library, x, packed)
        assert ours.shape == (num_rows, rows)
        if num_rows:
            assert_close(ours, kernels.linear_twin(x, weight, offset))


def test_linear_with_columns_that_fill_no_register(library: Library) -> None:
    weight = quantize(random(50, 37), "float32")
    x = random(2, 9, 37)
    assert_close(kernels.linear(library, x, PackedWeight(weight, None)), kernels.linear_twin(x, weight, None))


@pytest.mark.parametrize(("rows", "cols"), [(960, 576), (70, 1536), (33, 37)])
def test_a_float32_row_comes_out_the_same_bit_for_bit_however_many_go_with_it(
    library: Library, rows: int, cols: int
) -> None:
    packed = PackedWeight(quantize(random(rows, cols), "float32"), random(rows, seed=1))
    x = random(301, cols, seed=2)
    together = kernels.linear(library, x, packed)
    for num_rows in (1, 2, 3, 4, 5, 7, 12, 13, 25, 100):
        for first in (0, 301 - num_rows):
            alone = kernels.linear(library, x[first : first + num_rows], packed)
            assert torch.equal(alone, together[first : first + num_rows]), (num_rows, first)


@pytest.mark.parametrize("width", [0, 32, 128])
def test_linear_refuses_another_width_than_its_own(library: Library, width: int) -> None:
    """torch's does, and a configuration that doesn't fit together comes here: helium's head_dim * heads may differ."""
    packed = PackedWeight(quantize(torch.zeros(48, 64), "float32"), None)
    with pytest.raises(ValueError, match=f"64 inputs was given {width}"):
        kernels.linear(library, torch.zeros(3, width), packed)


def test_linear_on_two_threads(library: Library) -> None:
    weight = quantize(random(960, 128), "int8")
    packed = PackedWeight(weight, None)
    torch.set_num_threads(2)
    try:
        for num_rows in (1, 7, 40, 1300):
            x = random(num_rows, 128)
            assert_close(kernels.linear(library, x, packed), kernels.linear_twin(x, weight, None))
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("kind", ["float32", "int8", "int4"])
def test_joined_weights_give_the_parts_outputs_side_by_side(library: Library, kind: str) -> None:
    parts = [PackedWeight(quantize(random(n, 64, seed=n), kind), random(n) if n == 64 else None) for n in (64, 32, 40)]
    x = random(5, 64)
    apart = [kernels.linear(library, x, part) for part in parts]
    joined = join(parts)
    assert joined is not None
    assert_close(kernels.linear(library, x, joined), torch.cat(apart, -1))
    for part, before in zip(parts, apart, strict=True):
        assert joined.data.data_ptr() <= part.data.data_ptr() < joined.data.data_ptr() + joined.data.nbytes
        assert_close(kernels.linear(library, x, part), before)


@pytest.mark.parametrize("kind", ["float32", "int8", "int4"])
def test_parts_that_fill_no_panels_are_joined_without_gaps(library: Library, kind: str) -> None:
    parts = [PackedWeight(quantize(random(n, 64, seed=n), kind), None) for n in (40, 24, 7)]
    x = random(5, 64)
    apart = [kernels.linear(library, x, part) for part in parts]
    joined = join(parts)
    assert joined is not None
    assert_close(kernels.linear(library, x, joined), torch.cat(apart, -1))


def test_parts_of_different_kinds_are_not_joined() -> None:
    parts = [PackedWeight(quantize(random(32, 64), kind), None) for kind in ("int8", "float32")]
    assert join(parts) is None


@pytest.mark.parametrize("kind", ["float32", "int8", "int4"])
def test_rows_of_a_packed_weight(kind: str) -> None:
    weight = quantize(random(70, 64), kind)
    ids = torch.tensor([[0, 69, 31], [32, 33, 5]])
    torch.testing.assert_close(PackedWeight(weight, None).rows(ids), weight.dequantize()[ids])


def test_quantized_weights_are_near_the_dense_ones() -> None:
    dense = random(64, 256)
    for kind, bound in (("int8", 0.01), ("int4", 0.1)):
        error = (quantize(dense, kind).dequantize() - dense).square().mean().sqrt() / dense.square().mean().sqrt()
        assert error < bound, kind
    zeros = torch.zeros(4, 64)
    for kind in ("int8", "int4"):
        assert torch.equal(quantize(zeros, kind).dequantize(), zeros)


def _square_error(weight: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    return (weight - found).square().unflatten(1, (-1, 32)).sum(2)


@pytest.mark.parametrize("minimum", ["free", "symmetric"])
def test_int4_gives_back_what_was_on_such_a_grid(minimum: str) -> None:
    """As a GGUF file in Q4_1 or Q4_0 has it: scales in half floats, with the ends of the grid in use."""
    integers = torch.randint(0, 16, (40, 3, 32), generator=torch.Generator().manual_seed(1)).float()
    integers[..., 5], integers[..., 20] = 0, 15
    scales = (random(40, 3, 1) / 100).half().float()
    if minimum == "free":
        weight = integers * scales.abs() + random(40, 3, 1, seed=2).half().float()
    else:
        weight = (integers - 8) * scales
    assert torch.equal(quantize(weight.flatten(1), "int4").dequantize(), weight.flatten(1))


@pytest.mark.parametrize("shape", ["normal", "tails", "one side", "equal"])
def test_int4_errs_no_more_than_plain_rounding_in_any_group(shape: str) -> None:
    x = random(64, 256)
    weight = {"normal": x, "tails": x**3, "one side": x.abs() + 3, "equal": x[:, :1].expand(64, 256)}[shape]
    groups = weight.unflatten(1, (-1, 32))
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    largest = torch.where(high > -low, high, low)
    grids = [((high - low) / 15, low)] + [(largest / -8 * f, largest * f) for f in (1.0, 0.9)]
    found = _square_error(weight, quantize(weight, "int4").dequantize())
    for scale, minimum in ((a.half().float(), b.half().float()) for a, b in grids):
        plain = ((groups - minimum) / scale.where(scale != 0, 1.0)).round().clamp(0, 15) * scale + minimum
        assert (found <= _square_error(weight, plain.flatten(1)) * (1 + 1e-5) + 1e-12).all()
    if shape == "normal":  # rounding from least to largest errs by 8.0 %
        assert (found.sum() / weight.square().sum()).sqrt() < 0.075


@pytest.mark.parametrize("bad", [1e5, float("inf"), float("nan")])
def test_int4_refuses_what_half_floats_cannot_hold(bad: float) -> None:
    weight = random(3, 64)
    weight[1, 40] = bad
    with pytest.raises(ModelError, match="half floats, or not finite"):
        quantize(weight, "int4")


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_layer_without_kernels_holds_the_same_weights(kind: str) -> None:
    linear = torch.nn.Linear(96, 40)
    layer = QuantizedLinear(linear, kind)
    expected = quantize(linear.weight, kind)
    assert torch.equal(layer.dequantize(), expected.dequantize())
    ids = torch.tensor([[3, 39], [0, 3]])
    assert torch.equal(layer.rows(ids), expected.dequantize()[ids])
    x = random(5, 96)
    with torch.inference_mode():
        assert_close(layer(x), kernels.linear_twin(x, expected, linear.bias))


@pytest.mark.parametrize("n", [16, 48, 37, 576])
@pytest.mark.parametrize("adds", [True, False])
def test_rms_norm(library: Library, n: int, adds: bool) -> None:
    x, weight = random(7, n), random(n, seed=1)
    delta = random(7, n, seed=2) if adds else None
    ours, theirs = x.clone(), x.clone()
    assert_close(
        kernels.rms_norm(library, ours, weight, 1e-5, delta), kernels.rms_norm_twin(theirs, weight, 1e-5, delta)
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("n", [16, 37, 1536])
def test_silu_mul(library: Library, n: int) -> None:
    gate_up = random(5, 2 * n) * 20
    gate_up[0, 0], gate_up[0, 1] = -200.0, 200.0
    assert_close(kernels.silu_mul(library, gate_up), kernels.silu_mul_twin(gate_up))


@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (64, 32), (16, 4), (64, 0)])
@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("form", [DENSE, INT8, FP4, K8V4], ids=lambda form: form.name)
def test_rope_write(library: Library, dim: int, rotary: int, norms: bool, form: KVFormat) -> None:
    tokens, q_heads, kv_heads = 5, 6, 2
    rotation = (random(tokens, rotary, seed=1), random(tokens, rotary, seed=2)) if rotary else None
    heads = (HeadNorm(random(dim, seed=3), 1e-5), HeadNorm(random(dim, seed=4), 1e-6)) if norms else (None, None)
    slots = torch.tensor([9, 0, 3, 11, 4])
    results = []
    for twin in (False, True):
        qkv = random(tokens, (q_heads + 2 * kv_heads) * dim, seed=5)
        cache = empty_cache(form, 12, kv_heads, dim)
        if twin:
            sound = kernels.rope_write_twin(qkv, rotation, heads, slots, cache)
        else:
            sound = kernels.rope_write(library, qkv, rotation, heads, slots, cache)
        assert sound
        results.append((qkv[:, : q_heads * dim], *(rows.read(slice(None), torch.float32) for rows in cache)))
    assert_close(results[0][0], results[1][0])
    for ours, theirs in zip(*results, strict=True):
        if form is DENSE:
            assert_close(ours, theirs)
        else:  # rounding errors of norm and rotation tip a few numbers to their neighbours
            assert float(((ours - theirs).abs() > 1e-4).float().mean()) < 0.02


@pytest.mark.parametrize("form", [INT8, FP4, K8V4], ids=lambda form: form.name)
@pytest.mark.parametrize("dim", [12, 16, 24, 64, 80, 96, 128])
def test_rows_are_stored_bit_for_bit_as_torch_stores_them(library: Library, form: KVFormat, dim: int) -> None:
    tokens, kv_heads = 40, 2
    qkv = random(tokens, 3 * kv_heads * dim) * torch.logspace(-6, 4, tokens)[:, None]
    qkv[0] = 0
    qkv[1, 5:] = float("nan")
    slots = torch.arange(tokens).flip(0)
    ours, theirs = (empty_cache(form, tokens, kv_heads, dim) for _ in range(2))
    kernels.rope_write(library, qkv.clone(), None, (None, None), slots, ours)
    kernels.rope_write_twin(qkv.clone(), None, (None, None), slots, theirs)
    for mine, twin in zip(ours, theirs, strict=True):
        for name, a, b in zip(("data", "scales"), mine.tensors(), twin.tensors(), strict=True):
            assert torch.equal(torch.nan_to_num(a, nan=-1.0), torch.nan_to_num(b, nan=-1.0)), name


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_poisoned_key_or_value_is_noticed(library: Library, poison: float) -> None:
    for column in (2 * 8 + 3, 3 * 8 + 1):
        qkv = random(3, 4 * 8)
        qkv[1, column] = poison
        cache = empty_cache(DENSE, 4, 1, 8)
        assert not kernels.rope_write(library, qkv, None, (None, None), torch.tensor([0, 1, 2]), cache)


def test_the_check_at_load_refuses_a_library_that_computes_something_else(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels.check(library)
    monkeypatch.setattr(library, "silu_mul", lambda gate_up, out, rows, n: None)
    with pytest.raises(NativeUnavailable, match="silu_mul"):
        kernels.check(library)


# -- finding and building


CPUINFO = "processor : 0\nflags : fpu avx2 fma {}\n"


def test_the_instruction_set_follows_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(CPUINFO.format(""))
    assert build.choose("auto", cpuinfo).name == "avx2"
    assert build.choose("generic", cpuinfo).name == "generic"
    with pytest.raises(NativeUnavailable, match="does not have"):
        build.choose("avx512", cpuinfo)
    cpuinfo.write_text(CPUINFO.format("avx512f avx512bw avx512vl avx512dq"))
    assert build.choose("auto", cpuinfo).name == "avx512"
    assert build.choose("avx2", cpuinfo).name == "avx2"
    cpuinfo.write_text("flags : fpu sse2\n")
    with pytest.raises(NativeUnavailable, match="no AVX2"):
        build.choose("auto", cpuinfo)
    with pytest.raises(NativeUnavailable, match="must be auto, off"):
        build.choose("mmx", cpuinfo)
    with pytest.raises(NativeUnavailable, match="is off"):
        build.choose("off", cpuinfo)


def test_without_a_compiler_the_worker_goes_on_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (native._State.library, native._State.status, native._State.is_loaded)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("WARMGATE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "SHIPPED", tmp_path / "lib")
    try:
        assert native.load(lambda message: None, "generic") is None
        assert "no C++ compiler" in native.status()
    finally:
        native._State.library, native._State.status, native._State.is_loaded = before


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "cxx"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "fatal error: nothing works" >&2\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    with pytest.raises(NativeUnavailable, match="nothing works"):
        build.find_or_build(build.GENERIC, lambda message: None, tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache" / "native").iterdir()] == ["generic.lock"]


def test_a_cache_that_cannot_be_written_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NativeUnavailable, match="can't be used"):
        build.find_or_build(build.GENERIC, lambda message: None, tmp_path / "file")
