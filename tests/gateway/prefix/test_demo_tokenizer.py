"""The demo model's own tokenizer and template: incremental, and equal to the whole over a long conversation."""

from __future__ import annotations

import random

import pytest

from engine_worker.contract.prompt import PromptRenderer
from gateway.prefix import PrefixService, PromptSource
from gateway.prefix.keys import token_keys
from policies.types import ReplicaId

pytestmark = pytest.mark.engine

PIECES = [
    "The",
    " quick",
    "\n\n",
    "  ",
    "naïve ",
    "日本語",
    "🙂",
    "1234567",
    "<|im_end|>",
    "<|im_start|>user\n",
    "def f(x):\n\t",
]


async def test_a_conversation_with_the_demo_model_is_cut_as_the_whole() -> None:
    from engine_worker.model.checkpoint_source import resolve
    from engine_worker.model.tokenizer import load_tokenizer

    folder = resolve("demo", with_weights=False, trust_remote_code=False, progress=lambda line: None).folder
    bundle = load_tokenizer(folder, 2048)
    service, renderer, rng = PrefixService(), PromptRenderer(bundle), random.Random(3)
    space = await service.register(ReplicaId("r"), "demo", bundle, 16)
    vocabulary = await service.vocabulary_of(ReplicaId("r"))
    assert vocabulary is not None
    assert vocabulary.is_incremental
    messages = [{"role": "system", "content": "You are a helpful assistant. " * 40}]
    for turn in range(12):
        text = "".join(rng.choice(PIECES) for _ in range(40))
        messages.append({"role": "assistant" if turn % 2 else "user", "content": text})
        chains = await service.chains(PromptSource(messages=messages), [space.key_space])
        ids = renderer.chat_ids(messages)
        assert chains[space.key_space].num_tokens == len(ids)
        assert list(chains[space.key_space].keys) == token_keys(space.root("", ""), ids, 16)
    assert service.stats().num_piece_hits > service.stats().num_piece_misses
    service.close()
