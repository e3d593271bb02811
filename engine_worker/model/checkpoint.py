"""Loading a checkpoint: a module ready to run, and what the rest of the worker must know about it.

Everything that can be known without reading the weights is settled first (source, device, format, length, memory), so
that a bad setting costs a second, not the time of a load. A checkpoint whose tensors don't match the architecture is
refused: transformers would fill what is missing with random numbers and go on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine_worker.config import EngineConfig
from engine_worker.contract.state import TokenizerBundle
from engine_worker.model import dummy
from engine_worker.model.checkpoint_dtype import choose_device, choose_dtype, dtype_name
from engine_worker.model.checkpoint_files import (
    eos_ids_of,
    longest_context,
    source_fingerprint,
    stored_dtype,
    tensor_headers,
)
from engine_worker.model.checkpoint_source import Source, first_line, read_json, resolve
from engine_worker.model.errors import ModelError
from engine_worker.model.families import refuse_config
from engine_worker.model.kv_room import check_kv_room
from engine_worker.model.memory import check_room_for_weights
from engine_worker.model.tokenizer import has_tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    """A model in memory.

    module             in eval mode, no gradients, use_cache off
    name               what clients call it
    dtype, device      what the parameters are in and on
    source_fingerprint identifies the weights: 32 bytes, equal wherever the same checkpoint is loaded
    max_model_len      tokens a sequence may have, prompt and output together
    eos_token_ids      every token that ends an answer
    weight_bytes       bytes of parameters and buffers, tied ones once
    details            one line each: what was converted, what is unusual
    """

    module: nn.Module
    hf_config: Any
    name: str
    dtype: torch.dtype
    device: torch.device
    source_fingerprint: bytes
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    tokenizer: TokenizerBundle
    architecture: str
    weight_bytes: int
    details: tuple[str, ...] = ()


def load_checkpoint(
    config: EngineConfig, attn_implementation: str, progress: Callable[[str], None]
) -> LoadedCheckpoint:
    """Load `config.model` with transformers' modelling code and the named attention.

    `attn_implementation` must be registered with transformers already. Raises ModelError with a sentence.
    """
    if config.load_format not in ("auto", "dummy"):
        raise ModelError(f"There is no load format {config.load_format!r}. Use auto or dummy.")
    is_dummy = config.load_format == "dummy"
    device = choose_device(config.device)
    source = resolve(
        config.model, with_weights=not is_dummy, trust_remote_code=config.trust_remote_code, progress=progress
    )
    hf_config = read_config(source.folder, config.trust_remote_code)
    refuse_config(hf_config)
    text_config = hf_config.get_text_config()
    headers = [] if is_dummy else tensor_headers(source.folder)
    stored = stored_dtype(text_config, headers)
    # The CPU's kernels multiply narrow weights by float32 activations, so nothing is gained by another type.
    asked = "float32" if config.quantization and config.dtype == "auto" and device.type == "cpu" else config.dtype
    dtype, warning = choose_dtype(asked, stored, device, hidden_size=getattr(text_config, "hidden_size", None))
    max_model_len = choose_max_model_len(config.max_model_len, text_config, source.name)
    details = [line for line in (source.detail, warning) if line]
    if warning:
        progress(warning)

    if has_tokenizer(source.folder) or not is_dummy:
        bundle = load_tokenizer(source.folder, max_model_len, config.trust_remote_code)
    else:
        bundle = dummy.stand_in_tokenizer(text_config, max_model_len)
        details.append("no tokenizer files: a stand-in tokenizer of single bytes")
        progress(details[-1])

    check_kv_room(config, hf_config, dtype, max_model_len, device)
    if not is_dummy:
        check_room_for_weights(headers, dtype, device, source.name)
    progress(f"loading {source.name} in {dtype_name(dtype)} on {device}")
    with _quiet_transformers():
        if is_dummy:
            module = dummy.build(hf_config, dtype, device, attn_implementation, config.seed, config.trust_remote_code)
        else:
            module = _load_weights(source, hf_config, dtype, device, attn_implementation, config.trust_remote_code)
    _freeze(module)
    return LoadedCheckpoint(
        module=module,
        hf_config=module.config,
        name=source.name,
        dtype=dtype,
        device=device,
        source_fingerprint=_fingerprint(source.folder, config, headers),
        max_model_len=max_model_len,
        eos_token_ids=eos_ids_of(source.folder, text_config, bundle),
        tokenizer=bundle,
        architecture=type(module).__name__,
        weight_bytes=count_bytes(module),
        details=tuple(details),
    )


def read_config(folder: Path, trust_remote_code: bool) -> Any:
    """The checkpoint's transformers configuration. Raises ModelError for one that transformers doesn't know."""
    from transformers import AutoConfig

    raw = read_json(folder / "config.json")
    if "auto_map" in raw and not trust_remote_code and not _is_known(raw):
        raise ModelError(
            f"{folder.name} brings its own modelling code. If you trust it, start with --trust-remote-code."
        )
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # unknown model types and bad values come in several classes
        raise ModelError(f"The config.json of {folder.name} can't be used: {first_line(error)}") from error


def choose_max_model_len(requested: int | None, text_config: Any, name: str) -> int:
    """The override, if the model can do it; otherwise the model's own length."""
    longest = longest_context(text_config)
    if requested is None:
        if longest is None:
            raise ModelError(f"The config.json of {name} names no longest context. Set --max-model-len.")
        return longest
    if requested < 1:
        raise ModelError(f"--max-model-len is {requested}; it must be at least 1.")
    if longest is not None and requested > longest:
        raise ModelError(f"--max-model-len is {requested}, but {name} can do {longest} tokens at most.")
    return requested


