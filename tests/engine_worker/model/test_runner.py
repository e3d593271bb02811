"""The runner executes plans as given, and a request's fault stays its own."""

from __future__ import annotations

import pytest
import torch

from engine_worker.core.types import BlockId, FinishReason, Request, SamplingParams, Segment, StepPlan
from engine_worker.model.attention import AttentionBackend
from engine_worker.model.backend_cpu import CPUBackend
from engine_worker.model.backend_native import NativeBackend
from engine_worker.model.backend_reference import ReferenceBackend
from engine_worker.model.packing import BlockTables, fresh_blocks
from tests.engine_worker.model.native import AUTO, library_for
from tests.engine_worker.model.serving import Answer, TinyEngine
from tests.engine_worker.model.tiny_models import VOCAB, tiny_model

pytestmark = pytest.mark.engine

POISON = 50  # the token whose embedding is NaN in poisoned models
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


def poisoned(num_blocks: int = 12, backend: AttentionBackend | None = None) -> TinyEngine:
    module = tiny_model("llama")
    module.get_input_embeddings().weight[POISON] = float("nan")
    return TinyEngine(module, num_blocks=num_blocks, backend=backend)


def clean_prompt(length: int, first: int = 3) -> list[int]:
    return [first + i % 40 for i in range(length)]


def test_nan_logits_fail_their_request_alone() -> None:
    healthy = clean_prompt(11)
    expected = TinyEngine(tiny_model("llama")).run([healthy], 8)[0]
    sick, well = poisoned().run([[5, POISON, 6], healthy], 8)
    assert sick.finish_reason is FinishReason.ERROR
    assert "not finite" in (sick.error or "")
    assert sick.token_ids == []
    assert well.token_ids == expected.token_ids


def test_blocks_of_a_failed_request_are_clean_for_their_next_owner() -> None:
    """Masked keys and values are still multiplied: NaN leftovers in a reused block would spread."""
    engine = poisoned()
    expected = TinyEngine(tiny_model("llama")).run([clean_prompt(21)], 8)[0]
    for _ in range(3):  # through all 12 blocks of the pool
        sick = engine.run([[POISON] * 30], 8)[0]
        assert sick.finish_reason is FinishReason.ERROR
        assert engine.model.kv.has_polluted_blocks
        well = engine.run([clean_prompt(21)], 8)[0]
        assert well.token_ids == expected.token_ids
        engine.scheduler.reset_prefix_cache()


def test_a_request_cancelled_in_a_poisoned_prefill_leaves_nothing_behind() -> None:
    """Nothing was sampled, so no logits told of the NaN; the cache noticed it by itself."""
    module = tiny_model("llama")
    module.get_input_embeddings().weight[POISON] = float("nan")
    engine = TinyEngine(module, num_blocks=12, budget=8)
    request_id = engine.add([POISON] * 30, GREEDY)
    engine.step({})
    assert engine.model.kv.has_polluted_blocks
    engine.cancel(request_id)
    expected = TinyEngine(tiny_model("llama"), budget=8).run([clean_prompt(30)], 8)[0]
    assert engine.run([clean_prompt(30)], 8)[0].token_ids == expected.token_ids


@pytest.mark.parametrize("num_right", range(4))
@pytest.mark.parametrize("name", ["cpu", "reference", "native"])
def test_a_poisoned_guess_costs_its_request_nothing(name: str, num_right: int) -> None:
    """Neither in its own step, where earlier tokens multiply it by 0, nor behind the output, where it is padding."""
    backend: AttentionBackend
    match name:
        case "cpu":
            backend = CPUBackend()
        case "reference":
            backend = ReferenceBackend()
        case _:
            backend = NativeBackend(library_for(AUTO))
    prompts = [clean_prompt(11), clean_prompt(6, first=7), clean_prompt(21, first=5), clean_prompt(3), [9, POISON, 8]]
    healthy = prompts[:4]
    expected = [answer.token_ids for answer in TinyEngine(tiny_model("llama")).run(healthy, 16)]
    assert not any(POISON in token_ids for token_ids in expected)
    engine = poisoned(num_blocks=64, backend=backend)

    def guess(request: Request, most: int) -> list[int]:
        coming = expected[int(request.request_id[1:])][len(request.output_ids) :]
        return [*coming[:num_right], POISON, POISON][:most]

    engine.guess = guess
    *well, sick = engine.run(prompts, 16)
    assert [answer.token_ids for answer in well] == expected
    assert sick.finish_reason is FinishReason.ERROR
    assert engine.scheduler.stats().num_draft_tokens > 0


def test_a_poisoned_token_fails_its_request_also_where_it_was_guessed() -> None:
    module = tiny_model("llama")
    said = TinyEngine(module).run([clean_prompt(11)], 8)[0].token_ids
    first = said.index(said[3])
    module.get_input_embeddings().weight[said[3]] = float("nan")
    engine = TinyEngine(module, guess=lambda request, most: said[len(request.output_ids) :][:most])
    answer = engine.run([clean_prompt(11)], 8)[0]
    assert answer.finish_reason is FinishReason.ERROR
    assert answer.token_ids == said[: first + 1]


