"""The retry table, row by row."""

from __future__ import annotations

import pytest

from policies.events import FailureKind
from policies.retry import GiveUp, Outcome, Retry, allows_retry, is_replicas_fault, next_step

CONNECT = Outcome(FailureKind.CONNECT)
TIMEOUT = Outcome(FailureKind.TIMEOUT)
BROKEN = Outcome(FailureKind.BROKEN)
BROKEN_LATE = Outcome(FailureKind.BROKEN, committed=True)
STALLED_LATE = Outcome(FailureKind.TIMEOUT, committed=True)
GONE = Outcome(FailureKind.CANCELLED)
GONE_LATE = Outcome(FailureKind.CANCELLED, committed=True)


def rejected(status: int, retry_after_s: float | None = None) -> Outcome:
    return Outcome(FailureKind.REJECTED, status=status, retry_after_s=retry_after_s)


RETRY = "retry"
TABLE = [
    # outcome, attempt, candidates left, what happens: RETRY or (status, relay, in_stream)
    (CONNECT, 1, 1, RETRY),
    (CONNECT, 3, 1, RETRY),  # nothing was sent: more than one other may be tried
    (CONNECT, 4, 1, (503, False, False)),
    (CONNECT, 1, 0, (503, False, False)),
    (TIMEOUT, 1, 1, RETRY),
    (TIMEOUT, 2, 5, (504, False, False)),
    (TIMEOUT, 1, 0, (504, False, False)),
    (BROKEN, 1, 1, RETRY),
    (BROKEN, 2, 5, (502, False, False)),
    (BROKEN, 1, 0, (502, False, False)),
    *[(rejected(status), 1, 1, RETRY) for status in (408, 429, 500, 502, 503, 504, 507)],
    *[(rejected(status), 2, 5, (status, True, False)) for status in (408, 429, 500, 503)],
    *[(rejected(status), 1, 0, (status, True, False)) for status in (429, 503)],
    *[(rejected(status), 1, 5, (status, True, False)) for status in (400, 401, 403, 404, 413, 422)],
    (BROKEN_LATE, 1, 5, (502, False, True)),
    (STALLED_LATE, 1, 5, (502, False, True)),
    (GONE, 1, 5, (499, False, False)),
    (GONE_LATE, 1, 5, (499, False, False)),
]


@pytest.mark.parametrize(("outcome", "attempt", "num_left", "expected"), TABLE)
def test_the_table(outcome: Outcome, attempt: int, num_left: int, expected: str | tuple[int, bool, bool]) -> None:
    step = next_step(outcome, attempt, num_left)
    if expected == RETRY:
        assert step == Retry()
    else:
        assert isinstance(step, GiveUp)
        assert (step.status, step.relay, step.in_stream) == expected
        assert step.message
        assert step.code


def test_a_refusal_for_load_says_when_to_come_back() -> None:
    for outcome, expected in ((rejected(429), 1.0), (rejected(503, 7.0), 7.0), (rejected(400), None)):
        step = next_step(outcome, 2, 0)
        assert isinstance(step, GiveUp)
        assert step.retry_after_s == expected
    unreachable = next_step(CONNECT, 1, 0)
    assert isinstance(unreachable, GiveUp)
    assert unreachable.retry_after_s


@pytest.mark.parametrize(
    ("outcome", "fault"),
    [(CONNECT, True), (TIMEOUT, True), (BROKEN_LATE, True), (GONE, False), (GONE_LATE, False),
     (rejected(500), True), (rejected(503), True), (rejected(429), False), (rejected(400), False)],
)  # fmt: skip
def test_whose_fault_it_was(outcome: Outcome, fault: bool) -> None:
    assert is_replicas_fault(outcome) is fault


def test_the_budget_is_a_share_of_the_traffic_with_a_floor() -> None:
    assert [allows_retry(4, retrying) for retrying in (0, 2, 3)] == [True, True, False]
    assert [allows_retry(100, retrying) for retrying in (3, 19, 20)] == [True, True, False]
