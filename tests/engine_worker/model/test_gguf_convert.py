"""GGUF files become safetensors once, whole, with the right end tokens, whoever asks and whatever was left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine_worker.config import EngineConfig
from engine_worker.model import gguf_convert
from engine_worker.model.checkpoint import LoadedCheckpoint, load_checkpoint
from engine_worker.model.errors import ModelError
from tests.engine_worker.model.gguf_files import write_gguf
from tests.support.tiny_tokenizer import CHATML, tiny_tokenizer

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WARMGATE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "converted"


def load(path: Path, lines: list[str] | None = None) -> LoadedCheckpoint:
    return load_checkpoint(EngineConfig(model=str(path), device="cpu"), "sdpa", (lines or []).append)


def test_a_converted_file_computes_what_was_written(tmp_path: Path) -> None:
    saved = write_gguf(tmp_path / "tiny.gguf")
    loaded = load(tmp_path / "tiny.gguf")
    assert (loaded.name, loaded.architecture, loaded.dtype) == ("tiny", "LlamaForCausalLM", torch.float32)
    assert loaded.max_model_len == 256
    ids = torch.tensor([[5, 60, 7, 80]])
    with torch.no_grad():
        torch.testing.assert_close(loaded.module(ids, use_cache=False).logits, saved(ids, use_cache=False).logits)


def test_quantized_weights_become_dense(tmp_path: Path) -> None:
    saved = write_gguf(tmp_path / "tiny.gguf", quantize=True).state_dict()
    weights = load(tmp_path / "tiny.gguf").module.state_dict()
    assert weights.keys() == saved.keys()
    for name, tensor in weights.items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, saved[name], atol=float(saved[name].abs().max()) / 120, rtol=0)


def test_tokenizer_and_template_come_along(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_gguf(tmp_path / "tiny.gguf")
    bundle = load(tmp_path / "tiny.gguf").tokenizer
    assert bundle.chat_template == CHATML
    assert (bundle.special_tokens["bos_token"], bundle.special_tokens["eos_token"]) == ("<s>", "</s>")
    text = "<|im_start|>The quick brown fox, naïve 🙂<|im_end|>"
    expected = tiny_tokenizer().encode(text, add_special_tokens=False).ids
    assert Tokenizer.from_str(bundle.tokenizer_json).encode(text, add_special_tokens=False).ids == expected


def test_digits_are_split_where_the_file_says_so(tmp_path: Path) -> None:
    """Two spaces before a digit: GPT-2's expression gives the second one to the number, single digits leave it."""
    from tokenizers import Tokenizer

    def pieces(pre: str) -> list[str]:
        write_gguf(tmp_path / f"{pre}.gguf", pre=pre)
        tokenizer = Tokenizer.from_str(load(tmp_path / f"{pre}.gguf").tokenizer.tokenizer_json)
        return [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("in  2024")]

    assert pieces("default") == ["in", "Ġ", "Ġ2024"]
    assert pieces("smollm") == ["in", "ĠĠ", "2", "0", "2", "4"]


def test_tokens_that_end_a_turn_end_generation(tmp_path: Path) -> None:
    """The file names </s>; its vocabulary has <|im_end|> too, marked special, as chat models made from base ones do."""
    write_gguf(tmp_path / "tiny.gguf", eos="</s>")
    ends = {tiny_tokenizer().token_to_id(name) for name in ("</s>", "<|im_end|>")}
    assert set(load(tmp_path / "tiny.gguf").eos_token_ids) == ends


def test_the_second_load_converts_nothing(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    lines: list[str] = [""]
    first = load(tmp_path / "tiny.gguf", lines)
    assert any("converting tiny.gguf" in line for line in lines)
    monkeypatch.setattr(gguf_convert, "_convert", lambda *args: pytest.fail("converted again"))
    (tmp_path / "elsewhere").mkdir()
    moved = (tmp_path / "tiny.gguf").rename(tmp_path / "elsewhere" / "tiny.gguf")
    os.utime(moved, (1, 1))  # neither place nor time matter, the content does
    lines = [""]
    second = load(moved, lines)
    assert second.source_fingerprint == first.source_fingerprint
    assert not any("converting" in line for line in lines)
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [second_folder(cache).name]


def second_folder(cache: Path) -> Path:
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    return folder


def test_another_content_under_the_same_name_is_converted_anew(tmp_path: Path, cache: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", seed=0)
    first = load(tmp_path / "tiny.gguf")
    write_gguf(tmp_path / "tiny.gguf", seed=1)
    second = load(tmp_path / "tiny.gguf")
    assert first.source_fingerprint != second.source_fingerprint
    assert sum(path.is_dir() for path in cache.iterdir()) == 2


def test_a_conversion_that_was_killed_is_cleared_away(tmp_path: Path, cache: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    load(tmp_path / "tiny.gguf")
    folder = second_folder(cache)
    (folder / gguf_convert.MARKER).unlink()  # as if the rename had come too early
    (folder / "model.safetensors").write_bytes(b"half")
    left_over = cache / f".{folder.name}.abc.tmp"
    left_over.mkdir()
    load(tmp_path / "tiny.gguf")
    assert not left_over.exists()
    assert json.loads((folder / gguf_convert.MARKER).read_text())["source"] == "tiny.gguf"


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf")

    def fail(path: Path, folder: Path, progress: object) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_convert, "_convert", fail)
    with pytest.raises(ModelError, match=r"No space left.*WARMGATE_CACHE_DIR"):
        load(tmp_path / "tiny.gguf")
    assert [path for path in cache.iterdir() if path.is_dir()] == []


def test_workers_that_start_together_convert_once(tmp_path: Path, cache: Path) -> None:
    """Two real processes; the lock lets one convert, and both end with the same folder."""
    write_gguf(tmp_path / "tiny.gguf")
    script = (
        "import sys; from pathlib import Path; from engine_worker.model.gguf_convert import converted_folder\n"
        "print(*converted_folder(Path(sys.argv[1]), lambda line: None), sep='|')"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "tiny.gguf")]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [worker.communicate(timeout=300)[0].strip().split("|") for worker in workers]
    assert {answer[0] for answer in answers} == {str(second_folder(cache))}
    assert sum(" converted in " in answer[1] for answer in answers) == 1, answers


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a gguf file at all" * 100])
def test_damaged_files_are_refused(tmp_path: Path, cache: Path, content: bytes) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r"can't read .*bad\.gguf"):
        load(tmp_path / "bad.gguf")
    assert [path for path in cache.iterdir() if path.is_dir()] == []


def test_parts_of_a_split_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "big-00001-of-00003.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="Merge the parts"):
        load(tmp_path / "big-00001-of-00003.gguf")


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("WARMGATE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="WARMGATE_CACHE_DIR"):
        load(tmp_path / "tiny.gguf")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMGATE_CACHE_DIR", "/somewhere")
    assert gguf_convert.cache_dir() == Path("/somewhere")
    monkeypatch.delenv("WARMGATE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert gguf_convert.cache_dir() == Path("/xdg/warmgate")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert gguf_convert.cache_dir() == Path.home() / ".cache" / "warmgate"


def test_large_files_are_hashed_in_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_convert, "_FULL_HASH_BYTES", 0)
    path = tmp_path / "big"
    path.write_bytes(bytes(200_000))
    before = gguf_convert.content_digest(path)
    assert gguf_convert.content_digest(path) == before
    stat = path.stat()
    path.write_bytes(bytes(199_999) + b"x")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert gguf_convert.content_digest(path) != before