@pytest.mark.parametrize("outside", [VOCAB, -1, 1 << 40])
def test_ids_outside_the_vocabulary_fail_their_request_alone(outside: int) -> None:
    engine = TinyEngine(tiny_model("llama"))
    healthy = clean_prompt(11)
    expected = TinyEngine(tiny_model("llama")).run([healthy], 8)[0]
    sick, well = engine.run([[5, outside, 6], healthy], 8)
    assert sick.finish_reason is FinishReason.ERROR
    assert f"Token id {outside} is outside" in (sick.error or "")
    assert well.token_ids == expected.token_ids


def test_the_head_runs_only_where_a_token_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of prefill chunks alone computes no logits; a mixed step one row a sampled token."""
    engine = TinyEngine(tiny_model("llama"), budget=16)
    head = engine.model.module.get_output_embeddings()
    rows: list[int] = []
    head.register_forward_hook(lambda module, inputs, output: rows.append(inputs[0].shape[-2]))
    engine.run([clean_prompt(40), clean_prompt(3)], 4)
    assert sum(rows) == 8
    assert len(rows) == engine.num_steps - 2  # 40 tokens in chunks of 16: two steps had nothing to sample


def test_an_empty_plan_is_nothing_to_do() -> None:
    result = TinyEngine(tiny_model("llama")).runner.execute(StepPlan(()))
    assert result.sampled == {}
    assert result.failed == {}


def test_release_forgets_and_may_be_repeated() -> None:
    engine = TinyEngine(tiny_model("llama"))
    params = SamplingParams(max_tokens=50, temperature=1.0, seed=1)
    request_id = engine.add(clean_prompt(5), params)
    for _ in range(3):
        engine.step({})
    assert engine.sampler.num_states == 1
    for _ in range(2):
        engine.cancel(request_id)
    assert engine.sampler.num_states == 0
    engine.runner.release("never heard of")
    engine.runner.check_invariants()


def test_requests_in_any_number_find_a_row() -> None:
    """A row is a matter of bookkeeping: more requests than expected, released or not, must not fail."""
    engine = TinyEngine(tiny_model("llama"), max_num_seqs=16)
    tables = engine.runner._tables
    for number in range(40):
        tables.update(f"forgotten{number}", [BlockId(1)])
    expected = TinyEngine(tiny_model("llama")).run([clean_prompt(9)], 8)[0]
    assert engine.run([clean_prompt(9)], 8)[0].token_ids == expected.token_ids


def test_seeded_sampling_does_not_depend_on_the_batch() -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=7)
    alone, together = TinyEngine(tiny_model("llama")), TinyEngine(tiny_model("llama"), budget=8)
    answers: list[list[int]] = []
    for engine, others in ((alone, 0), (together, 4)):
        request_id = engine.add(clean_prompt(9), params)
        for number in range(others):
            engine.add(clean_prompt(20, first=4 + number), SamplingParams(max_tokens=9, temperature=1.0))
        collected: dict[str, Answer] = {}
        while engine.scheduler.has_work():
            engine.step(collected)
        answers.append(collected[request_id].token_ids)
    assert answers[0] == answers[1]


def test_fresh_blocks_are_those_written_from_their_start() -> None:
    request = Request(request_id="r", prompt_ids=(1,) * 20, params=GREEDY, arrival_s=0.0)
    blocks = [BlockId(block) for block in (7, 3, 9, 1, 4)]

    def fresh(start: int, end: int) -> list[int]:
        return fresh_blocks(Segment(request, start, request.prompt_ids[start:end], blocks, sample=False), 4)

    assert fresh(0, 4) == [7]
    assert fresh(0, 9) == [7, 3, 9]
    assert fresh(3, 4) == []
    assert fresh(3, 5) == [3]
    assert fresh(8, 9) == [9]
    assert fresh(9, 12) == []


def test_deterministic() -> None:
    """The same plans give the same bits."""
    first, second = (TinyEngine(tiny_model("gpt_oss"), budget=16) for _ in range(2))
    prompts = [clean_prompt(30), clean_prompt(7), clean_prompt(12)]
    for ours, again in zip(first.run(prompts, 8), second.run(prompts, 8), strict=True):
        assert ours.token_ids == again.token_ids
        assert all(torch.equal(a, b) for a, b in zip(ours.logits, again.logits, strict=True))


def test_block_tables_share_memory_with_their_tensor() -> None:
    """Growing must not leave a backend with a stale copy."""
    tables = BlockTables(1, 1, 4)
    for length in (1, 2, 5):
        row = tables.update("a", [BlockId(block) for block in range(length)])
        assert tables.tensor[row, :length].tolist() == list(range(length))
    row = tables.update("b", [BlockId(9)])
    assert tables.tensor[row, 0] == 9
    tables.check_invariants()
