"""A request that was begun on the straight way (straight.py) and goes on where it is on the general one (proxy.py)."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.answer import Answer, Headers
from gateway.exchange import Failure, of_interrupt
from gateway.guard import Interrupt
from gateway.observe.record import RequestRecord
from gateway.openai.fields import ParsedRequest
from gateway.router import Lease
from gateway.tenancy.directory import Identity
from gateway.tenancy.service import Visit
from gateway.upstream import UpstreamResponse
from policies.types import RouteRequest


@dataclass(slots=True, eq=False, kw_only=True)
class Begun:
    """What is known of it. What was taken for it (`visit`, `is_admitted`, `lease`, `response`) is the taker's to end.

    left_s       of the time that it may take; `patience_s` of what its client waits for a first byte, if it said so
    headers      that its answer will have
    parsed       None where it was found to be wrong before that: `error` says how
    is_admitted  it holds a place among those under way
    route, lease where it was sent
    response     the replica's answer, as far as it has come
    failure      the attempt there has failed
    is_again     the request is to be sent there once more (Upstream.post)
    """

    record: RequestRecord
    path: str
    left_s: float
    patience_s: float | None
    headers: Headers
    identity: Identity | None = None
    parsed: ParsedRequest | None = None
    visit: Visit | None = None
    is_admitted: bool = False
    route: RouteRequest | None = None
    lease: Lease | None = None
    response: UpstreamResponse | None = None
    failure: Failure | None = None
    is_again: bool = False
    error: Exception | None = None

    def failure_of(self, answer: Answer) -> Failure | None:
        """Why the attempt that was begun need not go on, if so."""
        if not answer.is_gone:
            return self.failure
        if self.response is not None:
            self.response.close()
        return of_interrupt(Interrupt.CLIENT_GONE)
