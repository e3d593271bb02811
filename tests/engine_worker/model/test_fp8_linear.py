"""fp8 weights without a CUDA device: the layer's own path around the product, and who is refused.

Only the product itself runs on tensor cores; on a CPU its twin stands in (quantize.scaled_product).
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine_worker.model import quantize
from engine_worker.model.errors import ModelError
from engine_worker.model.quantize import FP8Linear, check_quantization, quantize_linears, to_fp8

pytestmark = pytest.mark.engine
CUDA = torch.device("cuda")


def linear(rows: int, cols: int, bias: bool) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        made = nn.Linear(cols, rows, bias=bias)
    made.weight.data[3] *= 100  # rows of other sizes: a scale for the whole weight would lose the small ones
    return made


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_the_layer_is_near_the_dense_one(bias: bool, dtype: torch.dtype) -> None:
    dense = linear(48, 64, bias).to(dtype)
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    x[0, 1] *= 1e4  # an outlier token must not coarsen the others: scales are a token's own
    expected = dense(x).float()
    actual = FP8Linear(dense)(x)
    assert actual.dtype == dtype
    assert actual.shape == (2, 5, 48)
    kept = torch.arange(48) != 3  # the large row's single number would outweigh all others
    expected, off = expected[..., kept], (actual.float() - expected)[..., kept]
    error = off.square().mean(-1).sqrt() / expected.square().mean(-1).sqrt()  # [2, 5]
    assert 1e-4 < float(error.max()) < 0.06


def test_rows_of_fp8_are_scaled_to_its_range() -> None:
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(3)) * torch.logspace(-4, 4, 6)[:, None]
    x[5] = 0
    values, scales = to_fp8(x)
    assert values.dtype == torch.float8_e4m3fn
    assert values.float()[:5].abs().amax(1).tolist() == [448.0] * 5
    torch.testing.assert_close(values.float() * scales, x, rtol=2**-4, atol=1e-6)


def test_layers_are_swapped_where_the_widths_allow() -> None:
    module = nn.ModuleDict({"fits": linear(32, 48, False), "odd": linear(33, 48, True), "narrow": linear(32, 24, True)})
    assert quantize_linears(module, "fp8") == 1
    assert isinstance(module["fits"], FP8Linear)
    assert type(module["odd"]) is type(module["narrow"]) is nn.Linear
    assert module["fits"].values.element_size() == 1
    assert module["fits"].weight.device.type == "meta"


def test_devices_without_fp8_are_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"needs a CUDA device, and this is cpu\. Use int8 or int4"):
        check_quantization("fp8", torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ModelError, match=r"no fp8 units \(compute capability 8.9\)"):
        check_quantization("fp8", CUDA)
    assert not quantize.has_fp8_units(CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_quantization("fp8", CUDA)
    assert quantize.has_fp8_units(CUDA)
