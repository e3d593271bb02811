"""The self-test passes what is right, refuses what is subtly wrong, and leaves the model as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from engine_worker.model import attention
from engine_worker.model.attention import AttentionCall
from engine_worker.model.backend_cpu import CPUBackend
from engine_worker.model.backend_reference import ReferenceBackend
from engine_worker.model.errors import ModelError
from engine_worker.model.kv_tensors import KVTensors
from engine_worker.model.masks import CAUSAL, MaskTag
from engine_worker.model.packing import PackedBatch
from engine_worker.model.self_test import FLOAT32_LIMIT, probe_layout, run_self_test
from tests.engine_worker.model.tiny_models import FAMILIES, tiny_model

pytestmark = pytest.mark.engine


class Altered(CPUBackend):
    """A backend with a fault: every call is changed before it is answered."""

    def __init__(self, change: Callable[[AttentionCall], AttentionCall]) -> None:
        super().__init__()
        self.change = change

    def attend(self, call: AttentionCall, batch: PackedBatch, kv: KVTensors) -> torch.Tensor:
        return super().attend(self.change(call), batch, kv)


def ignore_mask(call: AttentionCall) -> AttentionCall:
    return replace(call, mask=CAUSAL)


def drop_sinks(call: AttentionCall) -> AttentionCall:
    return replace(call, sinks=None)


def drop_softcap(call: AttentionCall) -> AttentionCall:
    return replace(call, softcap=None)


def scale_wrongly(call: AttentionCall) -> AttentionCall:
    return replace(call, scaling=call.scaling * 1.1)


def swap_heads(call: AttentionCall) -> AttentionCall:
    return replace(call, key=call.key.flip(1))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", [CPUBackend, ReferenceBackend])
def test_every_family_passes_by_a_wide_margin(family: str, backend: type[CPUBackend]) -> None:
    report = run_self_test(tiny_model(family), backend(), block_size=16, max_model_len=512)
    assert report.error < FLOAT32_LIMIT / 20


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "gemma2", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_pass(family: str, dtype: torch.dtype) -> None:
    run_self_test(tiny_model(family, dtype=dtype), CPUBackend(), block_size=16, max_model_len=512)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("mistral", ignore_mask),
        ("gemma3_text", ignore_mask),
        ("gemma2", ignore_mask),
        ("qwen2_moe", ignore_mask),
        ("gpt_oss", ignore_mask),
        ("gpt_oss", drop_sinks),
        ("llama", scale_wrongly),
        ("llama", swap_heads),
    ],
)
def test_a_wrong_backend_is_refused(
    family: str, change: Callable[[AttentionCall], AttentionCall], dtype: torch.dtype
) -> None:
    with pytest.raises(ModelError, match="failed the self-test"):
        run_self_test(tiny_model(family, dtype=dtype), Altered(change), block_size=16, max_model_len=512)


def test_a_softcap_left_out_is_refused() -> None:
    with pytest.raises(ModelError, match="failed the self-test"):
        run_self_test(tiny_model("gemma2"), Altered(drop_softcap), block_size=16, max_model_len=512)


@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "qwen2_moe"])
def test_windows_larger_than_the_test_are_shrunk_for_it(family: str) -> None:
    """With its window of 4,096 tokens a model that ignores it would pass; afterwards the window is 4,096 again."""
    module = tiny_model(family, sliding_window=4096)
    with pytest.raises(ModelError, match="failed the self-test"):
        run_self_test(module, Altered(ignore_mask), block_size=16, max_model_len=512)
    run_self_test(module, CPUBackend(), block_size=16, max_model_len=512)
    assert module.config.sliding_window == 4096
    for part in module.modules():
        assert getattr(part, "sliding_window", None) in (None, 4096)


def test_attention_is_set_back() -> None:
    module = tiny_model("gemma3_text")
    run_self_test(module, CPUBackend(), block_size=16, max_model_len=512)
    assert module.config._attn_implementation == attention.NAME
    with pytest.raises(ModelError):
        run_self_test(module, Altered(scale_wrongly), block_size=16, max_model_len=512)
    assert module.config._attn_implementation == attention.NAME


def test_stale_blocks_would_be_noticed() -> None:
    """A backend that writes each token one slot too far reads wrong keys."""

    class Shifted(CPUBackend):
        def attend(self, call: AttentionCall, batch: PackedBatch, kv: KVTensors) -> torch.Tensor:
            moved = replace(batch, slots=(batch.slots + 1) % (kv.num_blocks * kv.block_size), memo={})
            return super().attend(call, moved, kv)

    with pytest.raises(ModelError, match="failed the self-test"):
        run_self_test(tiny_model("llama"), Shifted(), block_size=16, max_model_len=512)


def test_a_layer_that_does_not_attend_is_refused() -> None:
    module = tiny_model("llama")
    module.model.layers[1].self_attn.layer_idx = 0
    with pytest.raises(ModelError, match=r"attended in layers \[0, 0, 2\]"):
        run_self_test(module, CPUBackend(), block_size=16, max_model_len=512)


def test_a_model_shorter_than_the_test_is_tested_within_its_length() -> None:
    report = run_self_test(tiny_model("gpt2", n_positions=12), CPUBackend(), block_size=16, max_model_len=12)
    assert report.error < FLOAT32_LIMIT


def test_the_layout_is_learnt_from_the_forward() -> None:
    """Latent attention has wider keys than values, which no common config field says."""
    for layout in (
        run_self_test(tiny_model("deepseek_v3"), CPUBackend(), block_size=16, max_model_len=512).layout,
        probe_layout(tiny_model("deepseek_v3"), CPUBackend()),
    ):
        assert [(s.num_kv_heads, s.key_dim, s.value_dim) for s in layout.layers] == [(6, 24, 12)] * 3
        assert layout.block_bytes(16) == 16 * 3 * 6 * (24 + 12) * 4


def test_masks_are_kept_as_functions() -> None:
    """What reaches a layer is the model's own mask function, evaluated on positions."""
    seen: list[MaskTag] = []

    def look(call: AttentionCall) -> AttentionCall:
        seen.append(call.mask)
        return call

    run_self_test(tiny_model("gemma3_text"), Altered(look), block_size=16, max_model_len=512)
    far = torch.tensor([100])
    near, distant = torch.tensor([99]), torch.tensor([90])
    kinds = {(mask.is_causal, bool(mask.allow(far, near)), bool(mask.allow(far, distant))) for mask in seen}
    assert kinds == {(True, True, True), (False, True, False)}
