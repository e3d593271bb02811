"""A tiny GGUF file of a Llama, written with the gguf package, as llama.cpp's converter would."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGUFWriter
from transformers import LlamaForCausalLM

from tests.engine_worker.model.checkpoints import llama_config
from tests.support.tiny_tokenizer import CHATML, tiny_tokenizer

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}


def write_gguf(
    path: Path, *, eos: str = "</s>", pre: str = "default", quantize: bool = False, seed: int = 0
) -> LlamaForCausalLM:
    """Write a GGUF; returns the model that was written. `quantize` stores the matrices in Q8_0."""
    torch.manual_seed(seed)
    config = llama_config(bos_token_id=1)
    model = LlamaForCausalLM(config).eval()
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, eos, pre)
    for name, tensor in model.state_dict().items():
        _add_tensor(writer, name, tensor, config.num_attention_heads, config.num_key_value_heads, quantize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add_tokenizer(writer: GGUFWriter, eos: str, pre: str) -> None:
    tokenizer = tiny_tokenizer()
    described = json.loads(tokenizer.to_str())
    kinds = {token["id"]: 3 if token["special"] else 4 for token in described["added_tokens"]}  # control, user-defined
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(i, 1) for i in range(len(tokens))])
    merges = described["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    writer.add_bos_token_id(tokenizer.token_to_id("<s>"))
    writer.add_eos_token_id(tokenizer.token_to_id(eos))
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)


def _add_tensor(
    writer: GGUFWriter, name: str, tensor: torch.Tensor, num_heads: int, num_kv_heads: int, quantize: bool
) -> None:
    if name.endswith(("q_proj.weight", "k_proj.weight")):  # llama.cpp interleaves the rotated halves of each head
        heads = num_heads if "q_proj" in name else num_kv_heads
        tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
    for ours, theirs in _NAMES.items():
        name = name.replace(ours, theirs)
    values = tensor.contiguous().numpy().astype(np.float32)
    if quantize and values.ndim == 2 and values.shape[1] % 32 == 0:
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, values)
