"""The worker's settings, as the engine process gets them. stdlib only, so every layer may import it."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

# What a client's grammar may cost, as llguidance's LLParserLimits: checked in the API process, enforced in the engine.
# The lexer's fuel bounds the time: a schema of 80 kB passes, and "a" repeated 9 to the power of 6 times, which takes
# seconds under llguidance's own limits, takes a tenth of one.
GRAMMAR_LIMITS = MappingProxyType(
    {
        "initial_lexer_fuel": 200_000,
        "step_lexer_fuel": 100_000,
        "max_lexer_states": 100_000,
        "max_grammar_size": 200_000,
    }
)


ATTENTION_BACKENDS = ("auto", "reference", "cpu", "native", "triton", "flashinfer")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One worker's engine. Sizes in bytes or tokens as the names say; None means "choose for me".

    model             a folder, a hub id, a .gguf file, or "demo"
    dtype             auto, float32, bfloat16 or float16
    device            auto, cpu or cuda
    load_format       auto (weights from the checkpoint) or dummy (random weights from the config alone)
    kv_cache_memory   bytes for KV blocks; None takes `memory_fraction` of what is free (on CUDA, what is left of
                      `gpu_memory_utilization`)
    max_num_seqs      sequences running at once
    max_num_batched_tokens
                      tokens a step may compute (the chunk budget of prefill)
    joint_prefill_tokens
                      tokens of prompts that are completed in one step, where several are; 0 fills every step
    partial_hits      auto (on with a CPU), on or off: whether a prompt that leaves a cached one within a block copies
                      the tokens that they share there
    attention_backend auto, reference, cpu, native (C++ kernels for CPUs), triton or flashinfer (for CUDA)
    quantization      "" (none), int8 or int4 (weights only), or fp8 (CUDA): what linear weights become at load
    async_scheduling  auto (on with CUDA), on or off: plan and queue a step before the last one's tokens are read
    speculative       "" (none), "ngram", or a draft model, named as `model` is: what guesses output tokens
    num_speculative_tokens
                      most tokens guessed for a request in a step
    always_speculate  guess as much as possible even where it is measured not to pay
    ngram_min, ngram_max
                      lengths of the text ends that n-gram guesses look up
    kv_cache_dtype    auto (the model's type), int8, fp8, fp4 or k8v4 (keys int8, values fp4): how the cache stores them
    gpu_memory_utilization
                      share of a CUDA device's memory for everything: weights, a step's activations, KV blocks
    cuda_graphs       on or off: whether decode steps are recorded as CUDA graphs (with the triton backend)
    cuda_graph_sizes  batch sizes to record; () takes the usual ones
    num_threads       torch threads; None shares the machine's cores out
    kv_events_endpoint
                      ZMQ endpoint to publish KV events on ("" publishes none); the replay socket is one port above
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    block_size: int = 16
    kv_cache_memory: int | None = None
    memory_fraction: float = 0.5
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    joint_prefill_tokens: int = 512
    enable_prefix_caching: bool = True
    partial_hits: str = "auto"
    attention_backend: str = "auto"
    quantization: str = ""
    async_scheduling: str = "auto"
    gpu_memory_utilization: float = 0.9
    cuda_graphs: str = "on"
    cuda_graph_sizes: tuple[int, ...] = ()
    speculative: str = ""
    num_speculative_tokens: int = 8
    always_speculate: bool = False
    ngram_min: int = 2
    ngram_max: int = 4
    kv_cache_dtype: str = "auto"
    num_threads: int | None = None
    seed: int = 0
    trust_remote_code: bool = False
    kv_events_endpoint: str = ""
    self_test: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a loaded model turned out to be.

    cache_root    bytes that every block hash chain starts from: model, weights, dtype and KV format
    kv_cache_dtype
                  how keys and values are stored: as EngineConfig has it, or the model's type
    num_blocks    KV blocks of `block_size` tokens that fit, each `kv_block_bytes` large over all layers
    quantization  how weights were narrowed ("" for not), which saved `weight_bytes_saved`
    kv_block_bytes_saved
                  what a narrow KV format saves in a block, against 16 bits a number; 0 without one
    detail        one line for the start-up log: self-test result, what was converted, what was shrunk
    """

    model: str
    architecture: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    num_layers: int
    block_size: int
    num_blocks: int
    kv_block_bytes: int
    weight_bytes: int
    dtype: str
    device: str
    attention_backend: str
    num_threads: int
    cache_root: bytes
    kv_cache_dtype: str = ""
    quantization: str = ""
    weight_bytes_saved: int = 0
    kv_block_bytes_saved: int = 0
    detail: str = ""

    @property
    def num_blocks_bought(self) -> int:
        """KV blocks that there is room for in what narrower weights saved."""
        return self.weight_bytes_saved // self.kv_block_bytes if self.kv_block_bytes else 0
