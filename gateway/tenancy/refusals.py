"""What a client hears of keys and limits: OpenAI's statuses, codes and headers."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from engine_worker.contract.errors import ApiError
from gateway.answer import Headers
from gateway.replicas.registry import Registry
from gateway.tenancy.limits import Account, Denied, Limit, Standing, standings
from policies.types import ReplicaId

_UNITS = {Limit.REQUESTS: "requests per min (RPM)", Limit.TOKENS: "tokens per min (TPM)"}


def no_key() -> ApiError:
    message = "You didn't provide an API key: send it as `Authorization: Bearer KEY` or as x-api-key."
    return ApiError(401, message, type="invalid_request_error", code="invalid_api_key")


def wrong_key() -> ApiError:
    return ApiError(401, "Incorrect API key provided.", type="invalid_request_error", code="invalid_api_key")


def stale() -> ApiError:
    message = "The gateway can't read its keys at present. Try again shortly."
    return ApiError(503, message, code="keys_unavailable", retry_after_s=2.0)


def shut_out(registry: Registry, model: str) -> frozenset[ReplicaId]:
    """The replicas that mix tenants' caches. Raises ApiError(503) where there are no others for `model`."""
    mixing = registry.mixing()
    ready = registry.ready(model) if mixing else ()
    if ready and all(replica.replica_id in mixing for replica in ready):
        message = (
            "No replica of this model keeps tenants' caches apart (cache_salt), so none gets requests with API keys; "
            "whoever runs this gateway may say unsalted_replicas: allow."
        )
        raise ApiError(503, message, code="no_isolation", should_retry=False)
    return mixing


def refusal(denied: Denied) -> ApiError:
    """429 with the time after which it would pass; none of that where waiting does not help."""
    wait_s = denied.retry_after_s
    if denied.limit is Limit.BUDGET:
        left = max(0, denied.bound - denied.used)
        message = (
            f"You exceeded your current quota: {left} of {denied.bound} tokens are left in this period for your "
            f"{_whose(denied)}, and this request asks for up to {denied.wanted}."
        )
        return ApiError(
            429, message, type="insufficient_quota", code="insufficient_quota", retry_after_s=wait_s, should_retry=False
        )
    if denied.limit is Limit.CONCURRENCY:
        message = f"Rate limit reached for your {_whose(denied)}: {denied.used} of {denied.bound} requests at once."
        return _limited(message, "requests", wait_s)
    what = f"Limit {denied.bound}, Used {max(0, denied.used)}, Requested {denied.wanted}"
    if wait_s is None:
        message = f"Request too large for your {_whose(denied)} on {_UNITS[denied.limit]}: {what}. Ask for less."
        return _limited(message, denied.limit.value, None)
    message = f"Rate limit reached for your {_whose(denied)} on {_UNITS[denied.limit]}: {what}."
    return _limited(f"{message} Please try again in {duration(wait_s)}.", denied.limit.value, wait_s)


def _limited(message: str, kind: str, wait_s: float | None) -> ApiError:
    should_retry = False if wait_s is None else None
    return ApiError(
        429, message, type=kind, code="rate_limit_exceeded", retry_after_s=wait_s, should_retry=should_retry
    )


def _whose(denied: Denied) -> str:
    return "tenant" if denied.account.startswith("tenant ") else "key"


class Rates:
    """x-ratelimit-*: of the key's and the tenant's limits the tighter one. Nothing before `note`."""

    __slots__ = ("_requests", "_tokens")

    def __init__(self) -> None:
        self._requests: Standing | None = None
        self._tokens: Standing | None = None

    def note(self, accounts: Sequence[Account]) -> None:
        """Where they stand now."""
        self._requests, self._tokens = standings(accounts)

    def lines(self) -> str:
        """As lines of a head."""
        lines = ""
        if (requests := self._requests) is not None:
            lines = _lines("requests", requests)
        if (tokens := self._tokens) is not None:
            lines += _lines("tokens", tokens)
        return lines

    def headers(self) -> Headers:
        headers: Headers = []
        for line in self.lines().encode("ascii").splitlines():
            name, _, value = line.partition(b": ")
            headers.append((name, value))
        return headers


def _lines(unit: str, standing: Standing) -> str:
    return (
        f"x-ratelimit-limit-{unit}: {standing.limit}\r\nx-ratelimit-remaining-{unit}: {standing.remaining}\r\n"
        f"x-ratelimit-reset-{unit}: {duration(standing.reset_s)}\r\n"
    )


def duration(seconds: float) -> str:
    """As OpenAI writes them: 20ms, 2s, 6m0s. Never too short."""
    if seconds < 1.0:
        return f"{ceil(max(0.0, seconds) * 1000)}ms"
    whole = ceil(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"
