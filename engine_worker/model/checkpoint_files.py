"""What a checkpoint's small files and safetensors headers say, read without loading a weight."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine_worker.contract.state import TokenizerBundle
from engine_worker.model.checkpoint_source import read_json
from engine_worker.model.errors import ModelError

_SAMPLE_BYTES = 4096
_MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_LENGTH_NAMES = (
    *("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"),
    *("max_sequence_length", "model_max_length"),
)


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor of a safetensors file; start and end are byte offsets in the file."""

    file: Path
    name: str
    dtype: str
    num_elements: int
    start: int
    end: int


def tensor_headers(folder: Path) -> list[TensorHeader]:
    """Every tensor of the folder's weights, in order of file and name. Raises ModelError for a damaged file."""
    index = read_json(folder / "model.safetensors.index.json")
    weight_map = index.get("weight_map")
    if isinstance(weight_map, dict):
        files = [folder / name for name in sorted({str(name) for name in weight_map.values()})]
    elif (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    else:
        files = sorted(folder.glob("*.safetensors"))
    return [header for file in files for header in _read_header(file)]


def _read_header(path: Path) -> list[TensorHeader]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(size, _MAX_HEADER_BYTES):
                raise ValueError("its header is longer than the file")
            tensors = json.loads(file.read(length))
        headers = []
        for name, entry in sorted(tensors.items()):
            if name == "__metadata__":
                continue
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            if end > size:
                raise ValueError("it is cut short")
            headers.append(TensorHeader(path, name, entry["dtype"], math.prod(entry["shape"]), start, end))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is no sound safetensors file ({error}). Download it again.") from error
    return headers


def stored_dtype(text_config: Any, headers: list[TensorHeader]) -> torch.dtype | None:
    """The format that most weights are stored in, or what the configuration names, or None.

    Formats that nothing here computes in (fp8, packed integers) count as what the configuration names.
    """
    sizes: Counter[str] = Counter()
    for header in headers:
        sizes[header.dtype] += header.num_elements
    if sizes:
        commonest = sizes.most_common(1)[0][0]
        if commonest in _DTYPES:
            return _DTYPES[commonest]
    named = getattr(text_config, "dtype", None)
    if isinstance(named, str):
        named = getattr(torch, named, None)
    return named if isinstance(named, torch.dtype) else None


def source_fingerprint(folder: Path, headers: list[TensorHeader]) -> bytes:
    """32 bytes for config.json and the weights: names, shapes, types, and three samples of each tensor's bytes.

    Reading all of a large checkpoint would double its load time. Training touches whole tensors, so samples of each
    tell two fine-tunes apart; they don't stand against someone who edits a tensor between the samples.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    by_file: dict[Path, list[TensorHeader]] = {}
    for header in headers:
        by_file.setdefault(header.file, []).append(header)
    for path, tensors in by_file.items():
        with path.open("rb") as file:
            for tensor in tensors:
                digest.update(f"{tensor.name} {tensor.dtype} {tensor.num_elements}".encode())
                last = max(tensor.start, tensor.end - _SAMPLE_BYTES)
                for offset in sorted({tensor.start, (tensor.start + last) // 2, last}):
                    file.seek(offset)
                    digest.update(file.read(min(_SAMPLE_BYTES, tensor.end - offset)))
    return digest.digest()


def longest_context(text_config: Any) -> int | None:
    """Tokens that the model can attend over, from whichever name its configuration uses; None if it names none.

    YaRN's configurations name the length before stretching. Other scalings either name the stretched length (llama3,
    longrope, linear by custom) or work only up to the named one without per-length state (dynamic).
    """
    lengths = [getattr(text_config, name, None) for name in _LENGTH_NAMES]
    named = [length for length in lengths if isinstance(length, int) and length > 0]
    if not named:
        return None
    longest = min(named)
    rope = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    rope = rope.get("full_attention", rope) if isinstance(rope, dict) else {}
    if rope.get("rope_type", rope.get("type")) == "yarn":
        original = rope.get("original_max_position_embeddings") or longest
        longest = max(longest, int(original * rope.get("factor", 1.0)))
    return longest


def eos_ids_of(folder: Path, text_config: Any, bundle: TokenizerBundle) -> tuple[int, ...]:
    """Every id that ends an answer: of generation_config.json, of config.json and the tokenizer's EOS token, united.

    Checkpoints are known to name their end of turn in any one of the three.
    """
    import tokenizers

    ids: set[int] = set()
    for value in (read_json(folder / "generation_config.json").get("eos_token_id"), text_config.eos_token_id):
        ids.update([value] if isinstance(value, int) else value if isinstance(value, list) else [])
    if eos := bundle.special_tokens.get("eos_token"):
        found = tokenizers.Tokenizer.from_str(bundle.tokenizer_json).token_to_id(eos)
        ids.update([found] if found is not None else [])
    return tuple(sorted(i for i in ids if 0 <= i < text_config.vocab_size))
