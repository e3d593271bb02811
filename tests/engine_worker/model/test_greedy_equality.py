"""Greedy answers equal transformers' own, one request at a time, whatever the batch, the chunks and the cache do.

For every family that is served: a tiny random model, whose windows the prompts outgrow. The reference is
`module.generate` with transformers' eager attention and cache, each prompt alone. Logits are compared too: a family may
keep its tokens with logits that are far off. Tokens may differ only where the reference itself is undecided (its two
best logits closer than MIN_GAP); from there on the two texts are different ones and are not compared.

Every family is served both ways that a CPU has: by the native kernels, prepared as a worker prepares its model at load,
and by torch's. The full product goes through the native kernels, the default wherever they can be had.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from types import MethodType
from typing import Any

import pytest
import torch

from engine_worker.core.types import FinishReason, Request
from engine_worker.model import backend_cpu_plan, packing
from engine_worker.model.attention import AttentionCall
from engine_worker.model.backend_cpu import CPUBackend
from engine_worker.model.backend_native import NativeBackend, Ranges
from engine_worker.model.backend_reference import ReferenceBackend
from engine_worker.model.kv_tensors import KVTensors
from engine_worker.model.masks import CAUSAL, MaskTag
from engine_worker.model.packing import PackedBatch
from engine_worker.model.prepare import prepare_module
from tests.engine_worker.model.native import AUTO, INSTRUCTION_SETS, can_be_had, library_for
from tests.engine_worker.model.serving import Answer, TinyEngine, transformers_greedy
from tests.engine_worker.model.tiny_models import FAMILIES, VOCAB, WINDOW, tiny_model

pytestmark = pytest.mark.engine

MAX_TOKENS = 14
MIN_GAP = 1e-3
LOGIT_TOLERANCE = 3e-4  # of the logits' standard deviation
UNLIMITED = 1 << 20
SMALL_POOL = {3: 13, 8: 24}  # blocks of 4 tokens, for batches of so many: too few for all, enough for any one

FULL_PRODUCT = ("llama", "gemma3_text")
REDUCED = tuple(family for family in FAMILIES if family not in FULL_PRODUCT)


@pytest.fixture(autouse=True)
def _both_ways_of_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some contexts here are short and gathered, others long and read in place. One thread, for equal sums."""
    torch.set_num_threads(1)
    monkeypatch.setattr(backend_cpu_plan, "SHORT_CONTEXT", 24)
    monkeypatch.setattr(packing, "SHORT_CONTEXT", 24)


@cache
def prompts() -> list[list[int]]:
    """Eight prompts of 3 to 45 tokens. Some share prefixes; one is a whole number of blocks and one repeats another."""
    rng = random.Random(7)

    def fresh(length: int) -> list[int]:
        return [rng.randrange(3, VOCAB) for _ in range(length)]

    shared = fresh(17)
    return [
        shared + fresh(6),
        fresh(7),
        shared + fresh(9),
        fresh(45),
        fresh(16),
        shared[:16],
        fresh(3),
        shared + fresh(6)[:1],
    ]


@cache
def model(family: str):  # type: ignore[no-untyped-def]
    return tiny_model(family)


@cache
def native_model(family: str, isa: str):  # type: ignore[no-untyped-def]
    """The family's model as a worker prepares it for the kernels, its backend, and what was done to it."""
    library = library_for(isa)
    backend = NativeBackend(library)
    module = tiny_model(family)
    prepared = prepare_module(module, torch.float32, library, backend, "", lambda message: None)
    return module, backend, prepared.details


def engine_for(family: str, served_by: str, **settings: Any) -> TinyEngine:
    """`served_by` is native or cpu. Where the kernels can't be had, torch's serve by default, and so here."""
    if served_by == "native" and can_be_had(AUTO):
        module, backend, _ = native_model(family, AUTO)
        return TinyEngine(module, backend=backend, **settings)
    return TinyEngine(model(family), backend=CPUBackend(), **settings)


@cache
def reference(family: str) -> list[Answer]:
    return [transformers_greedy(model(family), prompt, MAX_TOKENS, "eager") for prompt in prompts()]


