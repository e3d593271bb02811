"""Speeds learned online: right for the traffic seen, unmoved by single outliers, sane before any."""

from __future__ import annotations

import random

import pytest

from policies.cost import DEFAULT_RATES, RobustFit, SpeedModel, fleet_rates
from policies.types import Rates

LAPTOP = Rates(base_s=0.05, linear_s=4e-3, quadratic_s=5e-7, decode_step_s=0.08)
H200 = Rates(base_s=0.004, linear_s=3e-5, quadratic_s=4e-10, decode_step_s=0.006)


def taught(truth: Rates, num_requests: int, noise: float = 0.1, seed: int = 0) -> SpeedModel:
    rng, model = random.Random(seed), SpeedModel()
    for _ in range(num_requests):
        uncached, cached = rng.randrange(20, 4000), rng.choice((0, 0, 512, 3000))
        seconds = truth.prefill_s(uncached, cached) * rng.uniform(1 - noise, 1 + noise)
        model.observe_prefill(1, uncached, uncached * (cached + uncached / 2), seconds)
        model.observe_decode(50, 49 * truth.decode_step_s * rng.uniform(1 - noise, 1 + noise), 0.0)
    return model


@pytest.mark.parametrize("truth", [LAPTOP, H200], ids=["laptop", "h200"])
@pytest.mark.parametrize("seed", range(4))
def test_rates_come_near_the_truth_over_the_traffic_seen(truth: Rates, seed: int) -> None:
    learned = taught(truth, 60, seed=seed).own_rates()
    for uncached, cached in ((200, 0), (1000, 0), (4000, 0), (500, 3000)):
        assert learned.prefill_s(uncached, cached) == pytest.approx(truth.prefill_s(uncached, cached), rel=0.25)
    assert learned.decode_step_s == pytest.approx(truth.decode_step_s, rel=0.2)
    assert learned.num_observations == 60


@pytest.mark.parametrize("truth", [LAPTOP, H200], ids=["laptop", "h200"])
def test_one_observation_sets_the_scale(truth: Rates) -> None:
    learned = taught(truth, 1, noise=0.0).own_rates()
    assert truth.prefill_s(1000, 0) / 3 < learned.prefill_s(1000, 0) < truth.prefill_s(1000, 0) * 3


def test_an_outlier_moves_little_and_a_lasting_change_is_learned() -> None:
    model = taught(LAPTOP, 40, noise=0.0)
    before = model.own_rates().prefill_s(1000, 0)
    model.observe_prefill(1, 1000, 1000 * 500, 100 * before)
    assert model.own_rates().prefill_s(1000, 0) == pytest.approx(before, rel=0.1)
    for _ in range(80):
        model.observe_prefill(1, 1000, 1000 * 500, 3 * before)
    assert model.own_rates().prefill_s(1000, 0) == pytest.approx(3 * before, rel=0.15)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_cannot_be_are_ignored(seconds: float) -> None:
    fit = RobustFit((1.0,))
    fit.observe((1.0,), seconds)
    assert fit.num_observations == 0
    assert fit.coefficients == (1.0,)


def test_before_any_observation_rates_are_the_defaults() -> None:
    assert SpeedModel().rates(None) == DEFAULT_RATES
    assert fleet_rates([SpeedModel()]) is None


def test_a_newcomer_starts_at_its_fleets_speed_and_one_bad_start_does_not_brand_it() -> None:
    fleet = fleet_rates([taught(H200, 30, seed=s) for s in range(3)])
    assert fleet is not None
    newcomer = SpeedModel()
    assert newcomer.rates(fleet).prefill_s(1000, 0) == pytest.approx(fleet.prefill_s(1000, 0))
    assert newcomer.rates(fleet).num_observations == 0
    newcomer.observe_prefill(1, 1000, 1000 * 500, 100 * fleet.prefill_s(1000, 0))  # it compiled, say
    assert newcomer.rates(fleet).prefill_s(1000, 0) < 3 * fleet.prefill_s(1000, 0)


def test_equal_replicas_get_equal_rates_and_different_ones_their_own() -> None:
    models = [taught(H200, 30, seed=s) for s in range(4)] + [taught(LAPTOP, 30)]
    fleet = fleet_rates(models)
    *equal, laptop = [model.rates(fleet).prefill_s(1000, 0) for model in models]
    assert len(set(equal)) == 1
    assert laptop == pytest.approx(LAPTOP.prefill_s(1000, 0), rel=0.2)


def test_coefficients_are_never_negative() -> None:
    rng, fit = random.Random(3), RobustFit((0.01, 1e-4, 2e-9))
    for _ in range(200):
        n = rng.randrange(1, 5000)
        fit.observe((1.0, float(n), n * n / 2), rng.expovariate(1.0) + 1e-6)
        assert min(fit.coefficients) >= 0.0
