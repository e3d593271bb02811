"""The demo model: the template it was trained with, the token that ends its turns, and a known answer."""

from __future__ import annotations

import jinja2
import pytest
import torch
from tokenizers import Tokenizer

from engine_worker.config import EngineConfig
from engine_worker.model.checkpoint import load_checkpoint

pytestmark = pytest.mark.engine

PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)


def test_the_demo_answers_and_ends_its_turn() -> None:
    loaded = load_checkpoint(EngineConfig(model="demo", dtype="float32", device="cpu"), "sdpa", lambda line: None)
    bundle = loaded.tokenizer
    template = jinja2.Environment().from_string(bundle.chat_template or "")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    assert template.render(messages=messages, add_generation_prompt=True) == PROMPT

    tokenizer = Tokenizer.from_str(bundle.tokenizer_json)
    end = tokenizer.token_to_id("<|im_end|>")
    assert end in loaded.eos_token_ids
    assert bundle.special_tokens["eos_token"] == "<|im_end|>"
    assert (loaded.name, loaded.max_model_len) == ("SmolLM2-135M-Instruct", 8192)

    ids = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    answer: list[int] = []
    with torch.no_grad():
        while len(answer) < 20 and (not answer or answer[-1] not in loaded.eos_token_ids):
            logits = loaded.module(torch.tensor([ids + answer]), use_cache=False, logits_to_keep=1).logits
            answer.append(int(logits[0, -1].argmax()))
    assert tokenizer.decode(answer, skip_special_tokens=False) == "The capital of France is Paris.<|im_end|>"
