"""The machine of limits: one check for all accounts, tokens reserved and settled once."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.tenancy.keys import Limits
from gateway.tenancy.limits import Account, Ledger, Limit, standings
from gateway.tenancy.refusals import Rates

WALL = 1_000_000_000.0


def ledger(*limits: Limits) -> tuple[Ledger, list[Account]]:
    book = Ledger()
    accounts = [book.account(f"key {number}", each) for number, each in enumerate(limits)]
    assert None not in accounts
    return book, accounts  # type: ignore[return-value]


def test_requests_a_minute_and_when_the_next_may_come() -> None:
    book, accounts = ledger(Limits(requests_per_minute=3))
    for number in range(3):
        assert book.admit(str(number), accounts, 0, 0.0, WALL) is None
    denied = book.admit("3", accounts, 0, 0.0, WALL)
    assert denied is not None
    assert (denied.limit, denied.bound, denied.used) == (Limit.REQUESTS, 3, 3)
    assert denied.retry_after_s == pytest.approx(20.0)
    assert book.admit("4", accounts, 0, 19.9, WALL) is not None
    assert book.admit("5", accounts, 0, 20.1, WALL) is None
    book.check_invariants()


def test_tokens_are_reserved_and_settled() -> None:
    book, accounts = ledger(Limits(tokens_per_minute=1000))
    assert book.admit("a", accounts, 800, 0.0, WALL) is None
    assert book.admit("b", accounts, 300, 0.0, WALL) is not None
    book.settle("a", 100, WALL)
    assert book.admit("b", accounts, 300, 0.0, WALL) is None
    book.settle("b", 900, WALL)  # more than it had reserved: owed
    denied = book.admit("c", accounts, 1, 0.0, WALL)
    assert denied is not None
    assert denied.limit is Limit.TOKENS
    book.check_invariants()


def test_settling_twice_is_settling_once() -> None:
    book, accounts = ledger(Limits(tokens_per_minute=1000, budget_tokens=5000, concurrency=2))
    book.admit("a", accounts, 800, 0.0, WALL)
    assert book.settle("a", 100, WALL) is not None
    assert book.settle("a", 100, WALL) is None
    assert (accounts[0].tokens, accounts[0].spent, accounts[0].num_active) == (900.0, 100, 0)


def test_more_tokens_than_a_minute_has_will_never_pass() -> None:
    book, accounts = ledger(Limits(tokens_per_minute=1000))
    denied = book.admit("a", accounts, 1001, 0.0, WALL)
    assert denied is not None
    assert denied.retry_after_s is None


def test_concurrency_is_held_until_the_end() -> None:
    book, accounts = ledger(Limits(concurrency=1))
    assert book.admit("a", accounts, 0, 0.0, WALL) is None
    denied = book.admit("b", accounts, 0, 1e6, WALL)
    assert denied is not None
    assert denied.limit is Limit.CONCURRENCY
    book.settle("a", 0, WALL)
    assert book.admit("b", accounts, 0, 1e6, WALL) is None


def test_a_budget_counts_what_is_reserved_and_begins_anew_with_its_period() -> None:
    book, accounts = ledger(Limits(budget_tokens=1000, budget_period_s=3600))
    assert book.admit("a", accounts, 600, 0.0, WALL) is None
    denied = book.admit("b", accounts, 600, 0.0, WALL)
    assert denied is not None
    assert (denied.limit, denied.used) == (Limit.BUDGET, 600)
    assert denied.retry_after_s == pytest.approx(3600 - WALL % 3600)
    book.settle("a", 700, WALL)
    assert book.admit("b", accounts, 301, 0.0, WALL) is not None
    assert book.admit("b", accounts, 300, 0.0, WALL) is None
    assert book.admit("c", accounts, 600, 0.0, WALL + 3600) is None


def test_a_budget_without_a_period_never_comes_back() -> None:
    book, accounts = ledger(Limits(budget_tokens=10, budget_period_s=0))
    book.admit("a", accounts, 10, 0.0, WALL)
    book.settle("a", 10, WALL)
    denied = book.admit("b", accounts, 1, 1e9, WALL + 1e9)
    assert denied is not None
    assert denied.retry_after_s is None


def test_what_one_account_refuses_costs_no_other() -> None:
    book, accounts = ledger(Limits(requests_per_minute=10, tokens_per_minute=100), Limits(concurrency=1))
    assert book.admit("a", accounts, 10, 0.0, WALL) is None
    before = [(account.requests, account.tokens, account.num_active) for account in accounts]
    assert book.admit("b", accounts, 10, 0.0, WALL) is not None
    assert [(account.requests, account.tokens, account.num_active) for account in accounts] == before


def test_a_share_of_every_limit() -> None:
    """What a gateway allows by itself when it is one of four and can't ask Redis."""
    limits = Limits(requests_per_minute=40, tokens_per_minute=4000, concurrency=8, budget_tokens=8000)
    book, accounts = ledger(limits)
    admitted = 0
    for number in range(40):
        if book.admit(str(number), accounts, 10, 0.0, WALL, share=4) is None:
            admitted += 1
            book.settle(str(number), 10, WALL)
    assert admitted == 10
    assert book.admit("large", accounts, 2001, 1e3, WALL, share=4) is not None


