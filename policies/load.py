"""What one replica is busy with: leases, the fluid work clock, and traffic that came from elsewhere.

Leases. Every dispatched request holds one, from Dispatched to Finished or Failed: *waiting* until its first token,
*running* after it. All counters are sums over leases, so they cannot drift. Of a request that isn't streamed no first
token is seen: it counts as running once its predicted prefill is over, or a later request's first token came.

Work clock. W is the prefill time still ahead of a newcomer: see work_clock.py.

Reports. A replica's own count covers everybody's requests, ours too, at some moment in the past. When one arrives,
what it says above our own count is taken for traffic from elsewhere and added to our own until the next report:

    foreign = max(0, reported - own at that moment),   effective = own now + foreign

At the moment of the report this is the greater of both. What we dispatch later is in `own` and never in `foreign`,
what we finish later leaves `own`: nothing is lost and nothing counted twice. (Dispatches still on the wire make
`foreign` too small, never too large.) Foreign prefill drains with time at the replica's rate, ahead of ours; a report
older than FOREIGN_TTL_S counts no more.

Seats. A replica computes `num_seats` requests at once, where it says so. While all of them are past their first token
nothing is prefilled: the work clock stands, and the time until one ends teaches nothing about prefill. With n seats one
answer ends about every n-th part of the time that an answer takes, and the k-th in the line waits for k ends.

Speed. First tokens that come closer together than a tenth of the time they took belong to one step of the engine.
Such a group, and the time since the group before it or since its first dispatch, make one observation. Where a replica
interrupts a long prompt for shorter ones, all of them make one, until the long one is through. Elsewhere a request that
a later one overtook teaches nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple

from policies.cost import SpeedModel
from policies.events import StatsReported
from policies.lease import Lease
from policies.types import Rates
from policies.work_clock import WorkClock

FOREIGN_TTL_S: Final = 30.0
GROUP_SHARE: Final = 0.1
GROUP_MIN_S: Final = 0.002


@dataclass(slots=True)
class _Group:
    """Requests whose first tokens came together."""

    since: float
    until: float
    num_requests: int = 0
    num_uncached: int = 0
    num_attended: float = 0.0

    def is_over(self, at: float) -> bool:
        """Whether a first token at `at` is another step's."""
        return at - self.until > max(GROUP_MIN_S, GROUP_SHARE * (self.until - self.since))

    def add(self, lease: Lease, cached_tokens: int, at: float) -> None:
        uncached = max(lease.chain.num_tokens - cached_tokens, 1)
        self.until = at
        self.num_requests += 1
        self.num_uncached += uncached
        self.num_attended += uncached * (cached_tokens + uncached / 2)


class LoadFigures(NamedTuple):
    """A replica's load at one moment, ours and what came from elsewhere.

    queued_prefill_s  the work clock W
    kv_usage          as reported plus the prompts dispatched since, or else our own prompts alone
    """

    num_waiting: int
    num_running: int
    queued_prefill_tokens: int
    queued_prefill_s: float
    kv_usage: float


