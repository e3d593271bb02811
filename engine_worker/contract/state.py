"""What a worker tells the gateway about itself: GET /internal/state and GET /internal/tokenizer, as JSON.

The gateway polls the state (it answers while the model loads, too); the tokenizer it fetches once an incarnation.
"""

from __future__ import annotations

from typing import Literal

import msgspec

WorkerStatus = Literal["loading", "ready", "draining", "failed"]


class SpeculationState(msgspec.Struct, frozen=True, kw_only=True):
    """How guessing output tokens goes. The counts are the engine process's own and start anew with it.

    method     "ngram" or the draft model
    is_active  whether it pays at present; with a large batch it goes off by itself
    """

    method: str
    is_active: bool
    num_speculative_tokens: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's load and identity at one moment.

    incarnation           random id of this engine process's life: another value means an empty cache
    num_blocks            KV blocks in all; `num_free_blocks` of them are held by no request (cached ones included),
                          `num_cached_blocks` carry a reusable prefix
    max_num_seqs          requests that it computes at once, at most
    step_tokens           tokens that a step computes at most, of a worker that serves the shortest first (work.py)
    queued_prefill_tokens uncached prompt tokens of waiting and running requests not computed yet
    model_fingerprint     the same for workers that can go on with each other's answers (resume.py); "" for none
    num_idle_checks       times that the engine, without work, found all blocks free and nothing left of any request
    num_copied_tokens     prompt tokens that were found cached in a part of a block, and copied: the cached tokens of a
                          prompt that are no whole blocks
    speculation           None where the worker was started without
    kv_cache_dtype        how keys and values are stored; `kv_block_bytes` is a block's size over all layers, so that
                          both say what a narrower cache brings
    quantization          how weights were narrowed, "" for not; `weight_bytes` is what they take now and
                          `weight_bytes_saved` what they took more before, room for `num_blocks_bought` KV blocks
    kv_block_bytes_saved  what a narrow KV format saves in each block, against 16 bits a number; 0 without one
    detail                progress while a model loads, and why one failed; "" once it is ready
    kv_events_endpoint    where KV events are published ("" for nowhere); `kv_events_replay_endpoint` replays them
    """

    status: WorkerStatus
    incarnation: str
    version: str
    model: str
    served_models: list[str] = []
    tokenizer_fingerprint: str = ""
    model_fingerprint: str = ""
    dtype: str = ""
    device: str = ""
    max_model_len: int = 0
    block_size: int = 0
    kv_cache_dtype: str = ""
    kv_block_bytes: int = 0
    kv_block_bytes_saved: int = 0
    quantization: str = ""
    weight_bytes: int = 0
    weight_bytes_saved: int = 0
    num_blocks_bought: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    step_tokens: int = 0
    max_num_seqs: int = 0
    num_running: int = 0
    num_waiting: int = 0
    queued_prefill_tokens: int = 0
    num_preemptions: int = 0
    num_idle_checks: int = 0
    num_copied_tokens: int = 0
    kv_events_endpoint: str = ""
    kv_events_replay_endpoint: str = ""
    speculation: SpeculationState | None = None
    detail: str = ""


class TokenizerBundle(msgspec.Struct, frozen=True, kw_only=True):
    """All that is needed to render a chat and tokenize it as the worker does. `tokenizer_json` is tokenizers' format.

    `special_tokens` holds the names that chat templates use (bos_token, eos_token, pad_token, unk_token, ...).
    `response_template` is transformers' description of how the model writes its answers, as JSON; "" for none.
    """

    fingerprint: str
    tokenizer_json: str
    chat_template: str | None
    special_tokens: dict[str, str]
    max_model_len: int
    response_template: str = ""
