"""Prepacked linears must compute what nn.Linear computes, and leave alone what they don't understand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine_worker.model import linear

pytestmark = pytest.mark.engine

needs_operators = pytest.mark.skipif(not linear.is_available(), reason="this torch has no packed linear operators")


def _model(*, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(192, 320, bias=bias), nn.ReLU(), nn.Linear(320, 256, bias=bias))
    return model.to(dtype).eval().requires_grad_(False)


def _relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return float((ours - reference).abs().max() / reference.abs().max())


@needs_operators
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 7, 16, 33, 128, 255, 256, 300])
def test_result_equals_plain_linear_at_every_number_of_rows(num_rows: int, bias: bool) -> None:
    plain, packed = _model(bias=bias), _model(bias=bias)
    report = linear.prepack(packed)
    assert report.num_packed == 2
    assert report.packed_bytes == (192 * 320 + 320 * 256) * 4
    x = torch.randn(num_rows, 192, generator=torch.Generator().manual_seed(num_rows))
    assert _relative_error(packed(x), plain(x)) < 1e-5


@needs_operators
def test_leading_dimensions_and_strides_are_kept() -> None:
    plain, packed = _model(), _model()
    linear.prepack(packed)
    x = torch.randn(2, 192, 5, generator=torch.Generator().manual_seed(1)).transpose(1, 2)  # [2, 5, 192], strided
    assert packed(x).shape == (2, 5, 256)
    assert _relative_error(packed(x), plain(x)) < 1e-5
    assert packed(x[:, :0]).shape == (2, 0, 256)


@needs_operators
def test_tied_embedding_stays_tied_and_state_dict_the_same() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(512, 96)
            self.head = nn.Linear(96, 512, bias=False)
            self.head.weight = self.embed.weight

    model = Tied().requires_grad_(False)
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    linear.prepack(model)
    assert isinstance(model.head, linear.PackedLinear)
    assert model.head.weight is model.embed.weight
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before


@needs_operators
def test_a_shared_layer_is_packed_once_and_stays_shared() -> None:
    shared = nn.Linear(256, 256)
    model = nn.ModuleList([nn.Sequential(shared), nn.Sequential(shared)])
    assert linear.prepack(model).num_packed == 1
    assert model[0][0] is model[1][0]


@needs_operators
def test_memory_limit_takes_the_largest_layers_first() -> None:
    model = nn.ModuleDict({"small": nn.Linear(256, 256), "large": nn.Linear(256, 1024)})
    report = linear.prepack(model, max_bytes=256 * 1024 * 4)
    assert (report.num_packed, report.num_left) == (1, 1)
    assert isinstance(model["large"], linear.PackedLinear)
    assert type(model["small"]) is nn.Linear


def test_other_layers_are_left_alone() -> None:
    class Special(nn.Linear):
        pass

    model = nn.ModuleList([Special(256, 256), nn.Linear(8, 8), nn.Linear(256, 256, dtype=torch.bfloat16)])
    kinds = [type(child) for child in model]
    assert linear.prepack(model).num_packed == 0
    assert [type(child) for child in model] == kinds


def test_without_the_operators_nothing_is_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "is_available", lambda: False)
    model = _model()
    assert linear.prepack(model).num_packed == 0
    assert type(model[0]) is nn.Linear
