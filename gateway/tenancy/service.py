"""What the proxy asks about a request: who is it, may it, what did it use. One place, three calls.

    identify   the key's identity, from the headers alone; ApiError(401) without a good one
    admit      one check of all limits, with the tokens reserved; ApiError(429) leaves nothing reserved
    Visit.end  once a request, however it ended: what it used in place of what was reserved

With no keys configured all this is off. Limits are decided in Redis where gateways share one, else here; where Redis
does not answer, here too, with this gateway's share of every limit.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from gateway.admission import Claim
from gateway.answer import Headers, Scope
from gateway.config import GatewaySettings
from gateway.observe.record import RequestRecord
from gateway.openai.fields import ParsedRequest
from gateway.sharing.errors import LinkDown
from gateway.tenancy.directory import Directory, Identity, Watcher
from gateway.tenancy.estimate import EXPECTED_OUTPUT_TOKENS, estimate
from gateway.tenancy.figures import TenantFigures
from gateway.tenancy.limits import Account, Denied, Ledger
from gateway.tenancy.refusals import Rates, no_key, refusal, stale, wrong_key
from gateway.tenancy.spent import Spent
from gateway.tenancy.store import FileStore
from policies.fair import OUTPUT_WEIGHT

if TYPE_CHECKING:
    from gateway.tenancy.shared import SharedLimits

_log = logging.getLogger("warmgate.tenants")
_FREE = ("tokenize", "detokenize")
_BEARER: Final = b"bearer "


class Caller:
    """A key as a client sent it (None for none), and whose it was found to be when the keys had been loaded `num_loads`
    times: connections bring the same key with each request."""

    __slots__ = ("given", "identity", "num_loads")

    def __init__(self, given: bytes | None) -> None:
        self.given: Final = given
        self.identity: Identity | None = None
        self.num_loads = 0


class Visit:
    """A request that was admitted, until it is settled. `claim` is its turn in the queue; `is_shared`: Redis counts it;
    `used` tokens and the `service` that these are, once it has ended."""

    __slots__ = (
        "claim", "identity", "is_free", "is_open", "is_shared", "request_id", "service", "tenancy", "used",
    )  # fmt: skip

    def __init__(self, identity: Identity, request_id: str, claim: Claim, is_free: bool, tenancy: Tenancy) -> None:
        self.identity: Final = identity
        self.request_id: Final = request_id
        self.claim: Final = claim
        self.is_free: Final = is_free
        self.tenancy: Final = tenancy
        self.is_shared = False
        self.is_open = True
        self.used = 0
        self.service = 0.0

    def end(self, record: RequestRecord, num_seen: int) -> None:
        """Settle what it used, as far as is known, once: before the client hears of its answer's end, since its next
        request may follow at once. `num_seen`: events of its stream."""
        if not self.is_open:
            return
        self.is_open = False
        if record.placed_at is not None and not self.is_free:
            output = record.output_tokens if record.output_tokens is not None else num_seen
            prompt = record.prompt_tokens or 0
            self.used = prompt + output
            self.service = max(0, prompt - (record.cached_tokens or 0)) + OUTPUT_WEIGHT * output
        self.tenancy.settle(self)


class Tenancy:
    """Raises KeysError when the keys can't be read. `start` and `close` it on the event loop."""

    def __init__(self, settings: GatewaySettings, gateway_id: str = "") -> None:
        self.is_open = settings.keys_file is None and not settings.keys_redis
        self.ledger = Ledger()
        self.figures = TenantFigures()
        self._ids = itertools.count(1)
        self._task: asyncio.Task[None] | None = None
        salt_secret = settings.salt_secret.get_secret_value() if settings.salt_secret is not None else None
        self.directory = Directory(self.ledger, salt_secret, settings.share_prefixes)
        self._watcher: Watcher | None = None
        self.shared: SharedLimits | None = None
        self._spent: Spent | None = None
        if self.is_open:
            return
        url = settings.redis_url.get_secret_value() if settings.redis_url is not None else None
        file = FileStore(settings.keys_file) if settings.keys_file is not None else None
        link = None
        if url is not None:
            from gateway.sharing.link import Link  # the client is slow to import
            from gateway.tenancy.shared import SharedLimits

            link = Link(url) if file is None else None
            self.shared = SharedLimits(url, settings.fleet, gateway_id or secrets.token_hex(6), self.ledger.accounts)
        self._watcher = Watcher(self.directory, file, link, settings.fleet, settings.keys_stale_s)
        if file is not None:
            self._watcher.load_file()
            if self.shared is None:
                self._spent = Spent(file, self.ledger)
                self._spent.restore()
            if not len(self.directory):
                _log.warning("%s holds no keys yet: warmgate keys create makes one", file.path)

    def start(self) -> None:
        if self._watcher is not None:
            self._watcher.start()
        if self.shared is not None:
            self.shared.start()
        if self._spent is not None:
            self._task = asyncio.create_task(self._spent.run(), name="spent")

    async def close(self) -> None:
        if self._watcher is not None:
            await self._watcher.close()
        if self.shared is not None:
            await self.shared.close()
        if self._task is not None and self._spent is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self._spent.save()

    def identify(self, scope: Scope, record: RequestRecord | None = None) -> Identity | None:
        """Who sends this, noted in `record`; None where no keys are configured. Raises ApiError(401), or 503 while keys
        can't be known."""
        return None if self._watcher is None else self.identify_key(given_key(scope["headers"]), record)

    def identify_key(self, given: bytes | None, record: RequestRecord | None) -> Identity | None:
        """The same for a key that was read from the headers, None where they have none."""
        return self.identify_caller(Caller(given), record)

    def identify_caller(self, caller: Caller, record: RequestRecord | None) -> Identity | None:
        """The same for a caller that may have been here before."""
        watcher = self._watcher
        if watcher is None:
            return None
        given, directory = caller.given, self.directory
        if given is None:
            self.figures.strangers["missing"] += 1
            raise no_key()
        if watcher.is_stale:
            raise stale()
        identity = caller.identity
        if identity is None or caller.num_loads != directory.num_loads:
            identity = directory.find(given)
            if identity is None:
                self.figures.strangers["unknown"] += 1
                raise wrong_key()
            caller.identity, caller.num_loads = identity, directory.num_loads
        if record is not None:
            record.tenant, record.key_id = identity.tenant, identity.key_id
        return identity

    async def admit(self, identity: Identity, parsed: ParsedRequest, record: RequestRecord, headers: Headers) -> Visit:
        """Reserve what the request may use. Adds the x-ratelimit-* headers, for an answer or a refusal alike.

        Raises ApiError(429). A cancelled wait leaves nothing reserved.
        """
        rates = Rates()
        try:
            if self.shared is None or not identity.accounts:
                return self.admit_here(identity, parsed, record, rates)
            visit, wanted = self._visit(identity, parsed)
            denied = await self._decide(self.shared, visit, identity.accounts, wanted)
            return self._judged(visit, denied, record, rates)
        finally:
            headers += rates.headers()

    def admit_here(self, identity: Identity, parsed: ParsedRequest, record: RequestRecord, rates: Rates) -> Visit:
        """The same where no other gateway shares the limits. What the headers say goes into `rates`."""
        visit, wanted = self._visit(identity, parsed)
        denied = None
        if accounts := identity.accounts:
            denied = self.ledger.admit(visit.request_id, accounts, wanted, time.monotonic(), time.time(), 1)
        return self._judged(visit, denied, record, rates)

    def _visit(self, identity: Identity, parsed: ParsedRequest) -> tuple[Visit, int]:
        """A visit, and the tokens that are to be reserved for it."""
        is_free = parsed.endpoint in _FREE
        prompt, output = (0, 0) if is_free else estimate(parsed)
        cost = prompt + OUTPUT_WEIGHT * min(output, EXPECTED_OUTPUT_TOKENS)
        claim = Claim(identity.tenant, identity.weight, parsed.model or "", cost)
        return Visit(identity, f"{next(self._ids):x}", claim, is_free, self), prompt + output

    def _judged(self, visit: Visit, denied: Denied | None, record: RequestRecord, rates: Rates) -> Visit:
        identity = visit.identity
        if identity.accounts:
            rates.note(identity.accounts)
        if denied is not None:
            record.admission = f"denied: {denied.limit}"
            self.figures.denied(identity.tenant, denied.limit)
            raise refusal(denied)
        record.admission = "admitted"
        return visit

    async def _decide(
        self, shared: SharedLimits, visit: Visit, accounts: Sequence[Account], wanted: int
    ) -> Denied | None:  # fmt: skip
        try:
            denied = await shared.admit(accounts, wanted)
        except LinkDown:
            self.figures.num_local += 1
            now, wall = time.monotonic(), time.time()
            return self.ledger.admit(visit.request_id, accounts, wanted, now, wall, shared.num_gateways)
        visit.is_shared = True
        if denied is None:
            self.ledger.hold(visit.request_id, accounts, wanted)
        return denied

    def settle(self, visit: Visit) -> None:
        """`visit.used` in place of what was reserved."""
        if not visit.identity.accounts:
            return
        held = self.ledger.settle(visit.request_id, visit.used, time.time())
        if held is not None and self.shared is not None:
            accounts, reserved = held
            self.shared.settle(visit.request_id, accounts, reserved, visit.used, visit.is_shared)

    def check_invariants(self) -> None:
        self.ledger.check_invariants()


def given_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The key that a client sent; None where it sent none."""
    given = None
    for name, value in headers:
        if name == b"authorization":
            return value[7:].strip() if value[:7].lower() == _BEARER else b""
        if name == b"x-api-key":
            given = value
    return given
