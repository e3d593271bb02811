"""Whose turn it is: requests of several tenants wait for places, and none can starve the others. No clock, no I/O.

Every tenant has a counter of the service it got, in tokens: uncached input and `OUTPUT_WEIGHT` times output, divided by
the tenant's weight. Of the tenants that wait, the one with the least counter goes next; within a tenant, first come,
first served. What a request will use is not known when it goes, so it is charged an estimate then and the difference
when it ends; a burst is thus paid for before its first answer.

Counters would let a tenant save up while it is idle. So one that begins to wait is lifted to the least counter of those
that wait, or, when it is the first, to that of the last one served: the counters without what is only estimated, or a
newcomer would pay for the others' estimates, which are mostly too high. (Virtual token counters, after Sheng et al.,
Fairness in Serving Large Language Models, OSDI 2024.)
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

OUTPUT_WEIGHT = 2.0
MAX_IDLE = 4096  # tenants remembered that neither wait nor are served

T = TypeVar("T")


class _Tenant(Generic[T]):
    """`counter` is the service charged for, `pending` the part of it that is an estimate still."""

    __slots__ = ("counter", "num_served", "pending", "waiting", "weight")

    def __init__(self, weight: float) -> None:
        self.counter = 0.0
        self.weight = weight
        self.pending = 0.0
        self.num_served = 0
        self.waiting: deque[tuple[T, float]] = deque()

    @property
    def settled(self) -> float:
        return self.counter - self.pending


class FairQueue(Generic[T]):
    """Items are whatever the driver waits with; each is in at most once. What went, by `take` or by `begin` (nobody
    waits), comes to its `end`."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, _Tenant[T]] = OrderedDict()  # the one that moved last at the end
        self._lines: dict[str, _Tenant[T]] = {}  # those that wait
        self._level = 0.0
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def num_served(self) -> int:
        """Those that went and have not come to their end."""
        return sum(entry.num_served for entry in self._tenants.values())

    def arrive(self, tenant: str, weight: float, item: T, cost: float) -> None:
        """`cost`: the service that it is expected to take, in tokens."""
        entry = self._entry(tenant, weight)
        if not entry.waiting:
            floor = min((other.settled for other in self._lines.values()), default=self._level)
            entry.counter = max(entry.counter, floor + entry.pending)
            self._lines[tenant] = entry
        entry.waiting.append((item, cost))
        self._num_waiting += 1

    def cancel(self, tenant: str, item: T) -> bool:
        """It waits no longer. False when it had gone already."""
        entry = self._lines.get(tenant)
        waiting = entry.waiting if entry is not None else ()
        index = next((i for i, (other, _) in enumerate(waiting) if other is item), None)
        if entry is None or index is None:
            return False
        del entry.waiting[index]
        self._left(tenant, entry)
        return True

    def take(self) -> T | None:
        """The next one, charged for; None when nobody waits."""
        if not self._lines:
            return None
        tenant = min(self._lines, key=lambda each: self._lines[each].counter)
        entry = self._lines[tenant]
        item, cost = entry.waiting.popleft()
        self._charge(entry, cost)
        self._left(tenant, entry)
        return item

    def begin(self, tenant: str, weight: float, cost: float) -> None:
        """It goes without having waited."""
        self._charge(self._entry(tenant, weight), cost)

    def end(self, tenant: str, cost: float, service: float) -> None:
        """One that was charged `cost` is over, and took that much service."""
        entry = self._tenants[tenant]
        assert entry.num_served > 0, "what ends has begun"
        entry.num_served -= 1
        entry.pending = entry.pending - cost / entry.weight if entry.num_served else 0.0
        entry.counter += (service - cost) / entry.weight

    def crowd_out(self, tenant: str) -> T | None:
        """There is no room to wait: the last of the longest line, if it is longer than this tenant's would be."""
        longest = max(self._lines, key=lambda each: len(self._lines[each].waiting), default=None)
        if longest is None:
            return None
        own = self._lines.get(tenant)
        entry = self._lines[longest]
        if len(entry.waiting) <= (len(own.waiting) if own is not None else 0) + 1:
            return None
        item, _ = entry.waiting.pop()
        self._left(longest, entry)
        return item

    def _charge(self, entry: _Tenant[T], cost: float) -> None:
        self._level = max(self._level, entry.settled)
        entry.counter += cost / entry.weight
        entry.pending += cost / entry.weight
        entry.num_served += 1

    def _left(self, tenant: str, entry: _Tenant[T]) -> None:
        self._num_waiting -= 1
        if not entry.waiting:
            del self._lines[tenant]

    def _entry(self, tenant: str, weight: float) -> _Tenant[T]:
        entry = self._tenants.get(tenant)
        if entry is None:
            entry = self._tenants[tenant] = _Tenant(weight)
            if len(self._tenants) > MAX_IDLE:
                self._forget()
        elif not entry.num_served:
            entry.weight = weight  # what is charged comes back by the same weight
        self._tenants.move_to_end(tenant)
        return entry

    def _forget(self) -> None:
        """The tenant that has been idle longest."""
        idle = (name for name, entry in self._tenants.items() if not entry.waiting and not entry.num_served)
        name = next(idle, None)
        if name is not None and name != next(reversed(self._tenants)):
            del self._tenants[name]

    def check_invariants(self) -> None:
        assert self._num_waiting == sum(len(entry.waiting) for entry in self._lines.values())
        assert self._lines.keys() == {name for name, entry in self._tenants.items() if entry.waiting}
        for entry in self._tenants.values():
            assert entry.num_served >= 0
            assert entry.num_served or entry.pending == 0.0
            assert entry.settled >= -1e-6 * max(1.0, entry.counter)
