"""Policies by name and settings."""

from __future__ import annotations

import pytest

from policies.fleet_config import FleetConfig
from policies.registry import UnknownPolicy, fleet_config, make_policy, policy_names
from policies.warm import Warm
from policies.warm_config import WarmConfig


def test_names_are_those_of_the_policies() -> None:
    assert set(policy_names()) == {
        "warm", "warm_queue", "round_robin", "random", "least_loaded", "power_of_two", "bounded_hash",
        "approximate_tree", "aibrix", "production_stack", "llmd", "dynamo", "lmetric", "lpwl", "preble",
        "dualmap", "sticky",
    }  # fmt: skip
    assert all(make_policy(name).name == name for name in policy_names())


def test_settings_change_the_policy_and_the_fleet_it_looks_at() -> None:
    policy = make_policy("warm:tau=4:duplicate_price=0:quadratic=no:mirror_pins=false")
    assert isinstance(policy, Warm)
    assert policy._config == WarmConfig(tau=4.0, duplicate_price=0.0, quadratic=False)
    assert fleet_config("warm:tau=4:mirror_pins=false") == FleetConfig(mirror_pins=False)
    base = FleetConfig(prediction_ttl_s=3.0)
    assert fleet_config("lpwl:mirror_learns=0", base) == FleetConfig(prediction_ttl_s=3.0, mirror_learns=False)
    assert fleet_config("warm") == FleetConfig()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("worm", "unknown policy 'worm': choose one of warm, warm_queue, round_robin"),
        ("warm:tua=4", "policy warm has no setting 'tua'; its settings: tau, kappa"),
        ("warm:tau", "setting 'tau' of policy warm has no value: write it as warm:setting=value"),
        ("warm:tau=four", "policy warm: tau='four' is not a float"),
        ("warm:quadratic=maybe", "policy warm: quadratic='maybe' is not a bool"),
        ("round_robin:tau=4", "policy round_robin has no setting 'tau'; its settings: none"),
        ("approximate_tree:below_threshold=best", "policy approximate_tree: below_threshold='best' is neither"),
        ("approximate_tree:balance_abs_threshold=1.5", "is not a int"),
    ],
)
def test_what_is_wrong_is_said_with_what_there_is(spec: str, message: str) -> None:
    with pytest.raises(UnknownPolicy, match=message.replace("?", r"\?")):
        make_policy(spec)


def test_the_fleets_settings_are_checked_too() -> None:
    with pytest.raises(UnknownPolicy, match="no setting 'mirror_size'"):
        fleet_config("warm:mirror_size=3")
