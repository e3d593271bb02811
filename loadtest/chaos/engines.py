"""Real workers for a run: a model small enough for three of them on a CPU, and its greedy answers, known beforehand.

The tiny model has random weights, which the worker makes from the config and a seed: all workers of a run have the
same.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import httpx

from loadtest.chaos.asks import Truth
from loadtest.fleet.text import tokenizer_bundle

TINY = "tiny"
NUM_PROMPTS = 24
_MAX_MODEL_LEN = 1024
_TOPICS = ("rivers", "stars", "bread", "clocks", "bridges", "winter", "paper", "islands")


def write_tiny_model(folder: Path) -> Path:
    """A config and a tokenizer in `folder`, for --load-format dummy."""
    folder.mkdir(parents=True, exist_ok=True)
    bundle = tokenizer_bundle()
    vocabulary = json.loads(bundle.tokenizer_json)["model"]["vocab"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": len(vocabulary),
        "max_position_embeddings": _MAX_MODEL_LEN,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": len(vocabulary) - 1,
    }
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "?", "chat_template": bundle.chat_template}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(bundle.tokenizer_json)
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


def worker_flags(model: str, folder: Path) -> list[str]:
    """The flags of a bundled worker, but for its port."""
    common = ["--served-model-name", "chaos", "--device", "cpu", "--threads", "1", "--kv-events-port", "0"]
    if model != TINY:
        return ["--model", model, *common, "--kv-cache-memory", "256MiB"]
    path = str(write_tiny_model(folder))
    return ["--model", path, "--load-format", "dummy", "--dtype", "float32", *common, "--kv-cache-memory", "32MiB"]


async def known_answers(url: str, seed: int, client: httpx.AsyncClient) -> Sequence[tuple[str, Truth, int]]:
    """Prompts, their greedy answers as a worker gives them when it has nothing else to do, and the limit of tokens.
    Raises httpx.HTTPError."""
    rng = random.Random(f"known/{seed}")
    found = []
    for number in range(NUM_PROMPTS):
        topic = _TOPICS[number % len(_TOPICS)]
        prompt = " ".join([f"tell me about {topic} "] * rng.choice((2, 10, 30))) + str(number)
        num_tokens = rng.randrange(40, 100) if number % 5 == 0 else rng.randrange(2, 24)
        body = {
            "model": "chaos",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": num_tokens,
            "temperature": 0,
        }
        answer = await client.post(f"{url}/v1/chat/completions", json=body, timeout=120.0)
        answer.raise_for_status()
        said = answer.json()
        text = said["choices"][0]["message"]["content"] or ""
        found.append((prompt, Truth(text, said["usage"]["completion_tokens"]), num_tokens))
    return found
