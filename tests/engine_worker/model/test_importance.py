"""Which inputs are large, as the model's own reading tells it, and int4's rounding that minds them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from engine_worker.config import EngineConfig
from engine_worker.model import attention
from engine_worker.model.checkpoint import load_checkpoint
from engine_worker.model.importance import MAX_TOKENS, MIN_TOKENS, importance_from, importance_of, measure_importance
from engine_worker.model.native.kernels import quantize
from tests.engine_worker.model.checkpoints import save_checkpoint

pytestmark = pytest.mark.engine


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _weighed_errors(weight: torch.Tensor, found: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    return ((weight - found).double().square() * importance).unflatten(1, (-1, 32)).sum(2)


def test_weighed_int4_errs_no_more_than_rounding_from_least_to_largest() -> None:
    weight, importance = _random(64, 128), torch.exp2(_random(128, seed=1) * 3)
    groups = weight.unflatten(1, (-1, 32))
    low = groups.amin(2, keepdim=True).half().float()
    scale = ((groups.amax(2, keepdim=True) - groups.amin(2, keepdim=True)) / 15).half().float()
    plain = (((groups - low) / scale).round().clamp(0, 15) * scale + low).flatten(1)
    found = _weighed_errors(weight, quantize(weight, "int4", importance=importance).dequantize(), importance)
    assert (found <= _weighed_errors(weight, plain, importance) * (1 + 1e-5)).all()
    unweighed = _weighed_errors(weight, quantize(weight, "int4").dequantize(), importance)
    assert found.sum() < 0.8 * unweighed.sum(), "that it weighs is seen"


def test_weighed_int4_gives_back_what_was_on_a_grid() -> None:
    q = torch.randint(0, 16, (40, 4, 32), generator=torch.Generator().manual_seed(0)).float()
    q[:, :, 0], q[:, :, 1] = 0, 15
    scale, minimum = (_random(40, 4, 1).abs() + 0.01).half().float(), _random(40, 4, 1, seed=1).half().float()
    weight = (q * scale + minimum).flatten(1)
    importance = torch.exp2(_random(128, seed=2) * 3)
    assert torch.equal(quantize(weight, "int4", importance=importance).dequantize(), weight)


def test_equal_importance_is_none() -> None:
    weight = _random(32, 64)
    ours, theirs = quantize(weight, "int4", importance=torch.full((64,), 4.0)), quantize(weight, "int4")
    assert torch.equal(ours.dequantize(), theirs.dequantize())


def test_importance_follows_the_mean_square_and_is_above_0() -> None:
    x = _random(4, 100, 8)
    x[..., 2] *= 16
    x[..., 5] = 0
    found = importance_from(x)
    assert found is not None
    assert (found > 0).all()
    assert 2**6 <= found[2] / found[0] <= 2**9
    assert found[5] == found.min()


def test_one_huge_token_counts_as_a_usual_one() -> None:
    x = _random(1, 200, 8)
    usual = importance_from(x)
    x[0, 0, 3] = 1e4
    found = importance_from(x)
    assert usual is not None
    assert found is not None
    assert 0.5 <= found[3] / usual[3] <= 2


@pytest.mark.parametrize("x", [torch.zeros(1, 99, 8), torch.zeros(1, 0, 8), torch.full((1, 99, 8), torch.nan)], ids=str)
def test_inputs_that_tell_nothing_leave_no_importance(x: torch.Tensor) -> None:
    assert importance_from(x) is None


def test_few_tokens_leave_no_importance() -> None:
    """One token's inputs say so little about the next ones' that weighing by them makes int4 worse."""
    x, weight = _random(2000, 128), _random(64, 128, seed=1)
    plain = quantize(weight, "int4").dequantize()

    def error(found: torch.Tensor) -> float:
        return float((x @ (found - weight).T).square().sum())

    first = x[0].square() + 1e-3
    assert error(quantize(weight, "int4", importance=first).dequantize()) > 1.2 * error(plain)
    assert importance_from(x[: MIN_TOKENS - 1]) is None
    assert importance_from(x[:MIN_TOKENS]) is not None


def test_a_model_reads_once_and_is_left_as_it_was(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model")
    attention.register()
    config = EngineConfig(model=str(tmp_path / "model"), device="cpu", dtype="float32")
    checkpoint = load_checkpoint(config, attention.NAME, lambda message: None)
    module = checkpoint.module
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    read = measure_importance(module, checkpoint.tokenizer.tokenizer_json, checkpoint.max_model_len)
    assert 0 < read <= min(MAX_TOKENS, checkpoint.max_model_len)
    linears = [part for part in module.modules() if type(part) is nn.Linear]
    assert linears
    for linear in linears:
        importance = importance_of(linear)
        assert importance is not None
        assert importance.shape == (linear.in_features,)
        assert not linear._forward_pre_hooks
    assert module.config._attn_implementation == attention.NAME
    after = module.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
