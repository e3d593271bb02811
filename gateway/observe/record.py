"""One request as it happened: raw timestamps and facts, from which metrics and the log line are derived at its end."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class EndState(StrEnum):
    """How a request ended; exactly one each.

    COMPLETED     the client got a whole answer
    REJECTED      the client got an error status of the gateway's or of the replica's
    FAILED        the answer had begun and ended in an error event (or a cut body)
    CLIENT_GONE   the client left, or stopped reading, before the end
    """

    COMPLETED = "completed"
    REJECTED = "rejected"
    FAILED = "failed"
    CLIENT_GONE = "client_gone"


class RequestRecord(msgspec.Struct, kw_only=True, eq=False):
    """Filled in as the request goes. Times are of the monotonic clock, in seconds; None: it never came to that.

    `model` is a served one, or empty; `asked_model` what the client named, whatever that was.
    `broken_at` are replicas that broke off an answer with which others went on, in order.
    `failed_at` are replicas whose attempts failed before the answer began, and were followed by another, in order.
    tenant, key_id, admission   whose key it came with, and what its limits said; empty without keys
    """

    request_id: str
    endpoint: str
    started_at: float
    model: str = ""
    asked_model: str = ""
    stream: bool = False
    replica_id: str = ""
    policy: str = ""
    reason: str = ""
    num_attempts: int = 0
    matched_tokens: int | None = None
    cached_tokens: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    placed_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    status: int = 0
    end: EndState | None = None
    error: str = ""
    broken_at: list[str] = []
    failed_at: list[str] = []
    tenant: str = ""
    key_id: str = ""
    admission: str = ""

    def end_as(self, end: EndState) -> None:
        assert self.end is None, f"request {self.request_id} ended twice: {self.end}, then {end}"
        self.end = end

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.started_at
