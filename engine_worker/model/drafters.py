"""Which drafter a worker's settings ask for; and loading a draft model, which must share the model's vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import tokenizers

from engine_worker.config import EngineConfig
from engine_worker.contract.state import TokenizerBundle
from engine_worker.model import attention
from engine_worker.model.attention import AttentionBackend
from engine_worker.model.backends import make_backend
from engine_worker.model.checkpoint import LoadedCheckpoint, load_checkpoint
from engine_worker.model.checkpoint_source import resolve
from engine_worker.model.draft_model import ModelDrafter
from engine_worker.model.draft_ngram import NgramDrafter
from engine_worker.model.errors import ModelError
from engine_worker.model.families import num_layers, refuse_module
from engine_worker.model.kv_tensors import KVLayout, KVTensors
from engine_worker.model.native.library import Library
from engine_worker.model.packed_model import PackedModel
from engine_worker.model.prepare import prepare_module
from engine_worker.model.rope import freeze_rope
from engine_worker.model.runner import Drafter
from engine_worker.model.sampler import Sampler
from engine_worker.model.self_test import probe_layout, run_self_test

NGRAM = "ngram"


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model that waits for the number of its KV blocks."""

    checkpoint: LoadedCheckpoint
    backend: AttentionBackend
    layout: KVLayout
    max_model_len: int


def check_draft(config: EngineConfig, progress: Callable[[str], None]) -> None:
    """Raise ModelError where `config.speculative` names no model, before the large one is read.

    A draft model of the hub is fetched here, to be found in its cache later; a .gguf file is converted.
    """
    if config.speculative in ("", NGRAM):
        return
    with_weights = config.load_format != "dummy"
    try:
        resolve(
            config.speculative, with_weights=with_weights, trust_remote_code=config.trust_remote_code, progress=progress
        )
    except ModelError as error:
        raise ModelError(f'--speculative takes "{NGRAM}" or a draft model. {error}') from error


def load_draft(
    config: EngineConfig,
    bundle: TokenizerBundle,
    library: Library | None,
    details: list[str],
    progress: Callable[[str], None],
) -> LoadedDraft | None:
    """The draft model of `config.speculative`, None where none is wanted. Raises ModelError.

    `bundle` is the model's tokenizer, whose vocabulary the draft model must share.
    """
    if config.speculative in ("", NGRAM):
        return None
    progress(f"loading the draft model {config.speculative}")
    # Its own limit of length holds: where it ends, guesses end. It needs no room for a sequence of that length, as its
    # cache has the model's blocks.
    own = replace(config, model=config.speculative, max_model_len=None, kv_cache_memory=None)
    checkpoint = load_checkpoint(own, attention.NAME, progress)
    check_vocabulary(config, bundle, checkpoint.tokenizer)
    module = checkpoint.module
    refuse_module(module)
    max_model_len, _ = freeze_rope(module, checkpoint.max_model_len)
    backend = make_backend(config.attention_backend, checkpoint.device, max_model_len)
    prepare_module(module, checkpoint.dtype, library, backend, config.quantization, progress)
    if config.self_test:
        layout = run_self_test(module, backend, config.block_size, max_model_len).layout
    else:
        layout = probe_layout(module, backend)
    details.append(f"draft model {checkpoint.name}")
    return LoadedDraft(checkpoint, backend, layout, max_model_len)


def check_vocabulary(config: EngineConfig, bundle: TokenizerBundle, draft: TokenizerBundle) -> None:
    """Raises ModelError where the two don't give every token the same id."""
    if bundle.tokenizer_json == draft.tokenizer_json:
        return
    own, other = (tokenizers.Tokenizer.from_str(b.tokenizer_json).get_vocab() for b in (bundle, draft))
    if own != other:
        different = next(iter(sorted(own.items() ^ other.items())))[0]
        raise ModelError(
            f"The draft model {config.speculative} has another vocabulary than {config.model} (see token "
            f"{different!r}). Use a smaller model of the same family, or --speculative ngram."
        )


def make_drafter(
    config: EngineConfig, draft: LoadedDraft | None, sampler: Sampler, num_blocks: int, max_model_len: int
) -> Drafter | None:
    """The drafter of `config.speculative`, None for none."""
    if draft is not None:
        module = draft.checkpoint.module
        kv = KVTensors(num_layers(module), num_blocks, config.block_size, draft.checkpoint.device, draft.layout)
        return ModelDrafter(
            draft.checkpoint.name,
            PackedModel(module, draft.backend, kv),
            sampler,
            config.max_num_seqs,
            min(max_model_len, draft.max_model_len),
            config.max_num_batched_tokens,
        )
    return NgramDrafter(config.ngram_min, config.ngram_max) if config.speculative == NGRAM else None
