"""Policies by name: what `--policy` accepts."""

from __future__ import annotations

from collections.abc import Callable

from policies.least_loaded import LeastLoaded
from policies.peers.aibrix import Aibrix
from policies.peers.approximate_tree import ApproximateTree
from policies.peers.bounded_hash import BoundedHash
from policies.peers.dualmap import DualMap
from policies.peers.dynamo import Dynamo
from policies.peers.llmd import Llmd
from policies.peers.lmetric import LMetric
from policies.peers.lpwl import Lpwl
from policies.peers.power_of_two import PowerOfTwo
from policies.peers.preble import Preble
from policies.peers.production_stack import ProductionStack
from policies.peers.random_choice import RandomChoice
from policies.peers.sticky import Sticky
from policies.round_robin import RoundRobin
from policies.types import Policy
from policies.warm import Warm

DEFAULT_POLICY = "warm"

_POLICIES: dict[str, Callable[[], Policy]] = {
    Warm.name: Warm,
    RoundRobin.name: RoundRobin,
    RandomChoice.name: RandomChoice,
    LeastLoaded.name: LeastLoaded,
    PowerOfTwo.name: PowerOfTwo,
    BoundedHash.name: BoundedHash,
    ApproximateTree.name: ApproximateTree,
    Aibrix.name: Aibrix,
    ProductionStack.name: ProductionStack,
    Llmd.name: Llmd,
    Dynamo.name: Dynamo,
    LMetric.name: LMetric,
    Lpwl.name: Lpwl,
    Preble.name: Preble,
    DualMap.name: DualMap,
    Sticky.name: Sticky,
}


class UnknownPolicy(ValueError):
    """No policy of that name; the message lists those there are."""

    def __init__(self, name: str) -> None:
        super().__init__(f"unknown policy {name!r}: choose one of {', '.join(policy_names())}")


def policy_names() -> tuple[str, ...]:
    return tuple(_POLICIES)


def make_policy(name: str) -> Policy:
    """A fresh policy with its defaults. Raises UnknownPolicy. Feed it by stateful.observer_of if it remembers."""
    factory = _POLICIES.get(name)
    if factory is None:
        raise UnknownPolicy(name)
    return factory()
