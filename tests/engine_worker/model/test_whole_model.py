"""A step of the whole model in one call says what the model's own code says, and models that do more are left alone.

test_greedy_equality, test_last_layer and test_demo_equality go through it, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch

from engine_worker.core.types import BlockId, FinishReason, Request, SamplingParams, Segment
from engine_worker.model.backend_native import NativeBackend
from engine_worker.model.kv_tensors import KVTensors
from engine_worker.model.native_linear import NativeEmbedding
from engine_worker.model.packed_model import WHOLE_MODELS, PackedModel
from engine_worker.model.packing import BlockTables, PackedBatch, pack
from engine_worker.model.prepare import prepare_module
from engine_worker.model.rope import freeze_rope
from tests.engine_worker.model.native import AUTO, INSTRUCTION_SETS, library_for
from tests.engine_worker.model.serving import TinyEngine, transformers_greedy
from tests.engine_worker.model.tiny_models import VOCAB, tiny_model

pytestmark = pytest.mark.engine

CPU = torch.device("cpu")
NUM_BLOCKS, BLOCK_SIZE = 160, 4
POISON = 50


def prepare(module: Any, isa: str = AUTO, quantization: str = "") -> NativeBackend:
    library = library_for(isa)
    backend = NativeBackend(library)
    prepare_module(module, torch.float32, library, backend, quantization, lambda message: None)
    return backend


def packed_batch(chunks: Sequence[tuple[int, int]], first_id: int = 3) -> PackedBatch:
    """Chunks start .. end of as many requests, each with blocks of its own."""
    rng, segments, free = random.Random(5), [], iter(range(NUM_BLOCKS))
    for name, (start, end) in enumerate(chunks):
        ids = tuple(rng.randrange(first_id, VOCAB) for _ in range(end))
        request = Request(request_id=str(name), prompt_ids=ids, params=SamplingParams(max_tokens=1), arrival_s=0.0)
        request.block_ids = [BlockId(next(free)) for _ in range(-(-end // BLOCK_SIZE))]
        segments.append(Segment(request, start, ids[start:end], request.block_ids, sample=True))
    return pack(segments, BlockTables(8, 4, BLOCK_SIZE), CPU)


# -- the likeliest tokens


def rows_of_logits(width: int) -> list[np.ndarray]:
    rng = np.random.default_rng(width)
    plain = rng.normal(size=width).astype(np.float32)
    rows = [plain, -np.abs(plain) - 1, np.zeros(width, np.float32), np.round(plain), plain * np.float32(1e37)]
    rows += [np.where(plain > 0, np.float32(0.0), np.float32(-0.0))]  # equal, whatever their signs
    for place in sorted({0, 1, width // 2, width - 2, width - 1} & set(range(width))):
        for value in (np.nan, np.inf, -np.inf, 1e9, plain.max()):
            row = plain.copy()
            row[place] = value
            rows.append(row)
            for other in (np.nan, np.inf, 1e9):  # two of them: the first NaN, or the first of the largest
                both = row.copy()
                both[(place + width // 3) % width] = other
                rows.append(both)
    rows += [np.full(width, value, np.float32) for value in (np.nan, np.inf, -np.inf)]
    masked = np.full(width, -np.inf, np.float32)
    masked[-1] = -3.0
    return [*rows, masked]


@pytest.mark.parametrize("width", [1, 2, 7, 16, 17, 32, 97, 1000, 1024, 1025, 2063, 4096, 50257])
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_the_likeliest_is_what_numpy_finds(isa: str, width: int) -> None:
    logits = np.ascontiguousarray(np.stack(rows_of_logits(width)))
    best, ids = np.empty(len(logits), np.float32), np.empty(len(logits), np.int64)
    library_for(isa).find_likeliest(logits.ctypes.data, *logits.shape, best.ctypes.data, ids.ctypes.data, 2)
    expected = logits.argmax(axis=-1)
    assert ids.tolist() == expected.tolist()
    np.testing.assert_array_equal(best, np.take_along_axis(logits, expected[:, None], axis=-1)[:, 0])


# -- the same as the model's own code


def step_by_step(module: Any, backend: NativeBackend) -> PackedModel:
    """The same model and kernels without the one call."""
    model = PackedModel(module, backend, KVTensors(3, NUM_BLOCKS, BLOCK_SIZE, CPU))
    assert model._whole is not None
    model._whole = None
    return model


@pytest.mark.parametrize("quantization", ["", "int8", "int4"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_logits_cache_and_likeliest_are_those_of_single_calls(isa: str, tied: bool, quantization: str) -> None:
    shape = {"hidden_size": 64, "num_attention_heads": 8, "head_dim": 8}  # 4-bit weights have groups of 32
    module = tiny_model("llama", tie_word_embeddings=tied, **shape)
    backend = prepare(module, isa, quantization)
    assert isinstance(module.get_input_embeddings(), NativeEmbedding) == tied
    ours, theirs = (
        PackedModel(module, backend, KVTensors(3, NUM_BLOCKS, BLOCK_SIZE, CPU)),
        step_by_step(module, backend),
    )
    for chunks in ([(0, 9)], [(9, 10), (0, 30), (0, 1)], [(10, 11)], [(0, 300), (11, 12)]):  # beyond the first table
        batch = packed_batch(chunks)
        for keep in (batch.last_index, list(range(batch.num_tokens)), [batch.num_tokens - 1, 0, 0]):
            found, expected = ours.forward(batch, keep), theirs.forward(batch, keep)
            assert found is not None
            assert expected is not None
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
            assert theirs.last_likeliest is None
            assert ours.last_likeliest is not None
            best, ids = ours.last_likeliest
            assert ids.tolist() == found.argmax(-1).tolist()
            assert best.tolist() == found.max(-1).values.tolist()
            assert ours.last_calls == theirs.last_calls == [0, 1, 2]
            for layer in range(3):
                for mine, others in zip(ours.kv.layer(layer), theirs.kv.layer(layer), strict=True):
                    torch.testing.assert_close(mine, others, atol=1e-4, rtol=1e-4)
    assert ours.forward(batch, []) is None
    assert ours.last_likeliest is None


@pytest.mark.parametrize("outside", [VOCAB, -1, 1 << 40])
def test_an_id_without_an_embedding_is_refused_before_anything_is_written(outside: int) -> None:
    module = tiny_model("llama")
    model = PackedModel(module, prepare(module), KVTensors(3, NUM_BLOCKS, BLOCK_SIZE, CPU))
    batch = packed_batch([(0, 6)])
    batch.input_ids[0, 4] = outside
    with pytest.raises(IndexError, match="outside the model's vocabulary"):
        model.forward(batch, [5])
    assert not any(tensor.any() for layer in range(3) for tensor in model.kv.layer(layer))


# -- in service


def prompts() -> list[list[int]]:
    rng = random.Random(8)
    shared = [rng.randrange(3, POISON) for _ in range(22)]
    fresh = [[rng.randrange(3, POISON) for _ in range(n)] for n in (7, 41, 16, 3, 9)]
    return [*fresh, shared + fresh[0], shared[:19] + fresh[3], shared]


@pytest.mark.parametrize("settings", [{}, {"budget": 16, "num_blocks": 26}], ids=["roomy", "preempted"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_crowd_gets_transformers_answers_again_and_again_under_the_same_names(
    tied: bool, settings: dict[str, int]
) -> None:
    expected = [
        transformers_greedy(tiny_model("llama", tie_word_embeddings=tied), prompt, 20, "sdpa").token_ids
        for prompt in prompts()
    ]
    module = tiny_model("llama", tie_word_embeddings=tied)
    engine = TinyEngine(module, backend=prepare(module), **settings)
    for turn in range(3):
        engine._num_added = 0  # the names of those that are gone
        order = random.Random(turn).sample(range(len(expected)), len(expected))
        answers = engine.run([prompts()[index] for index in order], 20)
        assert [answer.token_ids for answer in answers] == [expected[index] for index in order]
        engine.runner.check_idle()
    assert (engine.scheduler.stats().num_preemptions > 0) == ("num_blocks" in settings)


PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 4},
    "filtered": {"temperature": 1.1, "seed": 4, "top_k": 7, "top_p": 0.9, "min_p": 0.01},
    "the first of one": {"temperature": 3.0, "top_k": 1},
    "biased": {"temperature": 0.0, "logit_bias": ((17, 9.0),)},
    "penalised": {"temperature": 0.0, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "bounded": {"temperature": 0.0, "allowed_token_ids": (5, 6, 7, 8)},
    "forbidding": {"temperature": 0.0, "bad_words": ((9,), (3, 4)), "min_tokens": 4, "stop_token_ids": (11, 12)},
    "with logprobs": {"temperature": 0.0, "num_logprobs": 3},
    "with prompt logprobs": {"temperature": 0.0, "num_prompt_logprobs": 1},
}


@pytest.mark.parametrize("crowd", [list(PARAMS), ["greedy"], *[[name] for name in PARAMS]], ids=str)
def test_every_way_of_sampling_says_what_it_says_without_the_one_call(crowd: list[str]) -> None:
    """In turns under the same names, so that one who only wants the likeliest comes before one who wants more."""
    module = tiny_model("llama", tie_word_embeddings=True)
    backend = prepare(module)
    ours, theirs = TinyEngine(module, backend=backend), TinyEngine(module, backend=backend)
    assert ours.model._whole is not None
    theirs.model._whole = None
    for turn in (["greedy"] * len(crowd), crowd, crowd[::-1]):
        said = []
        for engine in (ours, theirs):
            engine._num_added = 0
            for index, name in enumerate(turn):
                engine.add(prompts()[index % len(prompts())], SamplingParams(max_tokens=12, **PARAMS[name]))
            answers: dict[str, Any] = {}
            while engine.scheduler.has_work():
                engine.step(answers)
            engine.runner.check_idle()
            said.append({name: answer.token_ids for name, answer in answers.items()})
            engine.scheduler.reset_prefix_cache()
        assert said[0] == said[1]
        assert all(said[0].values())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_nan_fails_its_request_alone(tied: bool) -> None:
    healthy = prompts()[:3]
    expected = [
        answer.token_ids for answer in TinyEngine(tiny_model("llama", tie_word_embeddings=tied)).run(healthy, 8)
    ]
    module = tiny_model("llama", tie_word_embeddings=tied)
    backend = prepare(module)
    assert module in WHOLE_MODELS
    embedding = module.get_input_embeddings()
    if tied:  # the embedding is the head: what comes out for everyone is lost with it
        embedding.packed.data[POISON // 32, :, POISON % 32] = float("nan")
    else:
        embedding.weight[POISON] = float("nan")
    sick, *well = TinyEngine(module, backend=backend).run([[5, POISON, 6], *healthy], 8)
    assert sick.finish_reason is FinishReason.ERROR
    assert "not finite" in (sick.error or "")
    if tied:
        assert all(answer.finish_reason is FinishReason.ERROR for answer in well)
    else:
        assert [answer.token_ids for answer in well] == expected


# -- models that do more


def changing_logits(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A model whose logits are not just its head's."""
    module = tiny_model("llama")
    own = module.forward

    def forward(self: torch.nn.Module, **kwargs: Any) -> Any:
        out = own(**kwargs)
        out.logits = change(out.logits)
        return out

    module.forward = MethodType(forward, module)  # type: ignore[method-assign]
    return module


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "scaled": lambda logits: logits / 2,
    "shifted": lambda logits: logits + 1,
    "capped": lambda logits: 5 * torch.tanh(logits / 5),
    "capped where the trial doesn't reach": lambda logits: 2000 * torch.tanh(logits / 2000),
    "clipped where the trial doesn't reach": lambda logits: logits.clamp(max=200),
    "cut short": lambda logits: logits[..., :-1],
}


