"""From settings to a runner: checkpoint, refusals, self-test, cache size, runner, in that order.

What takes long comes late, and nothing is served that was not tested in this very process, with these very weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

import msgspec
import torch

from engine_worker.config import EngineConfig, ModelInfo
from engine_worker.model import attention
from engine_worker.model.attention import AttentionBackend
from engine_worker.model.backends import make_backend
from engine_worker.model.checkpoint import LoadedCheckpoint, load_checkpoint
from engine_worker.model.checkpoint_dtype import choose_device, dtype_name
from engine_worker.model.cuda_setup import profiled_budget, record_graphs, wants_graphs
from engine_worker.model.drafters import check_draft, load_draft, make_drafter
from engine_worker.model.families import num_layers, refuse_module
from engine_worker.model.importance import measure_importance
from engine_worker.model.kv_format import DENSE, KVFormat, choose_format
from engine_worker.model.kv_tensors import KVLayout, KVTensors
from engine_worker.model.memory import format_bytes, num_kv_blocks
from engine_worker.model.native import library as native
from engine_worker.model.packed_model import PackedModel
from engine_worker.model.prepare import prepare_module
from engine_worker.model.quantize import check_quantization
from engine_worker.model.rope import freeze_rope
from engine_worker.model.runner import ModelRunner
from engine_worker.model.sampler import Sampler
from engine_worker.model.self_test import probe_layout, run_format_test, run_self_test
from engine_worker.model.threads import choose_num_threads

if TYPE_CHECKING:
    from engine_worker.model.token_masks import TokenMasks

_FORMAT = b"warmgate kv 3"  # goes up when cached keys and values change their meaning


def load_model(config: EngineConfig, progress: Callable[[str], None]) -> ModelRunner:
    """Load `config.model` and make it ready to execute plans. `progress` gets one-line messages.

    Sets torch's thread count for the process. Raises ModelError with a sentence that says what to change.
    """
    num_threads = choose_num_threads(config)
    torch.set_num_threads(num_threads)
    attention.register()
    device = choose_device(config.device)
    check_quantization(config.quantization, device)
    kv_format = choose_format(config.kv_cache_dtype, device)
    check_draft(config, progress)
    checkpoint = load_checkpoint(config, attention.NAME, progress)
    module = checkpoint.module
    refuse_module(module)
    max_model_len, notes = freeze_rope(module, checkpoint.max_model_len)
    library = native.load(progress) if checkpoint.device.type == "cpu" else None
    backend = make_backend(config.attention_backend, checkpoint.device, max_model_len, kv_format)
    details = [*checkpoint.details, *notes]
    if checkpoint.device.type == "cpu":
        details.append(native.status())
    if config.quantization == "int4":
        progress("reading a text to see which inputs of each layer are large")
        measure_importance(module, checkpoint.tokenizer.tokenizer_json, max_model_len)
    prepared = prepare_module(module, checkpoint.dtype, library, backend, config.quantization, progress)
    details += prepared.details
    layout = _test(config, checkpoint, backend, kv_format, max_model_len, details, progress)
    if unknown := getattr(backend, "unknown_mask_names", ()):
        details.append(
            f"warning: attention masks that the kernels don't know ({', '.join(unknown)}) run in the reference "
            "implementation, which is slow"
        )
        progress(details[-1])

    draft = load_draft(config, checkpoint.tokenizer, library, details, progress)
    block_bytes = layout.block_bytes(config.block_size)
    draft_bytes = draft.layout.block_bytes(config.block_size) if draft else 0
    profiled = profiled_budget(config, module, backend, layout, max_model_len, checkpoint.device)
    num_blocks = num_kv_blocks(config, block_bytes + draft_bytes, max_model_len, checkpoint.device, profiled=profiled)
    if prepared.saved_bytes:
        bought = prepared.saved_bytes // block_bytes
        details.append(
            f"{format_bytes(prepared.saved_bytes)} saved by {config.quantization}: room for {bought} KV blocks"
        )
        progress(details[-1])
    progress(f"KV cache of {num_blocks} blocks of {config.block_size} tokens, {num_threads} thread(s)")
    plain_bytes = block_bytes
    if not kv_format.is_dense:
        plain_bytes = replace(layout, format=DENSE, dtype=torch.bfloat16).block_bytes(config.block_size)
        details.append(f"{plain_bytes / block_bytes:.2f} times the KV blocks of a 16-bit cache")
        progress(details[-1])
    with_graphs = wants_graphs(config, checkpoint.device, backend)  # whose spare rows need a block of their own
    kv = KVTensors(num_layers(module), num_blocks + with_graphs, config.block_size, checkpoint.device, layout)
    model = PackedModel(module, backend, kv)
    if with_graphs:
        details.append(record_graphs(config, model, num_blocks, max_model_len, progress))
    info = ModelInfo(
        model=checkpoint.name,
        architecture=checkpoint.architecture,
        vocab_size=_logit_width(checkpoint),
        eos_token_ids=checkpoint.eos_token_ids,
        max_model_len=max_model_len,
        num_layers=num_layers(module),
        block_size=config.block_size,
        num_blocks=num_blocks,
        kv_block_bytes=block_bytes,
        kv_block_bytes_saved=max(0, plain_bytes - block_bytes),
        weight_bytes=prepared.weight_bytes,
        quantization=config.quantization,
        weight_bytes_saved=prepared.saved_bytes,
        dtype=str(checkpoint.dtype).removeprefix("torch."),
        device=str(checkpoint.device),
        attention_backend=backend.name,
        num_threads=num_threads,
        kv_cache_dtype=dtype_name(checkpoint.dtype) if kv_format.is_dense else kv_format.name,
        cache_root=_cache_root(checkpoint, layout, [*notes, config.quantization]),
        detail="; ".join(details),
    )
    sampler = Sampler(info.vocab_size, info.eos_token_ids, checkpoint.device, _masks(checkpoint, info, progress))
    return ModelRunner(
        model,
        sampler,
        info,
        msgspec.structs.replace(checkpoint.tokenizer, max_model_len=max_model_len),
        config.max_num_seqs,
        make_drafter(config, draft, sampler, num_blocks, max_model_len),
    )


def _masks(checkpoint: LoadedCheckpoint, info: ModelInfo, progress: Callable[[str], None]) -> TokenMasks | None:
    """What constrains outputs to grammars. None, and said so, without llguidance or a tokenizer it can read."""
    try:
        from engine_worker.model.token_masks import TokenMasks

        tokenizer = checkpoint.tokenizer.tokenizer_json
        return TokenMasks(tokenizer, info.vocab_size, info.eos_token_ids, checkpoint.device)
    except (ImportError, ValueError) as error:
        progress(f"no structured output: {str(error).splitlines()[0][:200]}")
        return None


def _test(
    config: EngineConfig,
    checkpoint: LoadedCheckpoint,
    backend: AttentionBackend,
    kv_format: KVFormat,
    max_model_len: int,
    details: list[str],
    progress: Callable[[str], None],
) -> KVLayout:
    """Run the self-test, unless it is switched off, and return the shape of the cache."""
    if not config.self_test:
        details.append("self-test switched off")
        return replace(probe_layout(checkpoint.module, backend), format=kv_format)
    progress("self-test: packed, chunked and paged against plain attention")
    begin = perf_counter()
    report = run_self_test(checkpoint.module, backend, config.block_size, max_model_len)
    details.append(report.detail)
    progress(f"{report.detail} in {perf_counter() - begin:.1f} s")
    if not kv_format.is_dense:
        details.append(run_format_test(checkpoint.module, backend, kv_format, config.block_size, max_model_len))
        progress(details[-1])
    return replace(report.layout, format=kv_format)


def _logit_width(checkpoint: LoadedCheckpoint) -> int:
    """Columns of the logits: the LM head's rows, which padding may make more than the tokenizer's vocabulary."""
    head = checkpoint.module.get_output_embeddings()
    return int(head.weight.shape[0]) if head is not None else int(checkpoint.hf_config.get_text_config().vocab_size)


def _cache_root(checkpoint: LoadedCheckpoint, layout: KVLayout, notes: list[str]) -> bytes:
    """SHA-256 over all that a cached key or value depends on besides its tokens: weights, types, frozen RoPE."""
    digest = hashlib.sha256(_FORMAT)
    for part in (checkpoint.source_fingerprint, str(checkpoint.dtype), str(layout.dtype), layout.format.name, *notes):
        raw = part if isinstance(part, bytes) else part.encode()
        digest.update(len(raw).to_bytes(4, "little") + raw)
    return digest.digest()
