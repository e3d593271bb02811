"""Tiny models with random weights, one for each family that is served, small enough to run by the hundred.

Windows are 8 tokens, so that prompts of the tests outgrow them. Weights are larger than a fresh initialisation's, so
that attention is far from uniform and greedy answers wander instead of repeating one token.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine_worker.model import attention

VOCAB = 97
WINDOW = 8

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_HEAD_DIM = {"head_dim": 8}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SLIDING_THEN_FULL = ["sliding_attention", "sliding_attention", "full_attention"]
_MULTI_HEAD = {"num_key_value_heads": 6}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW, **_HEAD_DIM},
    "gemma3_text": {"sliding_window": WINDOW, "layer_types": _SLIDING_THEN_FULL, **_HEAD_DIM},
    "gpt_oss": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        **_HEAD_DIM,
    },
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen2_moe": {
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
        "shared_expert_intermediate_size": 32,
        **_MOE,
    },
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, **_HEAD_DIM},
    "qwen3_moe": {**_MOE, **_HEAD_DIM},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    "phi": {"partial_rotary_factor": 0.5, **_MULTI_HEAD},
    "phi3": {"sliding_window": WINDOW},
    "gemma2": {
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 20.0,
        **_HEAD_DIM,
    },
    "olmo2": {},
    "granite": {"attention_multiplier": 0.3, "logits_scaling": 2.0, "residual_multiplier": 0.7},
    "gpt_neox": {**_MULTI_HEAD},
    "gpt2": {"n_positions": 512, "n_embd": 48, "n_layer": 3, "n_head": 6},
    "starcoder2": {"sliding_window": WINDOW},
    "stablelm": {"partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5, **_HEAD_DIM},
    "cohere2": {"sliding_window": WINDOW, "layer_types": _SLIDING_THEN_FULL, "logit_scale": 1.0},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "exaone4": {"sliding_window": WINDOW, "sliding_window_pattern": "LLG", "layer_types": _SLIDING_THEN_FULL},
    "deepseek_v3": {
        "num_key_value_heads": 6,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
}


def tiny_config(family: str, **changes: Any) -> Any:
    own = FAMILIES.get(family, {})
    return AutoConfig.for_model(family, **{**_BASE, **own, **changes})


def tiny_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A model of the family in eval mode, with paged attention set. The same seed gives the same weights."""
    attention.register()
    config = tiny_config(family, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=dtype)
        for name, parameter in module.named_parameters():
            if parameter.dim() >= 2:
                fan_in = parameter.shape[-1]
                torch.nn.init.normal_(parameter, std=1.0 if "embed" in name or "wte" in name else 1.5 / fan_in**0.5)
            elif "sinks" in name:
                torch.nn.init.normal_(parameter, std=1.0)
    module.eval().requires_grad_(False)
    module.config.use_cache = False
    return module
