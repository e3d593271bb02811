"""The service model against sums by hand."""

from __future__ import annotations

import random

import pytest

from loadtest.sim.gpus import GPUS, Gpu, UnknownGpu, gpu_named, parse_fleet

PLAIN = Gpu("plain", weights_s=0.01, linear_s=1e-4, kv_s=1e-6, num_blocks=10, attention_s=1e-8, step_s=0.001)


def test_a_step_of_few_tokens_reads_the_weights() -> None:
    # 0.001 + max(0.01, 3e-4) + 1e-6 * 3000
    assert PLAIN.step_seconds((), 3, 3000) == pytest.approx(0.014)


def test_a_step_of_many_tokens_computes_them() -> None:
    # 0.001 + max(0.01, 502e-4) + 1e-8 * (500 * (1000 + 250)) + 1e-6 * 200
    assert PLAIN.step_seconds([(500, 1000)], 2, 200) == pytest.approx(0.001 + 0.0502 + 0.00625 + 0.0002)


def test_a_chunked_prefill_attends_every_pair_once() -> None:
    whole = PLAIN.step_seconds([(1000, 0)], 0, 0)
    halves = PLAIN.step_seconds([(500, 0)], 0, 0) + PLAIN.step_seconds([(500, 500)], 0, 0)
    assert halves - whole == pytest.approx(0.001)  # one more step floor, nothing else


def test_cold_prefill_is_the_sum_of_its_steps() -> None:
    for num_tokens in (1, 90, 1000, 1001, 2500):
        steps, done = 0.0, 0
        while done < num_tokens:
            size = min(1000, num_tokens - done)
            steps += PLAIN.step_seconds([(size, done)], 0, 0)
            done += size
        assert PLAIN.cold_prefill_s(num_tokens, budget=1000) == pytest.approx(steps)


@pytest.mark.parametrize("num_decodes", [1, 7])
def test_a_run_of_decode_steps_is_the_sum_of_its_steps(num_decodes: int) -> None:
    total, context = 0.0, 5000
    for step in range(1, 40):
        total += PLAIN.step_seconds((), num_decodes, context + (step - 1) * num_decodes)
        assert PLAIN.decode_run_s(step, num_decodes, context) == pytest.approx(total)


def test_the_step_under_way_at_a_moment() -> None:
    rng = random.Random(1)
    for _ in range(300):
        num_decodes, context = rng.randint(1, 50), rng.randint(1, 100_000)
        gpu = rng.choice([*GPUS.values(), PLAIN])
        seconds = rng.uniform(0.0, 20.0)
        steps = gpu.decode_steps_until(seconds, num_decodes, context)
        assert gpu.decode_run_s(steps, num_decodes, context) >= seconds
        assert steps == 1 or gpu.decode_run_s(steps - 1, num_decodes, context) < seconds


def test_the_table_of_gpus() -> None:
    assert {gpu.name: gpu.num_blocks for gpu in GPUS.values()} == {"l4": 37, "a100": 788, "h100": 788, "h200": 1606}
    h100 = gpu_named("H100")
    assert (h100.weights_s, h100.linear_s, h100.kv_s) == pytest.approx((6e-3, 29.5e-6, 49e-9))


def test_fleets() -> None:
    assert [gpu.name for gpu in parse_fleet("l4", 2)] == ["l4", "l4"]
    assert [gpu.name for gpu in parse_fleet("h100:1, l4:2", 8)] == ["h100", "l4", "l4"]
    with pytest.raises(UnknownGpu, match="choose one of l4"):
        parse_fleet("b200", 1)
    with pytest.raises(ValueError, match="NAME:COUNT"):
        parse_fleet("h100,l4", 8)
