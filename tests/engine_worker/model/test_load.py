"""load_model puts the parts together, and says in one sentence why it can't."""

from __future__ import annotations

import gc
import re
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine_worker.config import EngineConfig
from engine_worker.core.types import BlockId, Request, SamplingParams, Segment, StepPlan
from engine_worker.model import load, mask_kinds, self_test
from engine_worker.model.backend_cpu import CPUBackend
from engine_worker.model.backend_reference import ReferenceBackend
from engine_worker.model.errors import ModelError
from engine_worker.model.kv_format import DENSE, FP4
from engine_worker.model.kv_room import plan_layout
from engine_worker.model.load import load_model
from engine_worker.model.memory import NotEnoughMemory
from engine_worker.model.native import library as native
from engine_worker.model.self_test import probe_layout
from tests.engine_worker.model.interpreted import triton_backend
from tests.engine_worker.model.tiny_models import tiny_config, tiny_model

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def _keep_threads():  # type: ignore[no-untyped-def]
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def config_for(folder: Path, family: str = "gemma3_text", **changes: object) -> EngineConfig:
    """Settings for a model that exists as a config.json alone."""
    tiny_config(family, **changes).save_pretrained(folder)
    return EngineConfig(
        model=str(folder), load_format="dummy", dtype="float32", device="cpu", kv_cache_memory=1 << 22, num_threads=1
    )


def test_a_loaded_model_executes_plans(tmp_path: Path) -> None:
    messages: list[str] = []
    runner = load_model(config_for(tmp_path), messages.append)
    info = runner.info
    assert info.architecture == "Gemma3ForCausalLM"
    assert (info.num_layers, info.block_size, info.dtype, info.device) == (3, 16, "float32", "cpu")
    expected = "cpu" if native.current() is None else "native"
    assert (info.attention_backend, info.num_threads, info.max_model_len) == (expected, 1, 512)
    assert info.kv_block_bytes == 16 * 3 * 2 * 8 * 2 * 4
    assert info.num_blocks == (1 << 22) // info.kv_block_bytes
    assert "self-test passed" in info.detail
    assert any("self-test passed" in message for message in messages)
    assert all("\n" not in message for message in messages)

    request = Request(
        request_id="r", prompt_ids=(5, 6, 7), params=SamplingParams(max_tokens=1, temperature=0.0), arrival_s=0.0
    )
    plan = StepPlan((Segment(request, 0, request.prompt_ids, [BlockId(3)], sample=True),))
    first = runner.execute(plan).sampled["r"].token_id
    assert 0 <= first < info.vocab_size
    assert runner.execute(plan).sampled["r"].token_id == first
    runner.release("r")
    runner.check_invariants()


@pytest.mark.parametrize("quantization", ["", "int8"])
def test_the_memory_of_a_model_that_nobody_has_is_free_at_once(quantization: str, tmp_path: Path) -> None:
    """Without a garbage collection, which may be long in coming: a fused layer must not hold itself."""
    config = replace(config_for(tmp_path, "llama"), quantization=quantization)
    runner = load_model(config, lambda line: None)
    parts = [weakref.ref(part) for part in runner._model.module.modules()]
    assert len(parts) > 20
    gc.collect()
    gc.disable()
    try:
        del runner
        assert [part() for part in parts if part() is not None] == []
    finally:
        gc.enable()


def test_the_cache_root_tells_apart_what_must_not_share_blocks(tmp_path: Path) -> None:
    config = config_for(tmp_path / "a")
    roots = {
        "same": load_model(config, lambda _: None).info.cache_root,
        "again": load_model(config, lambda _: None).info.cache_root,
        "seed": load_model(replace(config, seed=1), lambda _: None).info.cache_root,
        "dtype": load_model(replace(config, dtype="bfloat16"), lambda _: None).info.cache_root,
        "model": load_model(config_for(tmp_path / "b", hidden_size=96), lambda _: None).info.cache_root,
    }
    assert roots["same"] == roots["again"]
    assert len(set(roots.values())) == 4
    assert all(len(root) == 32 for root in roots.values())


