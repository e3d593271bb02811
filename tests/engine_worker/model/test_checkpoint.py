"""Loading checkpoints: what comes out is the checkpoint, and what can't be served is refused with a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from tokenizers import Tokenizer

from engine_worker.config import EngineConfig
from engine_worker.model import checkpoint, memory
from engine_worker.model.checkpoint import LoadedCheckpoint, load_checkpoint
from engine_worker.model.checkpoint_dtype import choose_device, choose_dtype, cpu_has_bf16
from engine_worker.model.checkpoint_files import longest_context
from engine_worker.model.errors import ModelError
from tests.engine_worker.model.checkpoints import EOS_TOKEN, edit_json, save_checkpoint, save_config, save_tokenizer

pytestmark = pytest.mark.engine


def load(folder: Path, **settings: Any) -> LoadedCheckpoint:
    return load_checkpoint(EngineConfig(model=str(folder), device="cpu", **settings), "sdpa", lambda message: None)


def refusal(folder: Path, **settings: Any) -> str:
    with pytest.raises(ModelError) as raised:
        load(folder, **settings)
    return str(raised.value)


# ---- what a load gives


def test_a_checkpoint_loads_as_it_was_saved(tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path / "tiny-llama")
    loaded = load(tmp_path / "tiny-llama")
    state = loaded.module.state_dict()
    assert state.keys() == saved.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in saved.state_dict().items())
    assert (loaded.name, loaded.architecture, loaded.dtype) == ("tiny-llama", "LlamaForCausalLM", torch.float32)
    assert loaded.weight_bytes >= sum(tensor.numel() for tensor in state.values()) * 4
    assert not loaded.module.training
    assert not any(parameter.requires_grad for parameter in loaded.module.parameters())
    assert loaded.hf_config.use_cache is False
    with torch.no_grad():
        ids = torch.tensor([[5, 6, 7]])
        torch.testing.assert_close(loaded.module(ids, use_cache=False).logits, saved(ids, use_cache=False).logits)


def test_a_sharded_checkpoint_loads_whole(tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    state = load(tmp_path).module.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in saved.state_dict().items())


def test_tied_weights_count_once(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "untied")
    save_checkpoint(tmp_path / "tied", tie_word_embeddings=True)
    assert load(tmp_path / "untied").weight_bytes - load(tmp_path / "tied").weight_bytes == 600 * 32 * 4


def test_every_place_that_names_an_end_token_counts(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    edit_json(tmp_path / "generation_config.json", eos_token_id=[9, 10, 100_000])
    loaded = load(tmp_path)
    end = Tokenizer.from_str(loaded.tokenizer.tokenizer_json).token_to_id(EOS_TOKEN)
    assert loaded.eos_token_ids == tuple(sorted({2, 9, 10, end}))


def test_the_fingerprint_follows_weights_and_configuration(tmp_path: Path) -> None:
    for name, settings in {"a": {}, "b": {}, "other": {"seed": 1}, "theta": {"rope_theta": 5e5}}.items():
        save_checkpoint(tmp_path / name, **settings)
    prints = {name: load(tmp_path / name).source_fingerprint for name in ("a", "b", "other", "theta")}
    assert len(prints["a"]) == 32
    assert prints["a"] == prints["b"]
    assert len(set(prints.values())) == 3


# ---- formats and devices


@pytest.mark.parametrize(
    ("requested", "stored", "device", "has_bf16", "expected"),
    [
        ("auto", torch.bfloat16, "cpu", False, torch.float32),
        ("auto", torch.bfloat16, "cpu", True, torch.bfloat16),
        ("auto", torch.float16, "cpu", True, torch.float32),
        ("auto", torch.float32, "cpu", True, torch.float32),
        ("auto", torch.float16, "cuda", False, torch.float16),
        ("auto", torch.float32, "cuda", False, torch.float32),
        ("auto", None, "cpu", True, torch.float32),
        ("auto", torch.float8_e4m3fn, "cpu", False, torch.float32),
        ("float32", torch.bfloat16, "cpu", True, torch.float32),
        ("bfloat16", torch.float32, "cpu", True, torch.bfloat16),
    ],
)
def test_dtype_is_native_to_the_device(
    requested: str, stored: torch.dtype | None, device: str, has_bf16: bool, expected: torch.dtype
) -> None:
    assert choose_dtype(requested, stored, torch.device(device), cpu_bf16=has_bf16) == (expected, "")


@pytest.mark.parametrize(
    ("hidden_size", "stored", "expected"),
    [
        (1024, torch.bfloat16, torch.float32),
        (2048, torch.bfloat16, torch.bfloat16),
        (2048, torch.float16, torch.float32),
    ],
)
def test_narrow_models_run_in_float32_where_the_kernels_are_faster(
    hidden_size: int, stored: torch.dtype, expected: torch.dtype
) -> None:
    where = torch.device("cpu")
    assert choose_dtype("auto", stored, where, hidden_size=hidden_size, cpu_bf16=True) == (expected, "")
    asked = choose_dtype("bfloat16", stored, where, hidden_size=hidden_size, cpu_bf16=True)
    assert asked == (torch.bfloat16, "")


def test_a_checkpoints_width_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_worker.model.checkpoint_dtype.cpu_has_bf16", lambda: True)
    save_checkpoint(tmp_path, dtype=torch.bfloat16)
    for dtype, expected in (("auto", torch.float32), ("bfloat16", torch.bfloat16)):
        config = EngineConfig(model=str(tmp_path), device="cpu", dtype=dtype)
        assert load_checkpoint(config, "sdpa", lambda line: None).dtype == expected


@pytest.mark.parametrize("requested", ["bfloat16", "float16"])
def test_a_slow_dtype_is_allowed_with_a_warning(requested: str) -> None:
    dtype, warning = choose_dtype(requested, torch.float32, torch.device("cpu"), cpu_bf16=False)
    assert dtype == getattr(torch, requested)
    assert warning.startswith("WARNING")
    assert "300 times" in warning


def test_cpu_flags_decide_about_bfloat16(tmp_path: Path) -> None:
    for text, expected in {
        "processor : 0\nflags\t\t: fpu avx2 avx512_bf16 amx_tile\n": True,
        "Features\t: fp asimd bf16 i8mm\n": True,
        "flags\t\t: fpu avx2 avx512f avx512bw\n": False,
        "model name : amx_bf16 in a name\n": False,
    }.items():
        (tmp_path / "cpuinfo").write_text(text)
        assert cpu_has_bf16(tmp_path / "cpuinfo") is expected, text
    assert cpu_has_bf16(tmp_path / "missing") is False


def test_half_precision_checkpoints_load_in_float32_where_the_cpu_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save_checkpoint(tmp_path, dtype=torch.float16)
    loaded = load(tmp_path)
    assert loaded.dtype == torch.float32
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(loaded.module.state_dict()[name], saved.state_dict()[name].float())
    assert load(tmp_path, dtype="bfloat16").module.state_dict()[name].dtype == torch.bfloat16


def test_unknown_dtypes_and_devices_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    assert "Use auto, float32, bfloat16 or float16" in refusal(tmp_path, dtype="int4")
    assert "Use auto or dummy" in refusal(tmp_path, load_format="pickle")
    for device in ("banana", "mps"):
        with pytest.raises(ModelError, match="Use auto, cpu or cuda"):
            choose_device(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused() -> None:
    with pytest.raises(ModelError, match="finds no CUDA device"):
        choose_device("cuda")
    assert choose_device("auto") == torch.device("cpu")


# ---- lengths


def test_max_model_len_is_the_models_or_a_smaller_override(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    assert load(tmp_path).max_model_len == 256
    loaded = load(tmp_path, max_model_len=100)
    assert (loaded.max_model_len, loaded.tokenizer.max_model_len) == (100, 100)
    assert "256 tokens at most" in refusal(tmp_path, max_model_len=257)
    assert "at least 1" in refusal(tmp_path, max_model_len=0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 4096, "max_seq_len": 2048}, 2048),
        ({}, None),
        (
            {
                "max_position_embeddings": 32768,
                "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"type": "yarn", "factor": 32, "original_max_position_embeddings": 4096},
            },
            131072,
        ),
        ({"max_position_embeddings": 131072, "rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        (
            {
                "max_position_embeddings": 8192,
                "rope_parameters": {
                    "full_attention": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8192},
                    "sliding_attention": {"rope_type": "default"},
                },
            },
            16384,
        ),
    ],
)
def test_the_longest_context_is_found_under_every_name(fields: dict[str, Any], expected: int | None) -> None:
    assert longest_context(SimpleNamespace(**fields)) == expected


# ---- refusals


def test_missing_weights_are_refused_not_invented(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    sentence = refusal(tmp_path)
    assert "lacks weights" in sentence
    assert "model.layers.1.mlp.up_proj.weight" in sentence


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    edit_json(tmp_path / "config.json", intermediate_size=64)
    sentence = refusal(tmp_path)
    assert "other shapes than its config.json says" in sentence
    assert "mlp.down_proj.weight" in sentence


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    for kept in (path.stat().st_size - 10, 100, 3):
        path.write_bytes(path.read_bytes()[:kept])
        assert "no sound safetensors file" in refusal(tmp_path)


def test_a_missing_shard_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, max_shard_size="50KB")
    next(iter(sorted(tmp_path.glob("*-00002-*.safetensors")))).unlink()
    assert "Download it again" in refusal(tmp_path)


def test_pickled_weights_are_refused_unopened(tmp_path: Path) -> None:
    save_config(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    sentence = refusal(tmp_path)
    assert "pickle" in sentence
    assert "safetensors" in sentence


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, "no config.json"),
        ({"model.gguf": ""}, "Name one of them"),
        ({"config.json": "{"}, "can't be read as JSON"),
        ({"config.json": "[]"}, "no JSON object"),
        ({"config.json": '{"model_type": "llama"}'}, "--load-format dummy"),
    ],
)
def test_folders_that_are_no_checkpoints(tmp_path: Path, files: dict[str, str], wanted: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert wanted in refusal(tmp_path)


def test_unknown_architectures_and_foreign_code(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    edit_json(tmp_path / "config.json", model_type="never-heard-of")
    assert "never-heard-of" in refusal(tmp_path)
    edit_json(tmp_path / "config.json", auto_map={"AutoConfig": "custom.Config"})
    assert "--trust-remote-code" in refusal(tmp_path)


def test_a_checkpoint_without_tokenizer_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    assert "no tokenizer files" in refusal(tmp_path)


def test_weights_that_cannot_fit_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path)
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1000)
    monkeypatch.setattr(checkpoint, "_load_weights", lambda *args: pytest.fail("weights were read"))
    sentence = refusal(tmp_path)
    assert "1000 B are free" in sentence


# ---- dummy weights


def test_dummy_weights_need_a_configuration_alone(tmp_path: Path) -> None:
    save_config(tmp_path / "llama")
    loaded = load(tmp_path / "llama", load_format="dummy")
    again = load(tmp_path / "llama", load_format="dummy")
    other = load(tmp_path / "llama", load_format="dummy", seed=1)
    weights = loaded.module.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in again.module.state_dict().items())
    assert loaded.source_fingerprint == again.source_fingerprint
    assert loaded.source_fingerprint != other.source_fingerprint
    name = "model.layers.0.mlp.up_proj.weight"
    assert float(weights[name].std()) == pytest.approx(0.02, rel=0.1)
    assert not torch.equal(weights[name], other.module.state_dict()[name])
    assert any("stand-in tokenizer" in line for line in loaded.details)
    with torch.no_grad():
        assert torch.isfinite(loaded.module(torch.tensor([[1, 2, 3]]), use_cache=False).logits).all()


def test_dummy_weights_leave_the_global_random_state_alone(tmp_path: Path) -> None:
    save_config(tmp_path)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    load(tmp_path, load_format="dummy")
    assert torch.equal(torch.rand(4), expected)


def test_dummy_weights_take_dtype_and_a_real_tokenizer(tmp_path: Path) -> None:
    save_config(tmp_path)
    save_tokenizer(tmp_path)
    loaded = load(tmp_path, load_format="dummy", dtype="bfloat16")
    assert {tensor.dtype for tensor in loaded.module.parameters()} == {torch.bfloat16}
    assert loaded.tokenizer.special_tokens["eos_token"] == EOS_TOKEN
    assert not any("stand-in" in line for line in loaded.details)


@pytest.mark.parametrize("vocab_size", [60, 259, 1000, 50_000])
def test_the_stand_in_tokenizer_covers_any_vocabulary(tmp_path: Path, vocab_size: int) -> None:
    save_config(tmp_path, vocab_size=vocab_size)
    bundle = load(tmp_path, load_format="dummy").tokenizer
    tokenizer = Tokenizer.from_str(bundle.tokenizer_json)
    assert tokenizer.get_vocab_size() == vocab_size
    text = "Grüße, 日本 🙂\n" if vocab_size >= 259 else "AB12 %!"
    ids = tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>", add_special_tokens=False).ids
    assert max(ids) < vocab_size
    assert (ids[0], ids[-1]) == (1, 2)
    if vocab_size >= 259:
        assert len(ids) == 2 + len(f"user\n{text}".encode())
        assert tokenizer.decode(ids, skip_special_tokens=True) == f"user\n{text}"
    if vocab_size > 300:
        assert tokenizer.decode([300, 301]) == " w300 w301"


def test_impossible_configurations_are_refused(tmp_path: Path) -> None:
    save_config(tmp_path)
    edit_json(tmp_path / "config.json", hidden_size=-8)
    assert "config.json" in refusal(tmp_path, load_format="dummy")
    assert json.loads((tmp_path / "config.json").read_text())["hidden_size"] == -8
