"""GGUF to safetensors, once: dequantising and rebuilding the tokenizer takes half a minute, loading the result two
seconds.

Conversions live in the cache folder under the file's name, the hash of its content and the converter's version. A
conversion is written into a temporary folder and renamed when whole, under a file lock: two workers that start together
convert once, and a killed one leaves nothing that could be taken for a model.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine_worker.model.checkpoint_source import Progress, first_line
from engine_worker.model.errors import ModelError

CONVERTER_VERSION = 2  # raise it whenever the conversion's result changes
MARKER = "warmgate.json"  # written last, so that its presence means whole

_FULL_HASH_BYTES = 1 << 30  # larger files are hashed in samples
_SAMPLE_BYTES = 1 << 16
_NUM_SAMPLES = 1024
_FLOAT32_MAX_BYTES = 2 << 30  # a larger GGUF is kept in bfloat16: its float32 copy would be many times its size

# Tokens that end a turn. A GGUF names one EOS; llama.cpp, too, ends at any of these that the vocabulary marks special.
_END_OF_TURN = frozenset(
    (
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
        *("<|return|>", "<|call|>", "<|END_OF_TURN_TOKEN|>", "<|user|>", "<|observation|>", "<turn|>"),
    )
)
_CONTROL_TOKEN = 3  # GGUF's token types: special ones,
_USER_TOKEN = 4  # and ones that are matched whole in text but are no special ones

# Pre-tokenizers (tokenizer.ggml.pre) that split digits one by one before GPT-2's expression, which transformers drops.
_SINGLE_DIGITS = frozenset(["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"])


def cache_dir() -> Path:
    """Where conversions are kept: WARMGATE_CACHE_DIR, or XDG_CACHE_HOME/warmgate, or ~/.cache/warmgate."""
    if chosen := os.environ.get("WARMGATE_CACHE_DIR"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "warmgate"


def converted_folder(path: Path, progress: Progress) -> tuple[Path, str]:
    """The folder with `path` as safetensors, and a line about it. Converts if no one has yet; raises ModelError."""
    from filelock import FileLock, Timeout

    if re.search(r"-\d{5}-of-\d{5}\.gguf$", path.name):
        raise ModelError(f"{path} is one part of a split GGUF. Merge the parts first: llama-gguf-split --merge.")
    try:
        digest = content_digest(path)
        target = cache_dir() / "converted" / f"{path.stem}-{digest[:16]}-v{CONVERTER_VERSION}"
        if (target / MARKER).is_file():
            return target, f"{path.name} was converted earlier"
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(target.with_name(target.name + ".lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            progress(f"waiting for another worker that is converting {path.name}")
            lock.acquire()
        try:
            if (target / MARKER).is_file():
                return target, f"{path.name} was converted by another worker"
            return target, _convert_into(path, target, progress)
        finally:
            lock.release()
    except OSError as error:
        raise ModelError(
            f"{path} could not be converted under {cache_dir()}: {first_line(error)}. Free some space there, or set "
            "WARMGATE_CACHE_DIR to a folder with room for the model in full precision."
        ) from error


def content_digest(path: Path) -> str:
    """SHA-256 over the file's content. Beyond 1 GiB: over its size, its time of change and 1,024 samples of 64 KiB."""
    stat = path.stat()
    digest = hashlib.sha256(str(stat.st_size).encode())
    with path.open("rb") as file:
        if stat.st_size <= _FULL_HASH_BYTES:
            for chunk in iter(lambda: file.read(1 << 20), b""):
                digest.update(chunk)
        else:
            digest.update(str(stat.st_mtime_ns).encode())
            for i in range(_NUM_SAMPLES):
                file.seek(i * (stat.st_size - _SAMPLE_BYTES) // (_NUM_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _convert_into(path: Path, target: Path, progress: Progress) -> str:
    """Convert under a temporary name beside `target` and rename. The caller holds the lock."""
    for left_over in target.parent.glob(f".{glob_escape(target.name)}.*.tmp"):
        shutil.rmtree(left_over, ignore_errors=True)  # from a process that was killed: we hold the lock
    shutil.rmtree(target, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    started = time.monotonic()
    progress(f"converting {path.name} to safetensors, once (about 30 s for the demo model)")
    try:
        with _quiet():
            _convert(path, temporary, progress)
        temporary.chmod(0o755)
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    line = f"{path.name} converted in {time.monotonic() - started:.0f} s"
    progress(line)
    return line


def _convert(path: Path, folder: Path, progress: Progress) -> None:
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype = torch.float32 if path.stat().st_size <= _FLOAT32_MAX_BYTES else torch.bfloat16
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        reader = GGUFReader(path)
        tokenizer = AutoTokenizer.from_pretrained(**where)
        _split_digits(reader, tokenizer)
        _set_special_tokens(reader, tokenizer)
        tokenizer.save_pretrained(folder)
        progress("converting: the tokenizer is done, now the weights")
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=dtype, **_dense())
        eos_token_ids = _eos_token_ids(reader, model.config)
        model.generation_config.eos_token_id = eos_token_ids
        model.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # whatever a malformed or unsupported file makes the reader raise
        raise ModelError(
            f"transformers can't read {path}: {first_line(error)}. Take the model's safetensors version instead."
        ) from error
    marker = {"source": path.name, "converter_version": CONVERTER_VERSION, "eos_token_ids": eos_token_ids}
    (folder / MARKER).write_text(json.dumps(marker), encoding="utf-8")


def _dense() -> dict[str, Any]:
    """Ask for dense weights: newer transformers otherwise keep GGUF blocks, which are slow; older always dequantise."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _split_digits(reader: Any, tokenizer: Any) -> None:
    """Give the tokenizer the digit splitting that the file names, if its conversion left it out."""
    from tokenizers import pre_tokenizers

    field = reader.get_field("tokenizer.ggml.pre")
    backend = tokenizer.backend_tokenizer
    if field is None or field.contents() not in _SINGLE_DIGITS:
        return
    if isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])


def _set_special_tokens(reader: Any, tokenizer: Any) -> None:
    """Take special and user-defined tokens as the file has them: versions of transformers differ in what they keep."""
    from tokenizers import AddedToken

    types, tokens = (reader.get_field(f"tokenizer.ggml.{key}") for key in ("token_type", "tokens"))
    if tokens is None:
        return
    backend = tokenizer.backend_tokenizer
    for token_id, kind in enumerate(types.contents() if types is not None else ()):
        if kind in (_CONTROL_TOKEN, _USER_TOKEN):
            name = str(tokens.contents(token_id))
            if backend.token_to_id(name) == token_id:  # some files mark tokens that their vocabulary spells otherwise
                backend.add_tokens([AddedToken(name, normalized=False, special=kind == _CONTROL_TOKEN)])
    for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        field = reader.get_field(f"tokenizer.ggml.{key}_token_id")
        if field is not None:
            setattr(tokenizer, f"{name}_token", str(tokens.contents(int(field.contents()))))


def _eos_token_ids(reader: Any, config: Any) -> list[int]:
    """Every token that ends an answer: the file's EOS, EOT and EOM, and special tokens known to end a turn."""
    found = set()
    for key in ("eos_token_id", "eot_token_id", "eom_token_id"):
        field = reader.get_field(f"tokenizer.ggml.{key}")
        if field is not None:
            found.add(int(field.contents()))
    eos = config.get_text_config().eos_token_id
    found.update([eos] if isinstance(eos, int) else eos or [])
    types = reader.get_field("tokenizer.ggml.token_type")
    tokens = reader.get_field("tokenizer.ggml.tokens")
    if types is not None and tokens is not None:
        control = {str(tokens.contents(i)): i for i, kind in enumerate(types.contents()) if kind == _CONTROL_TOKEN}
        names = _END_OF_TURN & set(control)
        if "<|return|>" in names:
            names -= {"<|end|>"}  # in the harmony format it ends a message, and the turn goes on
        found.update(control[name] for name in names)
    return sorted(found)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep progress bars off the terminal: the worker reports progress in lines of its own."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def glob_escape(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)
