"""Policies by name: what `--policy` accepts."""

from __future__ import annotations

from collections.abc import Callable

from policies.least_loaded import LeastLoaded
from policies.round_robin import RoundRobin
from policies.types import Policy
from policies.warm import Warm

DEFAULT_POLICY = "warm"

_POLICIES: dict[str, Callable[[], Policy]] = {
    Warm.name: Warm,
    RoundRobin.name: RoundRobin,
    LeastLoaded.name: LeastLoaded,
}


class UnknownPolicy(ValueError):
    """No policy of that name; the message lists those there are."""

    def __init__(self, name: str) -> None:
        super().__init__(f"unknown policy {name!r}: choose one of {', '.join(policy_names())}")


def policy_names() -> tuple[str, ...]:
    return tuple(_POLICIES)


def make_policy(name: str) -> Policy:
    """A fresh policy with its defaults. Raises UnknownPolicy."""
    factory = _POLICIES.get(name)
    if factory is None:
        raise UnknownPolicy(name)
    return factory()