@pytest.mark.parametrize("what", list(CHANGES))
def test_a_model_that_changes_its_logits_keeps_its_own_code(what: str) -> None:
    module = changing_logits(CHANGES[what])
    backend = prepare(module)
    assert module not in WHOLE_MODELS
    model = PackedModel(module, backend, KVTensors(3, NUM_BLOCKS, BLOCK_SIZE, CPU))
    logits = model.forward(packed_batch([(0, 5), (0, 2)]), [4, 6])
    assert logits is not None
    assert model.last_likeliest is None


def test_a_model_that_changes_nothing_is_taken() -> None:
    module = changing_logits(lambda logits: logits)
    prepare(module)
    assert module in WHOLE_MODELS


class Doubling(torch.nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 2


def test_an_embedding_that_does_more_is_left_alone() -> None:
    module = tiny_model("llama")
    plain = module.get_input_embeddings()
    doubling = Doubling(*plain.weight.shape)
    doubling.weight = plain.weight
    module.set_input_embeddings(doubling)
    prepare(module)
    assert module not in WHOLE_MODELS


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_that_look_at_the_whole_pack_are_left_alone_until_they_are_frozen(kind: str) -> None:
    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        factors = {"short_factor": [1.0] * 4, "long_factor": [1.5] * 4}
        parameters |= {"original_max_position_embeddings": 300, **factors}
    for frozen in (False, True):
        module = tiny_model("llama", rope_parameters=dict(parameters))
        if frozen:
            freeze_rope(module, 300)
        prepare(module)
        assert (module in WHOLE_MODELS) == frozen


def test_layers_that_scale_by_the_position_are_left_alone() -> None:
    """Ministral3's queries grow from the 16384th position on, here from the 100th: a trial of a few tokens and the
    self-test's short sequences see nothing of it."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 5.12, "original_max_position_embeddings": 100}
    shape = {"rope_parameters": {**rope, "llama_4_scaling_beta": 0.5}, "head_dim": 8}
    module = tiny_model("ministral3", **shape)
    backend = prepare(module)
    prompt = [3 + index * index % (VOCAB - 3) for index in range(130)]
    expected = transformers_greedy(tiny_model("ministral3", **shape), prompt, 8, "eager").token_ids
    assert TinyEngine(module, backend=backend, budget=48).run([prompt], 8)[0].token_ids == expected
    assert module not in WHOLE_MODELS


@pytest.mark.parametrize("place", ["layers.1.input_layernorm", "layers.0.post_attention_layernorm", "norm"])
def test_a_norm_of_one_weight_for_all_columns_is_left_alone(place: str) -> None:
    """The kernels would read on behind it: here they would find the same numbers there, and the trial nothing amiss."""
    module, expected = tiny_model("llama"), tiny_model("llama")
    for model in (module, expected):
        weight = torch.nn.Parameter(torch.full((48,), 0.7)[:1], requires_grad=False)
        model.model.get_submodule(place).weight = weight
    backend = prepare(module)
    assert module not in WHOLE_MODELS
    answers = transformers_greedy(expected, prompts()[1], 8, "eager").token_ids
    assert TinyEngine(module, backend=backend).run(prompts()[1:2], 8)[0].token_ids == answers


def test_other_backends_go_their_own_way() -> None:
    module = tiny_model("llama")
    prepare(module)
    engine = TinyEngine(module)
    assert engine.model._whole is None
    expected = transformers_greedy(tiny_model("llama"), prompts()[0], 8, "sdpa").token_ids
    assert engine.run(prompts()[:1], 8)[0].token_ids == expected
