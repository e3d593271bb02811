"""Limits as a machine: accounts that are charged, and one check that admits a request to all of its accounts or none.

An account is a key's or a tenant's. Requests and tokens a minute are buckets that hold a minute's worth and fill evenly
(so a quiet minute may be followed by one that is served twice as fast, and no more). Tokens are reserved when a request
is admitted, by an estimate, and settled when it ends: what was reserved and not used goes back, what was used beyond it
is owed. A budget counts what was used in its period, and what is reserved now.

Two drivers: one gateway alone asks this machine; several ask Redis (shared.py), and this machine with `share` (their
number) while Redis can't be reached. `at` is a monotonic time, `wall` a Unix time (for periods).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from gateway.tenancy.keys import Limits


class Limit(StrEnum):
    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENCY = "concurrency"
    BUDGET = "budget"


@dataclass(frozen=True, slots=True)
class Denied:
    """Which limit of which account refused `wanted` more on top of `used`. `retry_after_s` None: waiting won't help."""

    limit: Limit
    account: str
    bound: int
    used: int
    wanted: int
    retry_after_s: float | None


@dataclass(slots=True, eq=False)
class Account:
    """What one key or tenant has used. `name` is `key ID` or `tenant NAME`.

    num_active, reserved   requests admitted here and not settled, and the tokens reserved for them
    requests, tokens, at   the buckets' levels at that time; tokens may be below 0
    period, spent          tokens used in that period of the budget; `base`: of those, what all gateways knew of
    num_shared, reserved_shared
                           what Redis counts of num_active and reserved as ours
    """

    name: str
    limits: Limits
    num_active: int = 0
    reserved: int = 0
    requests: float = 0.0
    tokens: float = 0.0
    at: float = 0.0
    period: int = 0
    spent: int = 0
    base: int = 0
    num_shared: int = 0
    reserved_shared: int = 0

    def __post_init__(self) -> None:
        self.requests = float(self.limits.requests_per_minute)
        self.tokens = float(self.limits.tokens_per_minute)

    def change(self, limits: Limits) -> None:
        """New limits. A bucket that grows, or is new, gets the difference at once."""
        self.requests += max(0, limits.requests_per_minute - self.limits.requests_per_minute)
        self.tokens += max(0, limits.tokens_per_minute - self.limits.tokens_per_minute)
        self.limits = limits

    def roll(self, wall: float) -> None:
        """Begin the period that it is now."""
        length = self.limits.budget_period_s
        period = int(wall // length) if length else 0
        if period != self.period:
            self.period, self.spent, self.base = period, 0, 0

    def refresh(self, at: float, wall: float, share: int) -> None:
        limits = self.limits
        passed = at - self.at
        self.at = at
        if limits.requests_per_minute:
            full = limits.requests_per_minute / share
            self.requests = min(full, self.requests + passed * full / 60)
        if limits.tokens_per_minute:
            full = limits.tokens_per_minute / share
            self.tokens = min(full, self.tokens + passed * full / 60)
        if limits.budget_tokens:
            self.roll(wall)

    def refuses(self, wanted: int, share: int, wall: float) -> Denied | None:
        """Why not, after `refresh`."""
        limits = self.limits
        if limits.budget_tokens:
            here = self.spent - self.base + self.reserved
            if here + wanted > (limits.budget_tokens - self.base) / share:
                length = limits.budget_period_s
                return Denied(
                    Limit.BUDGET, self.name, limits.budget_tokens, self.spent + self.reserved, wanted,
                    length - wall % length if length else None,
                )  # fmt: skip
        if (most := limits.concurrency) and self.num_active >= max(1, most // share):
            return Denied(Limit.CONCURRENCY, self.name, most, self.num_active, 1, 1.0)
        if (rate := limits.requests_per_minute) and self.requests < (least := min(1.0, rate / share)):
            wait_s = (least - self.requests) * 60 * share / rate
            return Denied(Limit.REQUESTS, self.name, rate, rate - int(self.requests), 1, wait_s)
        if rate := limits.tokens_per_minute:
            least = min(float(wanted), rate / share)
            if wanted > rate or self.tokens < least:
                wait = None if wanted > rate else (least - self.tokens) * 60 * share / rate
                return Denied(Limit.TOKENS, self.name, rate, int(rate - self.tokens), wanted, wait)
        return None

    def hold(self, wanted: int) -> None:
        self.num_active += 1
        self.reserved += wanted

    def settle(self, reserved: int, used: int, wall: float) -> None:
        self.num_active -= 1
        self.reserved -= reserved
        self.tokens += reserved - used
        if self.limits.budget_tokens:
            self.roll(wall)
            self.spent += used

    def check_invariants(self) -> None:
        assert self.num_active >= 0
        assert self.reserved >= 0
        assert self.num_active or not self.reserved
        assert 0 <= self.base <= self.spent


class Standing:
    """Where an account stands, for x-ratelimit-*. `reset_s`: until the bucket is full again."""

    __slots__ = ("limit", "remaining", "reset_s")

    def __init__(self, limit: int, remaining: int, reset_s: float) -> None:
        self.limit: Final = limit
        self.remaining: Final = remaining
        self.reset_s: Final = reset_s


def standings(accounts: Iterable[Account]) -> tuple[Standing | None, Standing | None]:
    """The tightest of requests and of tokens."""
    requests: Standing | None = None
    tokens: Standing | None = None
    for account in accounts:
        limits = account.limits
        if rate := limits.requests_per_minute:
            left = int(level) if (level := account.requests) > 0 else 0
            if requests is None or left < requests.remaining:
                requests = Standing(rate, left, (rate - level) * 60 / rate)
        if rate := limits.tokens_per_minute:
            left = int(level) if (level := account.tokens) > 0 else 0
            if tokens is None or left < tokens.remaining:
                tokens = Standing(rate, left, (rate - level) * 60 / rate)
    return requests, tokens


class Ledger:
    """The accounts, and what each request under way holds of them: settled once, by its id."""

    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}
        self._holds: dict[str, tuple[Sequence[Account], int]] = {}

    def account(self, name: str, limits: Limits) -> Account | None:
        """The account of that name, with these limits; None where there is nothing to limit."""
        account = self.accounts.get(name)
        if account is None:
            if not limits.any:
                return None
            account = self.accounts[name] = Account(name, limits)
        elif account.limits != limits:
            account.change(limits)
        return account if limits.any else None

    def forget(self, names: Iterable[str]) -> None:
        """Accounts of keys that are gone, once nothing is under way there."""
        for name in names:
            if name in self.accounts and not self.accounts[name].num_active:
                del self.accounts[name]

    def admit(
        self, request_id: str, accounts: Sequence[Account], wanted: int, at: float, wall: float, share: int = 1
    ) -> Denied | None:
        """Reserve `wanted` tokens and a place in each account, or nothing at all."""
        for account in accounts:
            account.refresh(at, wall, share)
        for account in accounts:
            if (denied := account.refuses(wanted, share, wall)) is not None:
                return denied
        for account in accounts:
            account.requests -= 1
            account.tokens -= wanted
        self.hold(request_id, accounts, wanted)
        return None

    def hold(self, request_id: str, accounts: Sequence[Account], wanted: int) -> None:
        """Note what was granted, and charged for, here or in Redis."""
        assert request_id not in self._holds, "a request is admitted once"
        self._holds[request_id] = (accounts, wanted)
        for account in accounts:
            account.hold(wanted)

    def settle(self, request_id: str, used: int, wall: float) -> tuple[Sequence[Account], int] | None:
        """The request has ended and used so many tokens. Returns what it held; None when it was settled before."""
        held = self._holds.pop(request_id, None)
        if held is not None:
            accounts, reserved = held
            for account in accounts:
                account.settle(reserved, used, wall)
        return held

    def spent(self) -> dict[str, tuple[int, int]]:
        """Budgets' periods and what was used in them, to be kept over a restart."""
        return {a.name: (a.period, a.spent) for a in self.accounts.values() if a.limits.budget_tokens and a.spent}

    def restore(self, spent: dict[str, tuple[int, int]]) -> None:
        """What `spent` returned in an earlier life; only more than is known counts."""
        for name, (period, count) in spent.items():
            account = self.accounts.get(name)
            if account is not None and account.period in (0, period) and account.spent < count:
                account.period, account.spent = period, count

    def check_invariants(self) -> None:
        active: dict[str, list[int]] = {}
        for accounts, reserved in self._holds.values():
            for account in accounts:
                active.setdefault(account.name, []).append(reserved)
        for name, account in self.accounts.items():
            account.check_invariants()
            assert account.num_active == len(active.get(name, ()))
            assert account.reserved == sum(active.get(name, ()))
