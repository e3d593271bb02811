"""Steps launched before the last one's tokens are read give the tokens of steps run one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine_worker.core.types import FinishReason, RequestUpdate, SampledToken, SamplingParams, StepPlan
from engine_worker.model.runner import LaunchedStep
from tests.engine_worker.model.serving import TinyEngine
from tests.engine_worker.model.tiny_models import tiny_model

pytestmark = pytest.mark.engine

PROMPTS = ([5, 9, 11, 3, 40, 41, 42], [7], [8, 8, 8, 30, 31, 32, 33, 34, 35, 36, 37, 38], [60, 61])
PARAMS = (
    SamplingParams(max_tokens=12, temperature=0.0),
    SamplingParams(max_tokens=15, temperature=1.2, seed=3, top_p=0.8, num_logprobs=3),
    SamplingParams(max_tokens=9, temperature=0.8, seed=4, top_k=5, min_p=0.05),
    SamplingParams(max_tokens=14, temperature=0.0, num_logprobs=0),
)


def run(
    engine: TinyEngine, is_async: bool, params: Sequence[SamplingParams] = PARAMS
) -> tuple[dict[str, list[SampledToken]], dict[str, RequestUpdate], int]:
    """(tokens by request, last updates, steps that were planned ahead), as the engine loop drives a runner."""
    for prompt, wanted in zip(PROMPTS, params, strict=True):
        engine.add(prompt, wanted)
    tokens: dict[str, list[SampledToken]] = {}
    ends: dict[str, RequestUpdate] = {}
    ahead: tuple[StepPlan, LaunchedStep] | None = None
    num_ahead = 0
    while engine.scheduler.has_work() or ahead is not None:
        if ahead is None:
            plan = engine.scheduler.plan(0.0)
            launched = engine.runner.launch(plan) if is_async else LaunchedStep(engine.runner.execute(plan), None)
        else:
            plan, launched = ahead
        behind = engine.scheduler.plan_ahead(plan) if is_async else None
        num_ahead += behind is not None
        ahead = None if behind is None else (behind, engine.runner.launch(behind))
        for update in engine.scheduler.commit(plan, launched.result()):
            if update.token is not None:
                tokens.setdefault(update.request_id, []).append(update.token)
            if update.finish_reason is not None:
                ends[update.request_id] = update
                engine.runner.release(update.request_id)
        engine.scheduler.take_events()
        engine.scheduler.check_invariants()
        engine.runner.check_invariants()
    return tokens, ends, num_ahead


@pytest.mark.parametrize("budget", [1 << 20, 6])
def test_asynchronous_steps_give_the_same_tokens(budget: int) -> None:
    module = tiny_model("llama")
    expected, ends, none = run(TinyEngine(module, budget=budget), is_async=False)
    found, found_ends, num_ahead = run(TinyEngine(module, budget=budget), is_async=True)
    assert none == 0
    assert num_ahead >= 10
    assert found_ends.keys() == ends.keys()
    for request_id, tokens in expected.items():
        assert [token.token_id for token in found[request_id]] == [token.token_id for token in tokens]
        for ours, theirs in zip(found[request_id], tokens, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [token_id for token_id, _ in ours.top_logprobs] == [token_id for token_id, _ in theirs.top_logprobs]


def test_a_request_that_fails_is_dropped_from_the_step_behind() -> None:
    """NaN logits are noticed one step late: nothing of the request comes after, and its neighbours don't notice."""
    module = tiny_model("llama")
    expected, _, _ = run(TinyEngine(module), is_async=False)
    module.get_input_embeddings().weight[PROMPTS[1][0]] = float("nan")
    found, ends, _ = run(TinyEngine(module), is_async=True)
    assert ends["r1"].finish_reason is FinishReason.ERROR
    assert "not finite" in (ends["r1"].error or "")
    assert "r1" not in found
    for request_id in ("r0", "r2", "r3"):
        assert [t.token_id for t in found[request_id]] == [t.token_id for t in expected[request_id]]


def test_a_token_outside_the_vocabulary_fails_alone() -> None:
    module = tiny_model("llama")
    engine = TinyEngine(module)
    engine.add([5000], PARAMS[0])
    found, ends, num_ahead = run(engine, is_async=True)
    assert "outside the model's vocabulary" in (ends["r0"].error or "")
    assert num_ahead >= 10
    assert sorted(found) == ["r1", "r2", "r3", "r4"]


def test_who_needs_its_tokens_runs_step_by_step() -> None:
    penalised = (*PARAMS[:3], SamplingParams(max_tokens=14, temperature=0.0, repetition_penalty=1.3))
    module = tiny_model("llama")
    expected, _, _ = run(TinyEngine(module), is_async=False, params=penalised)
    found, _, num_ahead = run(TinyEngine(module), is_async=True, params=penalised)
    assert num_ahead <= 1  # once it is alone no more
    assert [t.token_id for t in found["r3"]] == [t.token_id for t in expected["r3"]]