def count_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers; shared storage counts once."""
    storages = {}
    for tensor in (*module.parameters(), *module.buffers()):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _is_known(raw: dict[str, object]) -> bool:
    from transformers import CONFIG_MAPPING

    return raw.get("model_type") in CONFIG_MAPPING


def _load_weights(
    source: Source,
    hf_config: Any,
    dtype: torch.dtype,
    device: torch.device,
    attn_implementation: str,
    trust_remote_code: bool,
) -> nn.Module:
    from transformers import AutoModelForCausalLM

    placement = {} if device.type == "cpu" else {"device_map": {"": device}}  # straight to the device, no CPU copy
    try:
        module, info = AutoModelForCausalLM.from_pretrained(
            source.folder,
            config=hf_config,
            dtype=dtype,
            attn_implementation=attn_implementation,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            **placement,
        )
    except torch.cuda.OutOfMemoryError as error:
        raise ModelError(f"{source.name} does not fit on {device}: {first_line(error)}") from error
    except Exception as error:  # unknown architectures, missing libraries, damaged files: many classes
        raise ModelError(f"{source.name} could not be loaded: {first_line(error)}") from error
    _check_complete(source.name, info)
    return module


def _check_complete(name: str, info: dict[str, Any]) -> None:
    for kind, sentence in (
        ("missing_keys", "lacks weights that the architecture needs"),
        ("mismatched_keys", "has weights of other shapes than its config.json says"),
        ("error_msgs", "has weights that could not be read"),
    ):
        found = info.get(kind)
        if found:
            first = min(str(item[0] if isinstance(item, tuple) else item) for item in found)
            raise ModelError(f"{name} {sentence} ({len(found)} of them, such as {first}). Download it again.")


def _freeze(module: nn.Module) -> None:
    module.eval()
    module.requires_grad_(False)
    configs = [module.config, module.config.get_text_config()]
    for hf_config in configs:
        hf_config.use_cache = False


def _fingerprint(folder: Path, config: EngineConfig, headers: list[Any]) -> bytes:
    if config.load_format == "dummy":
        raw = read_json(folder / "config.json")
        return hashlib.sha256(json.dumps(["dummy", config.seed, raw], sort_keys=True).encode()).digest()
    return source_fingerprint(folder, headers)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars and no tables of weights on the terminal: what matters of them becomes a sentence here."""
    from transformers.utils import logging

    was_on, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if was_on:
            logging.enable_progress_bar()
