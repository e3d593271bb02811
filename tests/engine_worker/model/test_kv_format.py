"""How rows are stored: what rounding may cost, that a token's row depends on nothing else, and what it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine_worker.model.errors import ModelError
from engine_worker.model.kv_format import DENSE, FP4, FP8, INT8, K8V4, NAMES, KVFormat, RowFormat, choose_format
from engine_worker.model.kv_tensors import KVLayout, KVTensors, LayerShape
from engine_worker.model.memory import NotEnoughMemory

pytestmark = pytest.mark.engine
CPU = torch.device("cpu")
# Root mean square error over that of the numbers, normal ones: int8 errs by peak / 127 / sqrt(12), e4m3 by 2^-4 of a
# number at most, e2m1 by about a tenth.
LIMITS = {"int8": 0.009, "fp8": 0.03, "fp4": 0.12}
NARROW = pytest.mark.parametrize("form", [RowFormat(name) for name in LIMITS], ids=list(LIMITS))


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * torch.logspace(-3, 3, shape[0]).view(-1, *[1] * (len(shape) - 1))


@NARROW
@pytest.mark.parametrize("dim", [8, 12, 24, 64, 80, 96, 128])
def test_rounding_errs_little_at_any_size(form: RowFormat, dim: int) -> None:
    x = rows(40, 3, dim)
    data, scales = form.quantize(x)
    assert data.shape == (40, 3, form.width(dim))
    assert scales.shape == (40, 3, form.num_scales(dim))
    assert (data.dtype, scales.dtype) == (form.data_dtype(torch.float32), form.scale_dtype)
    y = form.dequantize(data, scales, dim)
    error = (y - x).square().mean((1, 2)).sqrt() / x.square().mean((1, 2)).sqrt()
    assert float(error.max()) < LIMITS[form.name]
    assert float(error.min()) > LIMITS[form.name] / 20, "nothing was rounded"


@NARROW
def test_a_row_depends_on_itself_alone(form: RowFormat) -> None:
    x = rows(7, 2, 24)
    together = form.quantize(x)
    for index in range(7):
        alone = form.quantize(x[index : index + 1])
        assert torch.equal(alone[0][0], together[0][index])
        assert torch.equal(alone[1][0], together[1][index])


@NARROW
def test_zeros_stay_zeros_and_giants_stay_finite(form: RowFormat) -> None:
    x = torch.zeros(3, 1, 24)
    x[1] = 3e4
    x[2, 0, :16] = -1e-30
    y = form.dequantize(*form.quantize(x), 24)
    assert torch.equal(y[0], x[0])
    assert float((y[1] / x[1] - 1).abs().max()) < 0.07
    assert float(y[2].abs().max()) < 1e-4


@NARROW
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_read_as_nan(form: RowFormat, poison: float) -> None:
    x = rows(3, 2, 24)
    x[1, 0, 5] = poison
    y = form.dequantize(*form.quantize(x), 24)
    assert bool(y[1, 0, :16].isnan().all())
    assert bool(torch.isfinite(y[[0, 2]]).all())
    assert bool(torch.isfinite(y[1, 1]).all())


def test_every_number_of_fp4_survives() -> None:
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 0.5])
    for scale in (2.0**-10, 0.375, 1.0, 104.0):
        x = (numbers * scale)[None]
        assert torch.equal(FP4.keys.dequantize(*FP4.keys.quantize(x), 16), x)


def test_int8_rounds_to_the_nearest() -> None:
    x = rows(20, 4, 64)
    data, scales = INT8.keys.quantize(x)
    assert float((data.float() * scales.float() - x).abs().sub(scales.float() * 0.5001).max()) <= 0
    assert int(data.abs().max()) in (126, 127)


@pytest.mark.parametrize(
    ("form", "num_bytes"), [(DENSE, 256), (INT8, 132), (FP8, 132), (FP4, 72), (K8V4, 102)], ids=lambda x: str(x)[:24]
)
def test_blocks_take_what_their_tensors_take(form: KVFormat, num_bytes: int) -> None:
    """num_bytes: a key and a value of 64 numbers, of a 16-bit model."""
    layout = KVLayout((LayerShape(3, 64, 64),) * 2, torch.bfloat16, form)
    assert layout.block_bytes(16) == 2 * 16 * 3 * num_bytes
    kv = KVTensors(2, 5, 16, CPU, layout)
    tensors = [tensor for layer in range(2) for part in kv.rows(layer) for tensor in part.tensors()]
    assert sum(tensor.numel() * tensor.element_size() for tensor in tensors) == 5 * layout.block_bytes(16)


@pytest.mark.parametrize("form", [DENSE, INT8, FP8, FP4, K8V4], ids=lambda form: form.name)
def test_poisoned_blocks_are_known_and_scrubbed(form: KVFormat) -> None:
    kv = KVTensors(1, 3, 4, CPU, format=form)
    key = torch.randn(1, 2, 6, 24)
    value = torch.randn(1, 2, 6, 12)
    value[0, 1, 5, 3] = float("nan")
    kv.write(0, torch.tensor([0, 1, 2, 3, 4, 9]), key, value)
    assert kv.has_polluted_blocks
    kv.check_invariants()
    kv.scrub([2])
    assert not kv.has_polluted_blocks
    kv.check_invariants()
    keys, values = kv.rows(0)
    assert float(values.read(torch.tensor([9]), torch.float32).abs().max()) == 0
    torch.testing.assert_close(keys.read(torch.tensor([4]), torch.float32)[0], key[0, :, 4], atol=0.5, rtol=0.2)


def test_an_allocation_that_fails_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(KVTensors, "_zeros", no_memory)
    with pytest.raises(NotEnoughMemory, match="--kv-cache-memory"):
        KVTensors(1, 3, 4, CPU, KVLayout((LayerShape(1, 8, 8),), torch.float32))


def test_names() -> None:
    assert choose_format("auto", CPU) is DENSE
    assert [choose_format(name, CPU).name for name in NAMES[1:]] == list(NAMES[1:])
    with pytest.raises(ModelError, match="auto, int8, fp8, fp4"):
        choose_format("int3", CPU)


class _Recorded(TorchDispatchMode):
    """The names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", [DENSE, INT8, FP8, FP4, K8V4], ids=lambda form: form.name)
def test_writes_and_reads_bring_nothing_from_the_host(form: KVFormat) -> None:
    """A CUDA graph can record neither a tensor made of Python numbers nor a look at one."""
    kv, slots = KVTensors(2, 4, 4, CPU, format=form), torch.tensor([3, 0, 7])
    key = torch.randn(1, 2, 3, 24)
    kv.write(0, slots, key, key)
    with _Recorded() as first:
        torch.tensor([1.0])
    assert "lift_fresh" in first.names
    with _Recorded() as recorded:
        kv.write(0, slots, key, key)
        for part in kv.rows(0):
            part.read(slots, torch.float32)
    assert "index_copy_" in recorded.names
    assert not {"lift_fresh", "_local_scalar_dense", "nonzero"} & set(recorded.names)
