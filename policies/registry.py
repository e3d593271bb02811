"""Policies by name: what `--policy` accepts.

A name may carry settings: `warm:tau=4:duplicate_price=0` or `dynamo:prefill_load_scale=64`. They are fields of the
policy's config; those that begin with `mirror_` belong to the FleetState that the policy is to look at (FleetConfig),
which `fleet_config` makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

from policies.fleet_config import FleetConfig
from policies.least_loaded import LeastLoaded
from policies.peers.aibrix import Aibrix, AibrixConfig
from policies.peers.approximate_tree import ApproximateTree, ApproximateTreeConfig
from policies.peers.bounded_hash import BoundedHash, BoundedHashConfig
from policies.peers.dualmap import DualMap, DualMapConfig
from policies.peers.dynamo import Dynamo, DynamoConfig
from policies.peers.llmd import Llmd, LlmdConfig
from policies.peers.lmetric import LMetric, LMetricConfig
from policies.peers.lpwl import Lpwl
from policies.peers.power_of_two import PowerOfTwo
from policies.peers.preble import Preble, PrebleConfig
from policies.peers.production_stack import ProductionStack, ProductionStackConfig
from policies.peers.random_choice import RandomChoice
from policies.peers.sticky import Sticky, StickyConfig
from policies.round_robin import RoundRobin
from policies.types import Policy
from policies.warm import NAME as WARM
from policies.warm import Warm
from policies.warm_config import WarmConfig
from policies.warm_queue import NAME as WARM_QUEUE
from policies.warm_queue import WarmQueue, WarmQueueConfig

DEFAULT_POLICY = "warm"
FLEET_PREFIX = "mirror_"

# name -> (the class, its config or None)
_POLICIES: dict[str, tuple[Callable[..., Policy], type | None]] = {
    WARM: (Warm, WarmConfig),
    WARM_QUEUE: (WarmQueue, WarmQueueConfig),
    RoundRobin.name: (RoundRobin, None),
    RandomChoice.name: (RandomChoice, None),
    LeastLoaded.name: (LeastLoaded, None),
    PowerOfTwo.name: (PowerOfTwo, None),
    BoundedHash.name: (BoundedHash, BoundedHashConfig),
    ApproximateTree.name: (ApproximateTree, ApproximateTreeConfig),
    Aibrix.name: (Aibrix, AibrixConfig),
    ProductionStack.name: (ProductionStack, ProductionStackConfig),
    Llmd.name: (Llmd, LlmdConfig),
    Dynamo.name: (Dynamo, DynamoConfig),
    LMetric.name: (LMetric, LMetricConfig),
    Lpwl.name: (Lpwl, None),
    Preble.name: (Preble, PrebleConfig),
    DualMap.name: (DualMap, DualMapConfig),
    Sticky.name: (Sticky, StickyConfig),
}


class UnknownPolicy(ValueError):
    """No policy of that name, or no such setting; the message lists those there are."""


def policy_names() -> tuple[str, ...]:
    return tuple(_POLICIES)


def make_policy(spec: str) -> Policy:
    """A fresh policy from its name and settings. Raises UnknownPolicy. stateful.observer_of says how to feed it,
    warm_queue.hold_of whether it holds requests back."""
    name, settings = _parse(spec)
    factory, config = _POLICIES[name]
    own = {key: value for key, value in settings.items() if not key.startswith(FLEET_PREFIX)}
    if config is None:
        _check(name, own, {})
        return factory()
    return factory(_configured(name, config(), own))


def fleet_config(spec: str, base: FleetConfig | None = None) -> FleetConfig:
    """`base` with the settings of `spec` that concern the fleet's state. Raises UnknownPolicy."""
    name, settings = _parse(spec)
    fleet = {key: value for key, value in settings.items() if key.startswith(FLEET_PREFIX)}
    return cast(FleetConfig, _configured(name, base or FleetConfig(), fleet))


def _parse(spec: str) -> tuple[str, dict[str, str]]:
    name, _, rest = spec.partition(":")
    if name not in _POLICIES:
        raise UnknownPolicy(f"unknown policy {name!r}: choose one of {', '.join(policy_names())}")
    settings = {}
    for part in filter(None, rest.split(":")):
        key, equals, value = part.partition("=")
        if not equals:
            raise UnknownPolicy(f"setting {part!r} of policy {name} has no value: write it as {name}:setting=value")
        settings[key.strip()] = value.strip()
    return name, settings


def _configured(name: str, config: object, settings: Mapping[str, str]) -> object:
    """`config` with `settings` read by the types of its defaults."""
    assert is_dataclass(config)
    assert not isinstance(config, type)
    defaults = {each.name: getattr(config, each.name) for each in fields(config)}
    _check(name, settings, defaults)
    try:
        return replace(cast(Any, config), **{key: _read(key, text, defaults[key]) for key, text in settings.items()})
    except ValueError as error:
        raise UnknownPolicy(f"policy {name}: {error}") from None


def _check(name: str, settings: Mapping[str, str], known: Mapping[str, object]) -> None:
    for key in settings:
        if key not in known:
            there = ", ".join(known) or "none"
            raise UnknownPolicy(f"policy {name} has no setting {key!r}; its settings: {there}")


def _read(key: str, text: str, default: object) -> object:
    try:
        if isinstance(default, bool):
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        return type(default)(text)  # type: ignore[call-arg]
    except (KeyError, ValueError):
        raise ValueError(f"{key}={text!r} is not a {type(default).__name__}") from None
