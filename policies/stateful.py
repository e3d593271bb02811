"""Policies that remember: the seam between a rule and what it has seen.

Theory. Most rules decide from the snapshot alone. Some keep a picture of their own (a prefix tree, a window of recent
work, where a session went). Such a policy takes the same events as FleetState, in the same order and right after it,
through `observe`; nothing else changes what it remembers, `choose` only reads it. So a policy stays deterministic (a
log of events replays to the same decisions) and any driver can feed it: the gateway, the simulator, a test.

What is remembered about a replica goes when it leaves or restarts as another process, and everything is bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from policies.events import Event
from policies.types import Policy


@runtime_checkable
class Stateful(Protocol):
    """What a policy with a memory of its own has beside `choose`."""

    def observe(self, event: Event) -> None:
        """Let one thing have happened. Events about unknown replicas and requests are late, and ignored."""
        ...

    def check_invariants(self) -> None: ...


def observer_of(policy: Policy) -> Callable[[Event], None] | None:
    """How to feed `policy`; None when it remembers nothing."""
    return policy.observe if isinstance(policy, Stateful) else None
