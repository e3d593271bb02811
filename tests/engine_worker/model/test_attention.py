"""The attention function takes over what it understands and refuses the rest."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from engine_worker.core.types import BlockId, Request, SamplingParams, Segment
from engine_worker.model.attention import StepContext, paged_attention, step_context
from engine_worker.model.backend_cpu import CPUBackend
from engine_worker.model.errors import ModelError
from engine_worker.model.kv_tensors import KVTensors
from engine_worker.model.masks import CAUSAL
from engine_worker.model.packing import BlockTables, pack

pytestmark = pytest.mark.engine

NUM_TOKENS = 5


class Layer(torch.nn.Module):
    layer_idx = 0


def context() -> StepContext:
    request = Request(request_id="r", prompt_ids=(1,) * NUM_TOKENS, params=SamplingParams(max_tokens=1), arrival_s=0.0)
    segment = Segment(request, 0, request.prompt_ids, [BlockId(1), BlockId(0)], sample=True)
    batch = pack([segment], BlockTables(1, 2, 4), torch.device("cpu"))
    return StepContext(CPUBackend(), batch, KVTensors(1, 2, 4, torch.device("cpu")))


def call(module: torch.nn.Module | None = None, mask: Any = CAUSAL, **kwargs: Any) -> torch.Tensor:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, NUM_TOKENS, 8) for heads in (4, 2, 2))
    with step_context(context()):
        return paged_attention(module or Layer(), query, key, value, mask, **kwargs)[0]


def test_output_has_tokens_before_heads() -> None:
    """[1, T, H, D]: with H and T swapped a model would run on, and wrongly."""
    assert call().shape == (1, NUM_TOKENS, 4, 8)


def test_scaling_defaults_to_the_inverse_root_of_the_head_size() -> None:
    assert torch.equal(call(), call(scaling=8**-0.5))
    assert not torch.allclose(call(), call(scaling=1.0))


def test_what_says_nothing_new_is_accepted() -> None:
    expected = call()
    position_ids = torch.arange(NUM_TOKENS)[None]
    assert torch.equal(call(position_ids=position_ids, use_cache=False, sliding_window=3, other=None), expected)


@pytest.mark.parametrize("name", ["position_bias", "alibi", "head_mask"])
def test_unknown_arguments_are_refused_by_name(name: str) -> None:
    with pytest.raises(ModelError, match=name):
        call(**{name: torch.zeros(1)})


def test_bidirectional_layers_are_refused() -> None:
    with pytest.raises(ModelError, match="later tokens"):
        call(is_causal=False)
    layer = Layer()
    layer.is_causal = False
    with pytest.raises(ModelError, match="later tokens"):
        call(layer)


@pytest.mark.parametrize("mask", [None, torch.zeros(1, 1, 5, 5)])
def test_masks_that_are_no_functions_are_refused(mask: Any) -> None:
    with pytest.raises(ModelError, match="hides its mask"):
        call(mask=mask)


def test_outside_a_step_there_is_no_attention() -> None:
    with pytest.raises(AssertionError, match="outside a step"):
        paged_attention(Layer(), *(torch.zeros(1, 1, 1, 8) for _ in range(3)), CAUSAL)


def test_a_step_ends_with_its_error() -> None:
    with pytest.raises(ModelError):
        call(position_bias=torch.zeros(1))
    test_outside_a_step_there_is_no_attention()


def test_threads_have_their_own_steps() -> None:
    """Two engines in one process: a thread never sees the other's step."""
    seen: list[str] = []

    def other() -> None:
        try:
            test_outside_a_step_there_is_no_attention()
            seen.append("none")
        except BaseException as error:
            seen.append(repr(error))

    with step_context(context()):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen == ["none"]
