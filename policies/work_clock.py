"""The prefill work ahead at one replica, in seconds, and how much of it a newcomer would overtake.

Theory. Requests that wait for their first token stand in a line, in the order in which the replica serves them; the
first, the *head*, is being computed, so the work that is left runs down by a second a second. A first token takes its
request out of the line, whatever was predicted for it, and the next becomes the head. A head that overruns its
prediction is expected to take half as long again as it overran, so that a stalled replica looks worse by the second
instead of free.

The order. Most engines serve first come, first served: a newcomer waits for the whole line. A bundled worker is told
how many seconds of prefill each request needs and serves by `arrival + seconds left / AGING`
(engine_worker/core/waiting_queue.py), so one that needs little waits for those before its place alone, and for the
engine's step under way, which nothing interrupts: up to `step_tokens` of the head's prompt, and the later ones of a
long prompt take the longest. Each step moves the head up, so it is overtaken only by what needs less than is left of
it. What is overtaken goes on afterwards with that.

When somebody leaves the line from behind the head, it was served first after all: the time since the head began was
its, up to its own seconds, and not the head's.
"""

from __future__ import annotations

from bisect import insort
from math import inf, sqrt
from typing import Final

from policies.lease import Lease

AGING: Final = 0.05  # seconds of work that a second of waiting is worth to a bundled worker
OVERRUN_SHARE: Final = 0.5


def place_of(at: float, prefill_s: float, step_tokens: int) -> float:
    """Where a request that came at `at` stands; without `step_tokens` by arrival alone."""
    return at + prefill_s / AGING if step_tokens else at


class WorkClock:
    """`step_tokens`: prompt tokens of a step, of a replica that serves the shortest first; 0: first come, first served.
    `since`: when the head began, or will as the step before it ends."""

    def __init__(self, step_tokens: int = 0) -> None:
        self.step_tokens = step_tokens
        self.line: list[Lease] = []
        self.since = 0.0
        self._left_s = 0.0  # of all in the line, as of `since`

    def add(self, lease: Lease, busy_until: float) -> None:
        """It was dispatched; the replica computes others' prompts until `busy_until`."""
        at = lease.dispatched_at
        lease.place = place_of(at, lease.prefill_s, self.step_tokens)
        if not self.line:
            self.since = at
        elif not self.step_tokens:  # news of another gateway's request may come late: the head has begun all the same
            lease.place = max(lease.place, self.line[0].place)
        elif lease.place < self.line[0].place:
            head, since = self.line[0], max(self.since, busy_until)
            step_s = self._step_left_s(max(head.left_s - max(at - since, 0.0), 0.0), at, since)
            done_s = min(max(at + step_s - since, 0.0), head.left_s)
            head.place = place_of(head.dispatched_at, head.left_s - done_s, self.step_tokens)
            if lease.place < head.place:
                head.left_s -= done_s
                self._left_s -= done_s
                self.since = at + step_s
                head.interrupted = True
        insort(self.line, lease, key=_place)
        self._left_s += lease.left_s

    def remove(self, lease: Lease, at: float, served: bool, busy_until: float) -> None:
        """It leaves the line; `served` False: without having been computed."""
        place = 0
        while self.line[place] is not lease:
            place += 1
        del self.line[place]
        self._left_s = self._left_s - lease.left_s if self.line else 0.0
        if not place:
            self.since = at
        elif served:
            self.since = min(max(self.since, busy_until) + lease.left_s, max(at, self.since))

    def due(self, busy_until: float) -> float:
        """When the head is expected to be done. There must be one."""
        return max(self.since, busy_until) + self.line[0].left_s

    def clear_at(self, now: float, busy_until: float) -> tuple[float, float]:
        """When the line is expected to be empty, and until when that holds if nothing happens."""
        due = self.due(busy_until)
        rest_s = max(self._left_s - self.line[0].left_s, 0.0)
        if now > due:
            return now + rest_s + OVERRUN_SHARE * (now - due), -inf
        return due + rest_s, due

    def overtaken_s(self, prefill_s: float, now: float, busy_until: float) -> float:
        """Seconds of work in the line that a request which needs `prefill_s` and comes now would not wait for."""
        place = place_of(now, prefill_s, self.step_tokens)
        line = self.line
        if not self.step_tokens or not line or line[-1].place <= place:
            return 0.0
        overtaken = 0.0
        for lease in line:
            if lease.place > place:
                overtaken += lease.left_s
        head = line[0]
        if head.place > place:
            since = max(self.since, busy_until)
            left_s = max(head.left_s - max(now - since, 0.0), 0.0)
            if now >= since:
                left_s -= self._step_left_s(left_s, now, since)
            overtaken -= head.left_s
            if place_of(head.dispatched_at, left_s, self.step_tokens) > place:
                overtaken += left_s
        return max(overtaken, 0.0)

    def num_overtaken(self, prefill_s: float, now: float) -> int:
        """How many in the line a request that needs `prefill_s` and comes now would overtake."""
        place, num_overtaken = place_of(now, prefill_s, self.step_tokens), 0
        for lease in reversed(self.line):
            if lease.place <= place:
                break
            num_overtaken += 1
        return num_overtaken

    def _step_left_s(self, left_s: float, now: float, since: float) -> float:
        """Seconds until the step under way ends; the head, begun at `since`, has `left_s` to go."""
        if now < since:
            return since - now
        head, step = self.line[0], self.step_tokens
        num_tokens = head.num_uncached_tokens
        rates = head.rates
        slope = rates.linear_s + rates.quadratic_s * head.matched_tokens
        bend = rates.quadratic_s / 2
        if num_tokens <= step or slope + bend <= 0.0:  # a fit may find that its tokens take no time, the whole does
            return left_s
        done_s = max(head.prefill_s - left_s - rates.base_s, 0.0)
        done = (sqrt(slope * slope + 4.0 * bend * done_s) - slope) / (2.0 * bend) if bend > 0.0 else done_s / slope
        end = min((int(done / step) + 1) * step, num_tokens)
        return min(max(slope * end + bend * end * end - done_s, 0.0), left_s)

    def interrupted(self, besides: Lease) -> list[Lease]:
        """Those in the line, but for `besides`, that are computed in part."""
        return [lease for lease in self.line if lease.interrupted and lease is not besides]

    def check_invariants(self) -> None:
        places = [lease.place for lease in self.line]
        assert places == sorted(places), "the line is out of order"
        total = sum((lease.left_s for lease in self.line), 0.0)
        assert abs(self._left_s - total) <= 1e-6 * (1.0 + total)
        assert all(0.0 <= lease.left_s <= lease.prefill_s for lease in self.line)


def _place(lease: Lease) -> float:
    return lease.place