def largest_error(answer: Answer, expected: Answer) -> float:
    """Assert equal tokens (up to an undecided one) and return the largest logit error over the logits' deviation."""
    assert len(answer.logits) == len(answer.token_ids)
    worst = 0.0
    for i, (ours, theirs) in enumerate(zip(answer.logits, expected.logits, strict=False)):
        worst = max(worst, float((ours - theirs).abs().max() / theirs.std()))
        if answer.token_ids[i] != expected.token_ids[i]:
            best, second = theirs.topk(2).values.tolist()
            assert best - second < MIN_GAP, f"token {i} differs: {answer.token_ids[i]}, not {expected.token_ids[i]}"
            return worst
    return worst


def assert_equal(answers: list[Answer], expected: list[Answer]) -> None:
    for number, (answer, truth) in enumerate(zip(answers, expected, strict=True)):
        assert answer.error is None
        assert answer.finish_reason is FinishReason.LENGTH
        assert len(answer.token_ids) == MAX_TOKENS
        error = largest_error(answer, truth)
        assert error < LOGIT_TOLERANCE, f"prompt {number}: logits are off by {error:.2g} of their deviation"


@dataclass(frozen=True)
class Setting:
    """One point of the matrix. It runs cold and, if `warm`, once more on the cache that this left behind."""

    batch: int
    budget: int
    preempt: bool = False
    cancel: bool = False
    warm: bool = True

    def __str__(self) -> str:
        extras = "".join(f" {name}" for name in ("preempt", "cancel") if getattr(self, name))
        return f"batch {self.batch} budget {'any' if self.budget == UNLIMITED else self.budget}{extras}"

    @property
    def is_possible(self) -> bool:
        return self.batch > 1 or not (self.preempt or self.cancel)


MATRIX = [
    setting
    for batch, budget, preempt, cancel in product((1, 3, 8), (16, 64, UNLIMITED), (False, True), (False, True))
    if (setting := Setting(batch, budget, preempt, cancel)).is_possible
]
COVERING = [
    Setting(1, 64),
    Setting(3, UNLIMITED, preempt=True, warm=False),
    Setting(8, 16, preempt=True),
    Setting(8, 64, cancel=True, warm=False),
]


def guesser(family: str) -> Callable[[Request, int], list[int]]:
    """Guesses what the reference answers, with every third token spoilt or so."""
    answers = {tuple(prompt): answer.token_ids for prompt, answer in zip(prompts(), reference(family), strict=True)}
    rng = random.Random(5)

    def guess(request: Request, most: int) -> list[int]:
        begin = len(request.output_ids)
        coming = answers[request.prompt_ids][begin : begin + rng.randint(0, most)]
        return [token_id if rng.random() < 0.7 else rng.randrange(3, VOCAB) for token_id in coming]

    return guess