def test_frozen_rope_is_part_of_the_cache_root(tmp_path: Path) -> None:
    """Long and short factors give other keys for the same tokens."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 64,
    }
    config = config_for(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=64)
    long = load_model(config, lambda _: None).info
    short = load_model(replace(config, max_model_len=64), lambda _: None).info
    assert "long factors" in long.detail
    assert "short factors" in short.detail
    assert long.cache_root != short.cache_root


def test_a_length_that_rope_caps_is_reported_everywhere(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    runner = load_model(config_for(tmp_path, "llama", rope_parameters=rope), lambda _: None)
    assert runner.info.max_model_len == runner.tokenizer.max_model_len == 512
    assert "dynamic RoPE" in runner.info.detail


def test_a_model_that_fails_its_self_test_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "FLOAT32_LIMIT", 0.0)
    with pytest.raises(ModelError, match="failed the self-test"):
        load_model(config_for(tmp_path), lambda _: None)


def test_the_self_test_can_be_switched_off_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def must_not_run(*_: object) -> None:
        raise AssertionError("the self-test ran")

    monkeypatch.setattr(load, "run_self_test", must_not_run)
    runner = load_model(replace(config_for(tmp_path), self_test=False), lambda _: None)
    assert "self-test switched off" in runner.info.detail
    assert runner.info.kv_block_bytes == 16 * 3 * 2 * 8 * 2 * 4


@pytest.mark.parametrize("family", ["falcon", "bloom", "mamba"])
def test_refused_families_are_refused_before_their_weights_are_read(family: str, tmp_path: Path) -> None:
    tiny_config(family).save_pretrained(tmp_path)
    messages: list[str] = []
    with pytest.raises(ModelError, match="another engine behind the gateway"):
        load_model(EngineConfig(model=str(tmp_path), load_format="dummy", num_threads=1), messages.append)
    assert not any(message.startswith("loading") for message in messages)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("choice", ["auto", "off"])
def test_quantized_weights_are_smaller_and_say_what_they_bought(
    kind: str, choice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernels and without, at widths that groups of 32 fit."""
    monkeypatch.setattr(native, "_State", type("_State", (), {"library": None, "status": "", "is_loaded": False}))
    monkeypatch.setenv("WARMGATE_NATIVE", choice)
    tiny_config("llama", hidden_size=96, intermediate_size=128).save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), load_format="dummy", num_threads=1, max_model_len=64, dtype="float32")
    dense = load_model(config, lambda _: None).info
    messages: list[str] = []
    narrow = load_model(replace(config, quantization=kind, kv_cache_dtype="int8"), messages.append).info
    assert narrow.kv_block_bytes_saved > 0 == dense.kv_block_bytes_saved
    assert f"{1 + narrow.kv_block_bytes_saved / narrow.kv_block_bytes:.2f} times the KV blocks" in narrow.detail
    assert narrow.weight_bytes < dense.weight_bytes * (0.7 if kind == "int8" else 0.65)
    found = re.search(r"saved by int\d: room for (\d+) KV blocks", narrow.detail)
    assert found is not None
    assert int(found[1]) == narrow.num_blocks_bought > 20
    assert narrow.quantization == kind
    assert narrow.weight_bytes_saved > 0 == dense.weight_bytes_saved == dense.num_blocks_bought
    assert any(found[0] in message for message in messages)
    assert narrow.cache_root != dense.cache_root


def test_quantizations_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for kind, sentence in (("int3", "There is no quantization"), ("fp8", "needs a CUDA device")):
        with pytest.raises(ModelError, match=sentence):
            load_model(EngineConfig(model=str(tmp_path), quantization=kind, device="cpu"), lambda _: None)


def test_too_little_memory_for_one_sequence_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotEnoughMemory, match="max-model-len"):
        load_model(replace(config_for(tmp_path), kv_cache_memory=20_000), lambda _: None)


def test_too_little_kv_memory_is_refused_before_the_weights_are_read(tmp_path: Path) -> None:
    messages: list[str] = []
    with pytest.raises(NotEnoughMemory, match="--kv-cache-memory"):
        load_model(replace(config_for(tmp_path), kv_cache_memory=20_000), messages.append)
    assert not any(message.startswith("loading") for message in messages)
    # a quarter of the room per token, so the same memory holds a sequence
    layout, length = plan_layout(tiny_config("llama"), torch.float32, 64, FP4) or (None, 0)
    assert layout is not None
    assert length == 64
    assert layout.block_bytes(16) == 16 * 3 * 2 * 2 * (8 + 1)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "phi3", "gpt_oss", "deepseek_v3"])
def test_the_planned_layout_is_the_one_that_loading_finds(family: str) -> None:
    found = probe_layout(tiny_model(family), ReferenceBackend())
    planned = plan_layout(tiny_config(family), torch.float32, 512, DENSE)
    assert planned is not None
    assert planned[0] == found


@pytest.mark.parametrize("name", ["int8", "fp8", "fp4", "k8v4"])
def test_a_quantized_cache_is_tested_at_load_and_says_what_it_brings(name: str, tmp_path: Path) -> None:
    config = config_for(tmp_path)
    dense = load_model(config, lambda _: None).info
    messages: list[str] = []
    narrow = load_model(replace(config, kv_cache_dtype=name), messages.append).info
    assert (narrow.kv_cache_dtype, dense.kv_cache_dtype) == (name, "float32")
    assert narrow.kv_block_bytes < dense.kv_block_bytes / 2
    assert f"KV cache in {name} reads as it should" in narrow.detail
    assert "times the KV blocks of a 16-bit cache" in narrow.detail
    assert any("times the KV blocks" in message for message in messages)
    assert narrow.cache_root != dense.cache_root


def test_a_backend_that_misreads_a_quantized_cache_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = CPUBackend.attend

    def spoils(self: CPUBackend, call, batch, kv):  # type: ignore[no-untyped-def]
        found = attend(self, call, batch, kv)
        scales = kv.rows(call.layer)[0].scales
        if scales is not None:
            scales.mul_(1.5)  # what later chunks read
        return found

    monkeypatch.setattr(CPUBackend, "attend", spoils)
    config = replace(config_for(tmp_path), kv_cache_dtype="int8", attention_backend="cpu")
    with pytest.raises(ModelError, match="KV cache in int8"):
        load_model(config, lambda _: None)


def test_unknown_kv_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="auto, int8, fp8, fp4"):
        load_model(replace(config_for(tmp_path), kv_cache_dtype="int2"), lambda _: None)


def test_unknown_backends_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="auto, reference, cpu, native, triton or flashinfer"):
        load_model(replace(config_for(tmp_path), attention_backend="flash"), lambda _: None)
    runner = load_model(replace(config_for(tmp_path), attention_backend="reference"), lambda _: None)
    assert runner.info.attention_backend == "reference"


def test_masks_that_the_kernels_do_not_know_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    triton_backend()  # skips the test where it can't be had
    config = replace(config_for(tmp_path), attention_backend="triton", self_test=False)
    messages: list[str] = []
    assert "warning" not in load_model(config, messages.append).info.detail
    monkeypatch.setattr(mask_kinds, "_recognise", lambda *_: None)
    detail = load_model(config, messages.append).info.detail
    warning = next(line for line in messages if line.startswith("warning: attention masks"))
    assert "sliding_window_overlay" in warning
    assert warning in detail