def test_limits_that_change_keep_what_was_used() -> None:
    book, accounts = ledger(Limits(requests_per_minute=2))
    for number in range(2):
        book.admit(str(number), accounts, 0, 0.0, WALL)
    assert book.account("key 0", Limits(requests_per_minute=3)) is accounts[0]
    assert book.admit("2", accounts, 0, 0.0, WALL) is None
    assert book.admit("3", accounts, 0, 0.0, WALL) is not None


def test_the_tighter_account_is_what_headers_tell() -> None:
    book, accounts = ledger(Limits(requests_per_minute=10), Limits(requests_per_minute=60, tokens_per_minute=600))
    book.admit("a", accounts, 60, 0.0, WALL)
    requests, tokens = standings(accounts)
    assert requests is not None
    assert tokens is not None
    assert (requests.limit, requests.remaining, requests.reset_s) == (10, 9, 6.0)
    assert (tokens.limit, tokens.remaining, tokens.reset_s) == (600, 540, 6.0)


def test_headers_and_lines_say_the_same() -> None:
    book, accounts = ledger(Limits(requests_per_minute=10), Limits(tokens_per_minute=600))
    rates = Rates()
    assert (rates.headers(), rates.lines()) == ([], "")
    book.admit("a", accounts, 60, 0.0, WALL)
    rates.note(accounts)
    assert rates.headers() == [
        (b"x-ratelimit-limit-requests", b"10"),
        (b"x-ratelimit-remaining-requests", b"9"),
        (b"x-ratelimit-reset-requests", b"6s"),
        (b"x-ratelimit-limit-tokens", b"600"),
        (b"x-ratelimit-remaining-tokens", b"540"),
        (b"x-ratelimit-reset-tokens", b"6s"),
    ]
    assert rates.lines().encode() == b"".join(b"%b: %b\r\n" % pair for pair in rates.headers())


def test_budgets_come_back_after_a_restart() -> None:
    book, accounts = ledger(Limits(budget_tokens=1000))
    book.admit("a", accounts, 600, 0.0, WALL)
    book.settle("a", 600, WALL)
    again, others = ledger(Limits(budget_tokens=1000))
    again.restore({**book.spent(), "key of old": (1, 5)})
    assert others[0].spent == 600
    assert again.admit("b", others, 500, 0.0, WALL) is not None
    assert again.admit("b", others, 400, 0.0, WALL) is None


STEPS = st.lists(
    st.tuples(st.sampled_from(["admit", "settle"]), st.integers(0, 5), st.integers(0, 300), st.floats(0.0, 5.0)),
    max_size=50,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # busy machines
@given(STEPS, st.integers(1, 3))
def test_no_limit_is_ever_passed(steps: list[tuple[str, int, int, float]], share: int) -> None:
    limits = Limits(requests_per_minute=5, tokens_per_minute=600, concurrency=2, budget_tokens=2000)
    book, accounts = ledger(limits)
    open_now: set[str] = set()
    at, used, count = 0.0, 0, 0
    for what, number, tokens, passed in steps:
        at += passed
        name = str(number)
        if what == "settle":
            assert (book.settle(name, tokens // 2, WALL) is not None) == (name in open_now)
            used += tokens // 2 if name in open_now else 0
            open_now.discard(name)
        elif name not in open_now and book.admit(name, accounts, tokens, at, WALL, share) is None:
            open_now.add(name)
            count += 1
        book.check_invariants()
        assert len(open_now) <= 2
        assert accounts[0].spent == used
        assert count <= 5 + at * 5 / 60 + 1
