"""Tiny checkpoints on disk, as a training run would leave them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.tiny_tokenizer import CHATML, tiny_tokenizer

VOCAB = 600
EOS_TOKEN = "<|im_end|>"


def llama_config(**changes: Any) -> LlamaConfig:
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**{**values, **changes})


def save_checkpoint(
    folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0, max_shard_size: str = "1GB", **changes: Any
) -> LlamaForCausalLM:
    """A tiny Llama with tokenizer and chat template in `folder`; returns the model that was saved."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(llama_config(**changes)).to(dtype).eval()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    save_tokenizer(folder)
    return model


def save_config(folder: Path, **changes: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    llama_config(**changes).save_pretrained(folder)


def save_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(tiny_tokenizer().to_str(), encoding="utf-8")
    settings = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": EOS_TOKEN, "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; a value of None removes the key."""
    value = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not None}))