class ReplicaLoad:
    """Leases of one replica in the order of dispatch, and the numbers that follow from them."""

    def __init__(self, speed: SpeedModel, step_tokens: int = 0, num_seats: int = 0) -> None:
        self.speed = speed
        self.num_seats = max(num_seats, 0)  # a replica may tell anything
        self.clock = WorkClock(step_tokens)
        self.waiting: dict[str, Lease] = {}
        self.running: dict[str, Lease] = {}
        self.kv_tokens = 0  # prompt tokens of the running leases
        self._waiting_tokens = 0
        self._unreported_blocks = 0
        self._waited_s = 0.0  # see take_waited_s
        self._waited_until = 0.0
        self._group: _Group | None = None
        self._last_group_at = 0.0
        self.report: StatsReported | None = None
        self._foreign_tokens = 0
        self._foreign_s = 0.0
        self.foreign_waiting = 0
        self.foreign_running = 0
        # What a view needs, as of the last refresh; good until something happens here or time `stale_at` comes
        self.stale_at = -inf
        self.num_waiting = 0
        self.num_running = 0
        self.queued_prefill_tokens = 0
        self.kv_usage = 0.0
        self.clear_at = -inf

    def anew(self, num_seats: int) -> ReplicaLoad:
        """Another process at the same address; 0 seats: as many as it had, until it says."""
        return ReplicaLoad(SpeedModel(), self.clock.step_tokens, num_seats or self.num_seats)

    def told(self, step_tokens: int, num_seats: int) -> None:
        """What the process says of itself; 0 for what it doesn't tell."""
        self.clock.step_tokens = step_tokens
        self.num_seats = max(num_seats, 0)
        self.stale_at = -inf

    # Leases

    def dispatched(self, lease: Lease) -> None:
        self.stale_at = -inf
        self._wait(lease.dispatched_at)
        self.waiting[lease.request_id] = lease
        self.clock.add(lease, self._busy_until(lease.dispatched_at))
        self._waiting_tokens += lease.num_uncached_tokens
        self._unreported_blocks += lease.num_blocks

    def first_token(self, lease: Lease, at: float, cached_tokens: int | None) -> bool:
        """Move a lease from waiting to running. True when the speed model learned something."""
        if lease.request_id not in self.waiting:
            return False
        silent = []  # dispatched before it and not streamed: computed by now too
        for older in self.waiting.values():
            if older is lease:
                break
            if not older.streamed and older.place > lease.place:
                continue  # it is the older that was overtaken
            if older.streamed:
                older.overtaken = True
            else:
                silent.append(older)
        for older in silent:
            self._start(older, at)
        learned = self._observe(lease, silent, at, lease.matched_tokens if cached_tokens is None else cached_tokens)
        self._start(lease, at)
        return learned

    def ended(self, lease: Lease, at: float, num_output_tokens: int | None = None) -> bool:
        """A lease is over; `num_output_tokens` when it finished. True when the speed model learned something."""
        self.stale_at = -inf
        self._unreported_blocks -= lease.num_blocks * lease.unreported
        if lease.request_id in self.waiting:
            self._leave_waiting(lease, at, served=num_output_tokens is not None)
            return False
        self._frees_seat(at)
        del self.running[lease.request_id]
        learned = num_output_tokens is not None and lease.streamed and lease.first_token_at is not None
        if learned and num_output_tokens is not None and lease.first_token_at is not None:
            self.speed.observe_decode(num_output_tokens, at - lease.first_token_at, float(self.kv_tokens))
        self.kv_tokens -= lease.chain.num_tokens
        return learned

    def advance(self, now: float) -> None:
        """Let time pass: old reports lose their force, and requests that aren't streamed move on as predicted."""
        if self.report is not None and now - self.report.at > FOREIGN_TTL_S:
            self._forget_report()
        while self.waiting:
            head, done_at = self.clock.line[0], self.clock.due(self._busy_until(now))
            if head.streamed or now < done_at:
                return
            self._start(head, done_at)
            self._last_group_at = max(self._last_group_at, done_at)

    def _start(self, lease: Lease, at: float) -> None:
        self._leave_waiting(lease, at, served=True)
        lease.first_token_at = at
        self.running[lease.request_id] = lease
        self.kv_tokens += lease.chain.num_tokens

    def _leave_waiting(self, lease: Lease, at: float, served: bool) -> None:
        self.stale_at = -inf
        self._wait(at)
        del self.waiting[lease.request_id]
        self._waiting_tokens -= lease.num_uncached_tokens
        self.clock.remove(lease, at, served, self._busy_until(at))
        if lease.interrupted and not served:
            self._group, self._last_group_at = None, at  # what was computed of it is in the time of the others

    def _wait(self, at: float) -> None:
        """Those who wait do so until `at`."""
        if at > self._waited_until:
            self._waited_s += len(self.waiting) * (at - self._waited_until)
            self._waited_until = at

    def take_waited_s(self, at: float) -> float:
        """Seconds that requests have waited here, summed over all of them, since this was last asked."""
        self._wait(at)
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    # Seats

    def _is_full(self) -> bool:
        """Whether requests past their first token have all seats, so that no prompt is being computed."""
        return bool(self.num_seats) and len(self.running) + self.foreign_running >= self.num_seats

    def _frees_seat(self, at: float) -> None:
        """One of the running is about to leave."""
        if self._is_full():  # the next prompt's time begins now
            self._last_group_at = max(self._last_group_at, at)
            self.clock.since = max(self.clock.since, at)

    def seat_wait_s(self, prefill_s: float, now: float, answer_tokens: float, rates: Rates) -> float:
        """Seconds until one that comes now and needs `prefill_s` has a seat, if answers have `answer_tokens`;
        after `refresh`, and where all are taken."""
        num_ahead = self.num_waiting + self.num_running - self.num_seats
        num_ahead = max(num_ahead - self.clock.num_overtaken(prefill_s, now), 0)
        answer_s = answer_tokens * (rates.decode_step_s + rates.decode_kv_s * self.kv_tokens)
        return (1 + num_ahead) * answer_s / self.num_seats

    # Speed

    def _observe(self, lease: Lease, silent: list[Lease], at: float, cached_tokens: int) -> bool:
        if lease.overtaken and not self.clock.step_tokens:  # who knows how much of it was done before the other
            learned = self._close_group() if self._group is not None else False
            self._last_group_at = at
            return learned
        group, learned = self._group, False
        interrupted = self.clock.interrupted(besides=lease)
        if group is not None and not interrupted and not lease.interrupted and group.is_over(at):
            learned = self._close_group()
            group = None
        if group is None:
            first = min([other.dispatched_at for other in (lease, *silent, *interrupted)])
            group = self._group = _Group(max(first, self._last_group_at), at)
        for older in silent:
            group.add(older, older.matched_tokens, at)
        group.add(lease, cached_tokens, at)
        if len(self.waiting) == 1 or (lease.interrupted and not interrupted):  # nothing else can belong to it
            learned = self._close_group() or learned
        return learned

    def _close_group(self) -> bool:
        group, self._group = self._group, None
        assert group is not None
        self._last_group_at = group.until
        seconds = group.until - group.since
        if seconds <= 0.0 or self.foreign_waiting:
            return False  # others' prompts were in the way for a time unknown
        self.speed.observe_prefill(group.num_requests, group.num_uncached, group.num_attended, seconds)
        return True

    # Reports

    def reported(self, report: StatsReported, rates: Rates) -> None:
        own_in_flight = len(self.waiting) + len(self.running)
        foreign = max(report.num_running + report.num_waiting - own_in_flight, 0)
        self.report = report
        self.stale_at = -inf
        self.foreign_waiting = min(foreign, max(report.num_waiting - len(self.waiting), 0))
        self.foreign_running = foreign - self.foreign_waiting
        self._foreign_tokens = max((report.queued_prefill_tokens or 0) - self._waiting_tokens, 0)
        self._foreign_s = self._foreign_tokens * rates.linear_s
        self._count_unreported(report.at)

    def _foreign_left(self, now: float) -> float:
        """Share of the foreign prefill that is still ahead at `now`."""
        if self.report is None or not self._foreign_s:
            return 0.0
        return max(1.0 - (now - self.report.at) / self._foreign_s, 0.0)

    def _forget_report(self) -> None:
        self.report = None
        self.stale_at = -inf
        self.foreign_waiting = self.foreign_running = self._foreign_tokens = 0
        self._foreign_s = 0.0
        self._count_unreported(-inf)

    # Views

    def _busy_until(self, now: float) -> float:
        """Foreign prefill goes before ours, and where no seat is free nothing is prefilled."""
        until = self.report.at + self._foreign_s if self._foreign_s and self.report is not None else -inf
        return now if until < now and self._is_full() else until

    def refresh(self, now: float, num_blocks: int) -> None:
        """Bring what a view needs up to `now`, and say until when it holds.

        The work clock runs down by a second a second, so it is kept as the time when all would be done: W is
        `clear_at - now` until the head is due. A head that overruns moves that time, and is worked out every time.
        """
        if self.report is not None or self.waiting:
            self.advance(now)
        left = self._foreign_left(now)
        self.num_waiting = len(self.waiting) + self.foreign_waiting
        self.num_running = len(self.running) + self.foreign_running
        self.queued_prefill_tokens = self._waiting_tokens + int(self._foreign_tokens * left)
        kv_usage = self._unreported_blocks / num_blocks if num_blocks else 0.0
        self.stale_at, self.clear_at = inf, -inf
        if self.report is not None:
            kv_usage += self.report.kv_usage
            self.stale_at = -inf if left else self.report.at + FOREIGN_TTL_S
            self.clear_at = self.report.at + self._foreign_s if left else -inf
        self.kv_usage = min(kv_usage, 1.0)
        if self.waiting:
            self.clear_at, until = self.clock.clear_at(now, self._busy_until(now))
            self.stale_at = -inf if self._is_full() else min(self.stale_at, until)  # the clock stands

    def queued_prefill_s(self, now: float) -> float:
        """The work clock W, after `refresh`."""
        return max(self.clear_at - now, 0.0)

    def overtaken_s(self, prefill_s: float, now: float) -> float:
        """How much of W a request that comes now and needs `prefill_s` would overtake."""
        return self.clock.overtaken_s(prefill_s, now, self._busy_until(now))

    def figures(self, now: float, num_blocks: int) -> LoadFigures:
        """All of it at one moment, for metrics."""
        self.refresh(now, num_blocks)
        return LoadFigures(
            self.num_waiting, self.num_running, self.queued_prefill_tokens, self.queued_prefill_s(now), self.kv_usage
        )

    def expected_prefill_tokens(self) -> int:
        """Uncached tokens of the waiting leases whose first token will be an event."""
        return sum(lease.num_uncached_tokens for lease in self.waiting.values() if lease.streamed)

    def _count_unreported(self, since: float) -> None:
        self._unreported_blocks = 0
        for leases in (self.waiting, self.running):
            for lease in leases.values():
                lease.unreported = lease.dispatched_at > since
                self._unreported_blocks += lease.num_blocks * lease.unreported

    def check_invariants(self) -> None:
        assert not (self.waiting.keys() & self.running.keys())
        assert self._waiting_tokens == sum(lease.num_uncached_tokens for lease in self.waiting.values())
        self.clock.check_invariants()
        assert set(map(id, self.waiting.values())) == set(map(id, self.clock.line))
        assert self.kv_tokens == sum(lease.chain.num_tokens for lease in self.running.values())
        assert all(lease.first_token_at is None for lease in self.waiting.values())
        assert all(lease.first_token_at is not None for lease in self.running.values())
        fresh = [lease for leases in (self.waiting, self.running) for lease in leases.values() if lease.unreported]
        assert self._unreported_blocks == sum(lease.num_blocks for lease in fresh)
        assert min(self.foreign_waiting, self.foreign_running, self._foreign_tokens) >= 0
