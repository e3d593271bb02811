"""The fit of a worker's speed, and what counts as agreement between simulated and live."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadtest.sim.gpus import GPUS, Gpu
from loadtest.sim.setup import Fleet, Load, Setup
from loadtest.speed_fit import Measured, fit, fit_way, least_squares
from loadtest.validate import BLOCK_SIZE, IdSpeech, Side, drift, mean_work_s, misses, pooled, scaled, simulate, table
from tests.loadtest.sim.traces import request, timed

CPU = Gpu("cpu", 0.02, 1.1e-3, 2e-6, 300, 4e-7, step_s=0.004)
SIDE = Side(
    hit_ratio=0.4, ttft_p50_s=0.2, ttft_mean_s=0.3, ttft_p90_s=0.6, tpot_mean_s=0.05, num_requests=9, num_failed=0
)


def test_the_fit_finds_the_constants_behind_exact_times() -> None:
    prefills = [(n, CPU.step_seconds([(n, 0)], 0, 0)) for n in (64, 128, 256, 400, 512)]
    decodes = [(context, CPU.step_seconds((), 1, context)) for context in (80, 200, 500)]
    found = fit("fitted", Measured(tuple(prefills), tuple(decodes)), 300)
    for name in ("weights_s", "linear_s", "kv_s", "attention_s", "step_s"):
        assert getattr(found, name) == pytest.approx(getattr(CPU, name), rel=0.02), name


def test_the_way_to_an_engine_is_no_part_of_its_steps() -> None:
    way_s = 0.007
    prefills = [(n, way_s + CPU.step_seconds([(n, 0)], 0, 0)) for n in (64, 128, 256, 400, 512)]
    decodes = [(context, CPU.step_seconds((), 1, context)) for context in (80, 200, 500)]
    ways = [way_s + CPU.step_seconds([(1, 0)], 0, 0), 1.0, way_s + CPU.step_seconds([(1, 0)], 0, 0)]
    measured = Measured(tuple(prefills), tuple(decodes), tuple(ways))
    assert fit_way(measured) == pytest.approx(way_s, rel=0.02)
    found = fit("fitted", measured, 300)
    for name in ("weights_s", "linear_s", "step_s"):
        assert getattr(found, name) == pytest.approx(getattr(CPU, name), rel=0.05), name
    assert fit_way(replace(measured, ways=(0.001,))) == 0.0, "never less than none"
    assert fit_way(replace(measured, ways=())) == 0.0


def test_what_was_measured_before_and_after_counts_together_and_a_change_is_told() -> None:
    before = Measured(((64, 0.1), (128, 0.2)), ((80, 0.01),), (0.01,))
    after = Measured(((64, 0.2), (128, 0.2)), ((80, 0.03),), (0.02,))
    both = pooled(before, after)
    assert (len(both.prefills), len(both.decodes), both.ways) == (4, 2, (0.01, 0.02))
    assert drift(before, before) == 0.0
    assert drift(before, after) == drift(after, before) == pytest.approx(0.25)


def test_an_outlier_in_three_tries_changes_nothing() -> None:
    times = [(n, CPU.step_seconds([(n, 0)], 0, 0)) for n in (64, 128, 256, 512)]
    decodes = [(context, CPU.step_seconds((), 1, context)) for context in (80, 500)] * 3
    clean = fit("a", Measured(tuple(times * 3), tuple(decodes)), 1)
    stalled = fit("a", Measured((*times, *times, *[(n, 10.0) for n, _ in times]), tuple(decodes)), 1)
    assert clean == stalled


def test_coefficients_are_never_negative() -> None:
    assert least_squares([(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)], [3.0, 2.0, 1.0])[1] == 0.0


def test_too_few_measurements_are_refused() -> None:
    with pytest.raises(ValueError, match="three prompt lengths"):
        fit("a", Measured(((1, 1.0),), ((1, 1.0),)), 1)


def test_a_scaled_trace_keeps_its_blocks_and_fits_the_model() -> None:
    trace = scaled(timed(request(1, 2, 3, tail=100, output=320), request(*range(200), tail=5)), max_model_len=256)
    [[only]] = trace.sessions
    assert (only.num_prompt_tokens, only.num_output_tokens, only.block_ids) == (3 * BLOCK_SIZE + 4, 10, (1, 2, 3))
    assert trace.block_tokens == BLOCK_SIZE


def test_equal_blocks_are_equal_ids() -> None:
    trace = scaled(timed(request(1, 2, tail=100), request(1, 3, tail=100)), 256)
    [[one], [other]] = trace.sessions
    speech = IdSpeech()
    prompts = [speech.body(one, "a")["prompt"], speech.body(other, "b")["prompt"]]
    assert [len(prompt) for prompt in prompts] == [speech.num_prompt_tokens(one)] * 2
    assert prompts[0][:BLOCK_SIZE] == prompts[1][:BLOCK_SIZE]
    assert prompts[0][BLOCK_SIZE : 2 * BLOCK_SIZE] != prompts[1][BLOCK_SIZE : 2 * BLOCK_SIZE]


def test_the_simulated_side_runs_with_a_fitted_fleet() -> None:
    trace = scaled(timed(*[request(1, 2, 3, tail=9, output=64, at_s=float(n)) for n in range(6)]), 256)
    setup = Setup(trace=None, fleet=Fleet((CPU, CPU), (300, 300), 512, 64), load=Load(rate=1.0))  # type: ignore[arg-type]
    found = simulate(setup, trace, "warm", 1)
    assert found.num_requests == 6
    assert found.hit_ratio > 0.5
    further = simulate(setup, trace, "warm", 1, way_s=0.5)
    assert further == replace(
        found,
        ttft_p50_s=found.ttft_p50_s + 0.5,
        ttft_mean_s=found.ttft_mean_s + 0.5,
        ttft_p90_s=found.ttft_p90_s + 0.5,
    )
    assert mean_work_s(trace, [CPU, GPUS["h100"]], 512) > CPU.cold_prefill_s(49)


def test_misses_and_the_table_name_the_differences(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    assert misses(SIDE, replace(SIDE, hit_ratio=0.415, ttft_p50_s=0.19)) == []
    far = replace(SIDE, hit_ratio=0.5, ttft_p50_s=0.1, num_failed=1)
    assert [sentence.split(" ")[0] for sentence in misses(SIDE, far)] == ["the", "the", "1"]
    Console(width=100).print(table(SIDE, far))
    shown = capsys.readouterr().out
    assert "-10.0 points" in shown
    assert "+100 %" in shown
