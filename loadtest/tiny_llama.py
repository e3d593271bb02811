"""A Llama that loads in a moment and answers with noise: what workers run on that are put to the test themselves.

It needs no files but a config: a worker makes the weights (--load-format dummy) from its seed, and reads bytes as
tokens, since there is no tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def write_tiny_llama(folder: Path) -> Path:
    """The model in `folder`, which there is afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    return folder