def check(family: str, setting: Setting, served_by: str, *, speculate: bool = False) -> None:
    chosen, expected = prompts()[: setting.batch], reference(family)[: setting.batch]
    num_blocks = SMALL_POOL[setting.batch] if setting.preempt else 256
    guess = guesser(family) if speculate else None
    engine = engine_for(family, served_by, budget=setting.budget, num_blocks=num_blocks, guess=guess)
    cancel = canceller(engine, setting.batch // 2) if setting.cancel else None
    for warm in (False, True) if setting.warm else (False,):
        answers = engine.run(chosen, MAX_TOKENS, before_step=cancel)
        kept = [i for i in range(setting.batch) if not (setting.cancel and i == setting.batch // 2)]
        assert_equal([answers[i] for i in kept], [expected[i] for i in kept])
        if setting.cancel:
            gone = answers[setting.batch // 2]
            assert gone.finish_reason is None
            assert len(gone.token_ids) < MAX_TOKENS
            largest_error(gone, expected[setting.batch // 2])
        if warm and not setting.preempt:
            assert all(a.num_cached_tokens > 0 for i, a in enumerate(answers) if i in kept and len(chosen[i]) > 4)
        assert engine.kv.num_free_blocks == num_blocks, "blocks leaked"
    assert (engine.scheduler.stats().num_preemptions > 0) == setting.preempt
    stats = engine.scheduler.stats()
    assert (0 < stats.num_accepted_tokens < stats.num_draft_tokens) == speculate
    if not setting.cancel:
        assert engine.sampler.num_states == 0


def canceller(engine: TinyEngine, victim: int) -> Callable[[int, list[str]], None]:
    """Cancel one request in mid-flight: before the sixth step of a run."""

    def before_step(step: int, ids: list[str]) -> None:
        if step == 5:
            engine.cancel(ids[victim])

    return before_step


@pytest.mark.parametrize("family", FULL_PRODUCT)
@pytest.mark.parametrize("setting", MATRIX, ids=str)
def test_full_product(family: str, setting: Setting) -> None:
    check(family, setting, "native")


@pytest.mark.parametrize("family", FULL_PRODUCT)
@pytest.mark.parametrize("setting", COVERING, ids=str)
def test_full_product_families_by_torch(family: str, setting: Setting) -> None:
    check(family, setting, "cpu")


@pytest.mark.parametrize("family", REDUCED)
def test_covering_settings(family: str) -> None:
    """Two settings by the kernels and two by torch, and for the next family the other way around."""
    for index, setting in enumerate(COVERING, start=REDUCED.index(family)):
        check(family, setting, ("native", "cpu")[index % 2])


@pytest.mark.parametrize("setting", COVERING, ids=str)
@pytest.mark.parametrize("family", FULL_PRODUCT)
def test_speculation(family: str, setting: Setting) -> None:
    check(family, setting, "native", speculate=True)


@pytest.mark.parametrize("family", [*FULL_PRODUCT, *REDUCED])
def test_speculation_in_every_family(family: str) -> None:
    """A crowd in a pool that is too small, on torch's kernels and the native ones by turns."""
    served_by = ("native", "cpu")[list(FAMILIES).index(family) % 2]
    check(family, Setting(8, 16, preempt=True), served_by, speculate=True)


# Layers of these are recognised, in all their layers; the others' are not, and run kernel by kernel.
FUSED = ("llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3")
STACKED = ("llama", "smollm3")  # of these, those without windows: all their layers are one call


@pytest.mark.parametrize("isa", INSTRUCTION_SETS[:2])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_native_kernels(family: str, isa: str) -> None:
    if isa != "avx512" and family not in ("llama", "gemma3_text", "gpt_oss"):
        pytest.skip("a few families suffice for a second instruction set")
    module, backend, details = native_model(family, isa)
    one_call = ", into one call with embedding and head" if family in STACKED else ""
    assert f"{3 if family in FUSED else 0} of 3 layers fused{one_call}" in details
    engine = TinyEngine(module, budget=16, num_blocks=SMALL_POOL[8], backend=backend)
    assert_equal(engine.run(prompts(), MAX_TOKENS), reference(family))
    assert_equal(engine.run(prompts(), MAX_TOKENS), reference(family))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3"])
def test_reference_backend(family: str) -> None:
    """The reference backend serves as well, only slower."""
    engine = TinyEngine(model(family), budget=16, backend=ReferenceBackend())
    assert_equal(engine.run(prompts()[:3], MAX_TOKENS), reference(family)[:3])


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_block_sizes(block_size: int) -> None:
    engine = TinyEngine(model("gemma3_text"), budget=16, block_size=block_size)
    assert_equal(engine.run(prompts(), MAX_TOKENS), reference("gemma3_text"))
    assert_equal(engine.run(prompts(), MAX_TOKENS), reference("gemma3_text"))


# -- controls: the comparison must fail for an engine that is subtly wrong


class IgnoresMask(CPUBackend):
    """What an engine does that knows causal attention only."""

    def attend(self, call: AttentionCall, batch: PackedBatch, kv: KVTensors) -> torch.Tensor:
        return super().attend(replace(call, mask=CAUSAL), batch, kv)


class IgnoresSinks(CPUBackend):
    def attend(self, call: AttentionCall, batch: PackedBatch, kv: KVTensors) -> torch.Tensor:
        return super().attend(replace(call, sinks=None), batch, kv)


class IgnoresSoftcap(CPUBackend):
    def attend(self, call: AttentionCall, batch: PackedBatch, kv: KVTensors) -> torch.Tensor:
        return super().attend(replace(call, softcap=None), batch, kv)


class KernelsIgnoreMask(NativeBackend):
    def ranges(self, mask: MaskTag, batch: PackedBatch) -> Ranges:
        return super().ranges(CAUSAL, batch)


class KernelsIgnoreSinks(NativeBackend):
    def attend(self, call: AttentionCall, batch: PackedBatch, kv: KVTensors) -> torch.Tensor:
        return super().attend(replace(call, sinks=None), batch, kv)


WINDOWED = tuple(family for family, own in FAMILIES.items() if "sliding_window" in own)


@pytest.mark.parametrize(
    ("family", "wrong"),
    [
        *((family, IgnoresMask) for family in WINDOWED),
        ("gpt_oss", IgnoresSinks),
        ("gemma2", IgnoresSoftcap),
    ],
)
def test_a_naive_engine_is_told_apart(family: str, wrong: type[CPUBackend]) -> None:
    engine = TinyEngine(model(family), budget=16, backend=wrong())
    with pytest.raises(AssertionError, match=r"differs|are off by"):
        assert_equal(engine.run(prompts(), MAX_TOKENS), reference(family))


@pytest.mark.parametrize(
    ("family", "wrong"),
    [("mistral", KernelsIgnoreMask), ("gemma3_text", KernelsIgnoreMask), ("gpt_oss", KernelsIgnoreSinks)],
)
def test_naive_kernels_are_told_apart(family: str, wrong: type[NativeBackend]) -> None:
    library = library_for(AUTO)
    backend = wrong(library)
    module = tiny_model(family)
    prepared = prepare_module(module, torch.float32, library, backend, "", lambda message: None)
    assert "0 of 3 layers fused" in prepared.details  # the trial at load tells them apart first
    engine = TinyEngine(module, budget=16, backend=backend)
    with pytest.raises(AssertionError, match=r"differs|are off by"):
        assert_equal(engine.run(prompts(), MAX_TOKENS), reference(family))


@pytest.mark.parametrize("what", ["scales its input", "repeats a layer", "caps its output"])
def test_a_model_that_does_more_than_run_its_layers_keeps_its_own_forward(what: str) -> None:
    module = tiny_model("llama")
    base = module.base_model
    own, layers = base.forward, base.layers

    def forward(self: torch.nn.Module, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        if what == "scales its input":
            return own(**{**kwargs, "inputs_embeds": base.embed_tokens(input_ids) * 3})
        if what == "repeats a layer":
            first = layers[0].register_forward_hook(lambda layer, args, output: layers[2].mlp(output))
            try:
                return own(input_ids=input_ids, **kwargs)
            finally:
                first.remove()
        out = own(input_ids=input_ids, **kwargs)
        out.last_hidden_state = out.last_hidden_state.clamp(-0.5, 0.5)
        return out

    base.forward = changed = MethodType(forward, base)  # type: ignore[method-assign]
    library = library_for(AUTO)
    prepared = prepare_module(module, torch.float32, library, NativeBackend(library), "", lambda message: None)
    assert any("layers fused" in detail for detail in prepared.details)
    assert not any("one call" in detail for detail in prepared.details)
    assert base.forward is changed


@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_positions_are_told_apart(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions that count from the start of the pack, as if it were one text."""
    forward = model(family).forward

    def shifted(**inputs):  # type: ignore[no-untyped-def]
        inputs["position_ids"] = torch.arange(inputs["input_ids"].shape[1])[None]
        return forward(**inputs)

    monkeypatch.setattr(model(family), "forward", shifted)
    engine = TinyEngine(model(family))
    with pytest.raises(AssertionError, match=r"differs|are off by"):
        assert_equal(engine.run(prompts()[:3], MAX_TOKENS), reference(family)[:3])


def test_windows_matter() -> None:
    """The prompts and answers outgrow the windows of the windowed families, or the matrix would not see them."""
    assert len(WINDOWED) >= 9
    assert all(len(prompt) + MAX_TOKENS > 2 * WINDOW for prompt in prompts())
    assert sum(len(prompt) > 2 * WINDOW for prompt in prompts()) >= 3
