"""A draft model: it changes no answer, guesses right where it is the model itself, and survives what moves blocks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_worker.config import EngineConfig
from engine_worker.contract.state import TokenizerBundle
from engine_worker.core.types import SamplingParams
from engine_worker.model.backend_cpu import CPUBackend
from engine_worker.model.draft_model import ModelDrafter
from engine_worker.model.drafters import check_vocabulary
from engine_worker.model.errors import ModelError
from engine_worker.model.kv_tensors import KVTensors
from engine_worker.model.load import load_model
from engine_worker.model.packed_model import PackedModel
from tests.engine_worker.model.serving import MAX_MODEL_LEN, Answer, TinyEngine
from tests.engine_worker.model.test_constrained_engine import MODULE, VOCAB, run_all
from tests.engine_worker.model.tiny_models import tiny_config, tiny_model
from tests.engine_worker.serving.fake_engine import make_tokenizer

pytestmark = pytest.mark.engine

OTHER = tiny_model(
    "llama", vocab_size=VOCAB - 8, num_hidden_layers=1, seed=4
)  # narrower: it never guesses the last ids


def engine_with(module: Any, *, budget: int = 1 << 20, num_blocks: int = 256, max_model_len: int = MAX_MODEL_LEN):  # type: ignore[no-untyped-def]
    engine = TinyEngine(MODULE, budget=budget, num_blocks=num_blocks)
    layers = module.config.num_hidden_layers
    kv = KVTensors(layers, num_blocks, 4, module.device)
    model = PackedModel(module, CPUBackend(), kv)
    engine.drafter = ModelDrafter("draft", model, engine.sampler, 16, max_model_len, budget)
    return engine


def jobs(count: int, **params: Any) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(3)
    shared = [rng.randrange(VOCAB) for _ in range(17)]
    prompts = [
        shared[: rng.randrange(18)] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))] for _ in range(count)
    ]
    return [(prompt, SamplingParams(max_tokens=18, seed=i, **params)) for i, prompt in enumerate(prompts)]


def tokens_of(answers: list[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("kwargs", [{}, {"budget": 12}, {"budget": 16, "num_blocks": 24}], ids=str)
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.9, "presence_penalty": 0.5}], ids=str)
@pytest.mark.parametrize("module", [MODULE, OTHER], ids=["itself", "another"])
def test_answers_stay(module: Any, params: dict[str, Any], kwargs: dict[str, Any]) -> None:
    """Twice, so that the second round begins with prefix hits; in chunks, and in a pool that is too small."""
    work = jobs(7, **params)
    plain = tokens_of(run_all(TinyEngine(MODULE), work))
    engine = engine_with(module, **kwargs)
    for _ in range(2):
        assert tokens_of(run_all(engine, work)) == plain
    stats = engine.scheduler.stats()
    assert stats.num_draft_tokens > 0
    if module is MODULE:
        assert stats.num_accepted_tokens > 0.95 * stats.num_draft_tokens
    else:
        assert stats.num_accepted_tokens < stats.num_draft_tokens
        assert (stats.num_preemptions > 0) == ("num_blocks" in kwargs)
    assert engine.drafter.num_states == engine.sampler.num_states == 0
    assert stats.num_free_blocks == stats.num_blocks


def test_a_hit_on_blocks_that_the_drafter_filled_is_a_hit_for_it_too() -> None:
    engine = engine_with(MODULE)
    prompt = list(range(5, 30))
    [first] = run_all(engine, [(prompt, SamplingParams(max_tokens=8, temperature=0.0))])
    computed: list[int] = []
    run = engine.drafter._run
    engine.drafter._run = lambda segments: computed.extend(len(s.token_ids) for s in segments) or run(segments)  # type: ignore[method-assign]
    [again] = run_all(engine, [(prompt, SamplingParams(max_tokens=8, temperature=0.0))])
    assert again.token_ids == first.token_ids
    assert max(computed) < 8, "it computed the prompt anew"


def test_no_guesses_beyond_the_draft_models_own_length() -> None:
    engine = engine_with(MODULE, max_model_len=20)
    [answer] = run_all(engine, [(list(range(5, 15)), SamplingParams(max_tokens=30, temperature=0.0))])
    [plain] = run_all(TinyEngine(MODULE), [(list(range(5, 15)), SamplingParams(max_tokens=30, temperature=0.0))])
    assert answer.token_ids == plain.token_ids
    assert 0 < engine.scheduler.stats().num_draft_tokens <= 10


def test_a_draft_model_needs_no_room_for_its_own_longest_sequence(tmp_path: Path) -> None:
    """The cache is planned for --max-model-len; what the draft model could do beyond that does not matter."""
    tiny_config("llama").save_pretrained(tmp_path)
    config = EngineConfig(
        model=str(tmp_path), speculative=str(tmp_path), load_format="dummy", dtype="float32", device="cpu",
        max_model_len=96, kv_cache_memory=96 << 10, num_threads=torch.get_num_threads(), self_test=False,
    )  # fmt: skip
    runner = load_model(config, lambda message: None)
    assert runner.info.max_model_len == 96
    assert isinstance(runner.drafter, ModelDrafter)


@pytest.mark.parametrize("name", ["/nonexistent", "ngrams", "./nothing.gguf"])
def test_a_draft_model_that_is_not_there_is_refused_before_the_large_one_is_read(name: str, tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), speculative=name, load_format="dummy", device="cpu")
    told: list[str] = []
    with pytest.raises(ModelError, match=f'--speculative takes "ngram" or a draft model. .*{name}'):
        load_model(config, told.append)
    assert told == []


def test_another_vocabulary_is_refused() -> None:
    tokenizer = make_tokenizer()
    own = TokenizerBundle(
        fingerprint="a", tokenizer_json=tokenizer.to_str(), chat_template=None, special_tokens={}, max_model_len=9
    )
    check_vocabulary(EngineConfig(model="m", speculative="d"), own, own)
    tokenizer.add_tokens(["one more"])
    other = TokenizerBundle(
        fingerprint="b", tokenizer_json=tokenizer.to_str(), chat_template=None, special_tokens={}, max_model_len=9
    )
    with pytest.raises(ModelError, match=r"has another vocabulary than m .see token 'one more'"):
        check_vocabulary(EngineConfig(model="m", speculative="d"), own, other)
