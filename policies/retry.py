"""Whether a failed attempt is tried again: rules keyed on how it failed. Pure: it decides, the proxy acts and sleeps.

Theory. A request is safe to send elsewhere as long as its client has seen nothing of an answer. But every attempt may
cost a prefill, and an overloaded fleet that retries dies of its retries. So:

    how it failed                        before the first token                      after it
    connect (nothing was sent)           next replica, up to MAX_CONNECT_ATTEMPTS    -
    rejected 429, 408, 5xx               one failover, else the answer is passed on  -
    rejected, any other status           passed on: it would fail anywhere           -
    no first token in time               one failover, else 504                      -
    connection broke                     one failover, else 502                      error event, stream ends
    client gone                          nothing left to do                          nothing left to do

`attempt` counts from 1. A failover is only taken when another replica is left; the retry budget (allows_retry) keeps
the failovers of a whole gateway to a share of its traffic.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.events import FailureKind

MAX_ATTEMPTS = 2
MAX_CONNECT_ATTEMPTS = 4
RETRY_AFTER_S = 1.0
BUDGET_SHARE = 0.2
BUDGET_FLOOR = 3

CLIENT_CLOSED = 499  # never sent: the client is gone. For the log and the metrics


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one attempt ended without finishing.

    committed      the client has been sent the status line (after the first token): nothing can be replayed
    status         the replica's HTTP status, for REJECTED
    retry_after_s  what the replica asked for, if it did
    """

    kind: FailureKind
    committed: bool = False
    status: int | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Retry:
    """Place the request again, now, with the failed replica among its `excluded`."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Answer the client.

    status         what to answer (499: nobody is listening)
    code, message  for the error body
    relay          pass on the replica's own answer instead of an error of ours
    in_stream      the status line is out: send an error event and end the stream without [DONE]
    retry_after_s  for the Retry-After header
    """

    status: int
    code: str
    message: str
    relay: bool = False
    in_stream: bool = False
    retry_after_s: float | None = None


def next_step(outcome: Outcome, attempt: int, num_candidates_left: int) -> Retry | GiveUp:
    """What to do after attempt number `attempt` (from 1), with `num_candidates_left` replicas not tried yet."""
    assert attempt >= 1
    assert num_candidates_left >= 0
    kind = outcome.kind
    if kind is FailureKind.CANCELLED:
        return GiveUp(CLIENT_CLOSED, "client_closed_request", "the client closed the connection")
    if outcome.committed:
        return GiveUp(
            502, "replica_failed", "the replica failed before it finished; what was sent stands", in_stream=True
        )
    limit = MAX_CONNECT_ATTEMPTS if kind is FailureKind.CONNECT else MAX_ATTEMPTS
    if num_candidates_left and attempt < limit and _may_succeed_elsewhere(outcome):
        return Retry()
    return _give_up(outcome)


def is_replicas_fault(outcome: Outcome) -> bool:
    """Whether the failure counts against the replica's health: not a client's cancel, not a refusal of the request."""
    if outcome.kind is FailureKind.REJECTED:
        return outcome.status is None or outcome.status >= 500
    return outcome.kind is not FailureKind.CANCELLED


def allows_retry(num_active: int, num_retrying: int) -> bool:
    """The fleet-wide retry budget: one more of `num_active` requests may be on a second attempt beside
    `num_retrying` others, up to BUDGET_SHARE of them and always BUDGET_FLOOR."""
    return num_retrying < max(BUDGET_FLOOR, int(BUDGET_SHARE * num_active))


def _may_succeed_elsewhere(outcome: Outcome) -> bool:
    if outcome.kind is not FailureKind.REJECTED:
        return True
    return outcome.status is None or outcome.status in (408, 429) or outcome.status >= 500


def _give_up(outcome: Outcome) -> GiveUp:
    if outcome.kind is FailureKind.CONNECT:
        return GiveUp(503, "no_replica", "no replica could be reached; try again", retry_after_s=RETRY_AFTER_S)
    if outcome.kind is FailureKind.TIMEOUT:
        return GiveUp(504, "first_token_timeout", "the replica sent no token in time", retry_after_s=RETRY_AFTER_S)
    if outcome.kind is FailureKind.REJECTED and outcome.status is not None:
        wait_s = outcome.retry_after_s
        if wait_s is None and outcome.status in (429, 503):
            wait_s = RETRY_AFTER_S
        return GiveUp(
            outcome.status,
            "replica_rejected",
            f"the replica answered with status {outcome.status}",
            relay=True,
            retry_after_s=wait_s,
        )
    return GiveUp(502, "replica_failed", "the replica closed the connection before the first token")
