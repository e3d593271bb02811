"""When to guess, and how much: from measured costs and luck alone."""

from __future__ import annotations

import random

from engine_worker.core.speculation import ON_GAIN, PROBE_STEPS, SpeculationControl, StepCosts


def run(
    control: SpeculationControl,
    steps: int,
    num_requests: int,
    fixed_s: float,
    token_s: float,
    chance: float,
    seed: int = 0,
) -> list[int]:
    """Steps that cost fixed_s + token_s a token, with guesses that are right with `chance`. Guesses tried a step."""
    rng, tried = random.Random(seed), []
    for _ in range(steps):
        rooms = [(f"r{i}", 8) for i in range(num_requests)]
        depths = control.depths(rooms, num_requests)
        assert len(depths) == num_requests
        assert all(0 <= depth <= 8 for depth in depths)
        total = num_requests + sum(depths)
        control.costs.record(total, fixed_s + token_s * total)
        for (name, _), depth in zip(rooms, depths, strict=True):
            if depth:
                right = next((i for i in range(depth) if rng.random() >= chance), depth)
                control.tried(name, depth, right)
        tried.append(sum(depths))
    return tried


def test_one_request_with_good_luck_guesses_deep() -> None:
    tried = run(SpeculationControl(), 60, 1, fixed_s=20.0, token_s=1.0, chance=0.9)
    assert sum(tried[30:]) / 30 > 5


def test_bad_luck_ends_in_few_guesses_that_come_back_now_and_then() -> None:
    tried = run(SpeculationControl(), 400, 1, fixed_s=10.0, token_s=5.0, chance=0.02)
    assert sum(1 for count in tried[100:] if count) < 60
    assert any(tried[200:])


def test_goes_off_where_tokens_cost_what_they_bring_and_on_again() -> None:
    control = SpeculationControl()
    tried = run(control, 300, 32, fixed_s=1.0, token_s=1.0, chance=0.5)
    assert not control.is_on
    probes = [count for count in tried[100:] if count]
    assert len(probes) <= 200 / PROBE_STEPS + 1
    run(control, 40, 1, fixed_s=20.0, token_s=0.5, chance=0.9)
    assert control.is_on


def test_a_lucky_request_guesses_beside_an_unlucky_one() -> None:
    control = SpeculationControl()
    for _ in range(50):
        depths = control.depths([("good", 8), ("bad", 8)], 2)
        control.costs.record(2 + sum(depths), 10.0 + 1.0 * sum(depths))
        if depths[0]:
            control.tried("good", depths[0], depths[0])
        if depths[1]:
            control.tried("bad", depths[1], 0)
    assert depths[0] > depths[1]
    control.release("good")
    control.release("bad")
    assert control.num_requests == 0


def test_between_off_and_on_lies_a_margin() -> None:
    """At a gain between none and ON_GAIN the state stays what it was."""
    for begin in (True, False):
        control = SpeculationControl()
        control.is_on = begin
        control.costs.record(1, 10.0)
        middle = 10.0 * (1 + 0.6) / (1 + (ON_GAIN - 1) / 2)  # what one guess may cost for half the margin
        for num_tokens in (2, 3, 4, 6, 8, 12):
            control.costs.record(num_tokens, middle * (1 + (num_tokens - 2)))
        control.depths([("a", 1)], 1)
        assert control.is_on == begin


def test_drafting_that_costs_more_than_it_brings_is_left() -> None:
    control = SpeculationControl()
    for num_tokens in (1, 2, 3, 4, 6, 9):
        control.costs.record(num_tokens, 10.0)
    assert control.depths([("a", 8)], 1, depth_s=0.1) != [0]
    control.is_on = True
    assert control.depths([("a", 8)], 1, depth_s=50.0) == [0]
    assert not control.is_on


def test_costs_are_medians_that_never_fall_and_lines_between() -> None:
    costs = StepCosts()
    assert costs.seconds(5) == 0.0
    for seconds in (2.0, 90.0, 2.0):
        costs.record(1, seconds)
    assert costs.seconds(1) == costs.seconds(40) == 2.0
    costs.record(4, 8.0)
    costs.record(8, 6.0)
    assert costs.seconds(2) == 4.0
    assert costs.seconds(4) == costs.seconds(8) == costs.seconds(100) == 8.0
