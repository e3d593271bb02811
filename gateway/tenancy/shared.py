"""Limits that several gateways hold together, in Redis: one script a request in, one out, and a beat.

One task speaks to Redis. It gathers the requests that came while the last answer was on its way and sends their scripts
in one pipeline, so there is one connection and one call at a time, each within link.CALL_S. Whoever waits when the call
fails is told so (LinkDown) and decides alone (service.py): with the local machine and this gateway's share.

A settlement that could not be sent is kept for KEEP_S and sent again; Redis does it once, by the request's id. Every
BEAT_S, with nothing else under way, the gateway says how much it has in each account. So a request whose answer was
lost, and a Redis that lost its data (FLUSHALL, a failover to an empty replica), are made good within a second; a
gateway that stops beating is taken for dead after TTL_S, with all that it held.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import NoScriptError

from gateway.sharing.link import CALL_S, Link, LinkDown
from gateway.tenancy.limits import Account, Denied, Limit
from gateway.tenancy.scripts import ADMIT, BEAT, SETTLE

BEAT_S = 0.5
TTL_S = 3.0
KEEP_S = 60.0
MAX_BATCH = 128
MAX_KEPT = 20_000

Words = list[str | int | float]


@dataclass(slots=True, eq=False)
class _Admit:
    accounts: Sequence[Account]
    wanted: int
    answer: asyncio.Future[Denied | None]


@dataclass(slots=True, eq=False)
class _Settle:
    """`counted`: Redis admitted it, so that its place and its reservation are to be given back there."""

    request_id: str
    accounts: Sequence[Account]
    reserved: int
    used: int
    counted: bool
    since: float


class SharedLimits:
    """`start` and `close` it on the event loop. `accounts` lists all there are, for the beat."""

    def __init__(
        self, url: str, fleet: str, gateway_id: str, accounts: dict[str, Account], call_s: float = CALL_S
    ) -> None:
        self._call_s = call_s
        self.link = Link(url)
        self.num_gateways = 1
        self._gateway_id = gateway_id
        self._prefix = f"warmgate:{{{fleet}}}:limits"
        self._accounts = accounts
        self._admits: deque[_Admit] = deque()
        self._settles: deque[_Settle] = deque()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._lost = itertools.count(1)
        self._unsure: set[Account] = set()  # Redis may count more of them than there is: told with the next beat
        self._shas: dict[str, str] = {}

    @property
    def is_up(self) -> bool:
        return self.link.is_up

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="limits")

    async def close(self) -> None:
        """Settle what can be settled, and stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail_admits("the gateway stops")
        with contextlib.suppress(LinkDown, TimeoutError):
            async with asyncio.timeout(1.0):
                while self._settles and self.link.is_up:
                    await self._batch()
                if self.link.is_up:
                    await self.link.raw("ZREM", f"{self._prefix}:gateways", self._gateway_id)
        await self.link.close()

    async def admit(self, accounts: Sequence[Account], wanted: int) -> Denied | None:
        """Raises LinkDown where Redis can't say. A cancelled wait gives back what is granted after it."""
        if not self.link.is_up:
            raise LinkDown(self.link.why_down)
        op = _Admit(accounts, wanted, asyncio.get_running_loop().create_future())
        self._admits.append(op)
        self._wake.set()
        try:
            return await op.answer
        except asyncio.CancelledError:
            answer = op.answer
            if answer.done() and not answer.cancelled() and answer.exception() is None and answer.result() is None:
                self._give_back(op)
            raise

    def settle(self, request_id: str, accounts: Sequence[Account], reserved: int, used: int, counted: bool) -> None:
        op = _Settle(request_id, accounts, reserved, used, counted, time.monotonic())
        if len(self._settles) >= MAX_KEPT:
            self._drop(op)
            return
        self._settles.append(op)
        self._wake.set()

    async def _run(self) -> None:
        beat_at = 0.0
        while True:
            now = time.monotonic()
            try:
                if now >= beat_at:
                    beat_at = now + BEAT_S
                    await self._beat()
                elif self._admits or self._settles:
                    await self._batch()
                else:
                    self._wake.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(beat_at - now):
                            await self._wake.wait()
            except LinkDown as error:
                self._fail_admits(str(error))
                await asyncio.sleep(max(self.link.retry_in_s, 0.01))
                beat_at = 0.0

    def _fail_admits(self, why: str) -> None:
        while self._admits:
            op = self._admits.popleft()
            if not op.answer.done():
                op.answer.set_exception(LinkDown(why))

    async def _beat(self) -> None:
        keys: Words = [f"{self._prefix}:gateways"]
        values: Words = [self._gateway_id, TTL_S]
        unsure, self._unsure = self._unsure, set()
        for account in {**self._accounts, **{account.name: account for account in unsure}}.values():
            if account.num_shared or account.base or account in unsure:
                keys.append(self._key(account))
                is_brief = bool(account.limits.budget_period_s) or not account.limits.budget_tokens
                values += [
                    account.num_shared, account.reserved_shared, account.period, account.base, int(is_brief),
                ]  # fmt: skip
        try:
            [num_live] = await self._evaluate([(BEAT, keys, values)])
        except BaseException:
            self._unsure |= unsure
            raise
        self.num_gateways = max(1, int(num_live))

    async def _batch(self) -> None:
        """One pipeline. Admissions that fail are told; settlements that fail are kept."""
        admits = [self._admits.popleft() for _ in range(min(len(self._admits), MAX_BATCH))]
        settles = [self._settles.popleft() for _ in range(min(len(self._settles), MAX_BATCH))]
        try:
            answers = await self._evaluate([*map(self._settle_words, settles), *map(self._admit_words, admits)])
        except BaseException as error:
            oldest = time.monotonic() - KEEP_S
            for op in settles:
                if op.since <= oldest:
                    self._drop(op)
            self._settles.extendleft(reversed([op for op in settles if op.since > oldest]))
            for admit in admits:
                self._unsure.update(admit.accounts)
                if not admit.answer.done():
                    admit.answer.set_exception(LinkDown(str(error)))
            raise
        for settle, answer in zip(settles, answers, strict=False):
            _settled(settle)
            _learn(settle.accounts, answer)
        for admit, answer in zip(admits, answers[len(settles) :], strict=True):
            self._answer(admit, answer)

    def _answer(self, op: _Admit, answer: list[Any]) -> None:
        self.num_gateways = max(1, int(answer[0]))
        refused, limit, used, wait_ms = int(answer[1]), answer[2].decode(), int(answer[3]), int(answer[4])
        for index, account in enumerate(op.accounts):
            req, tok, _, period, spent = map(float, answer[5 + 5 * index : 10 + 5 * index])
            account.requests, account.tokens, account.at = req, tok, time.monotonic()
            if account.limits.budget_tokens:
                account.period, account.spent, account.base = int(period), int(spent), int(spent)
            if not refused:
                account.num_shared += 1
                account.reserved_shared += op.wanted
        if op.answer.done():  # whoever asked is gone: give it back
            if not refused:
                self._give_back(op)
            return
        if not refused:
            op.answer.set_result(None)
            return
        account = op.accounts[refused - 1]
        kind = Limit(limit)
        bound = {
            Limit.BUDGET: account.limits.budget_tokens,
            Limit.CONCURRENCY: account.limits.concurrency,
            Limit.REQUESTS: account.limits.requests_per_minute,
            Limit.TOKENS: account.limits.tokens_per_minute,
        }[kind]
        wanted = op.wanted if kind in (Limit.BUDGET, Limit.TOKENS) else 1
        wait_s = None if wait_ms < 0 else wait_ms / 1000
        op.answer.set_result(Denied(kind, account.name, bound, used, wanted, wait_s))

    def _give_back(self, op: _Admit) -> None:
        """It was granted to somebody who is gone."""
        self.settle(f"lost-{next(self._lost)}", op.accounts, op.wanted, 0, True)

    def _drop(self, op: _Settle) -> None:
        """It was kept for long enough: the next beat says that it is over."""
        _settled(op)
        self._unsure.update(op.accounts)

    def _key(self, account: Account) -> str:
        return f"{self._prefix}:{account.name}"

    def _admit_words(self, op: _Admit) -> tuple[str, Words, Words]:
        keys: Words = [f"{self._prefix}:gateways", *map(self._key, op.accounts)]
        values: Words = [self._gateway_id, TTL_S, op.wanted]
        for account in op.accounts:
            values += [*_numbers(account), account.period, account.base]
        return ADMIT, keys, values

    def _settle_words(self, op: _Settle) -> tuple[str, Words, Words]:
        mark = f"{self._prefix}:settled:{self._gateway_id}:{op.request_id}"
        keys: Words = [f"{self._prefix}:gateways", mark, *map(self._key, op.accounts)]
        values: Words = [self._gateway_id, TTL_S, op.reserved, op.used, int(op.counted)]
        for account in op.accounts:
            values += _numbers(account)
        return SETTLE, keys, values

    async def _evaluate(self, calls: list[tuple[str, Words, Words]]) -> list[Any]:
        """The scripts' answers, in order. A Redis that doesn't know them (any more) is told them. Raises LinkDown."""

        async def run(redis: Any) -> list[Any]:
            for source in (ADMIT, SETTLE, BEAT):
                if source not in self._shas:
                    self._shas[source] = await redis.script_load(source)
            todo, answers = list(range(len(calls))), [None] * len(calls)
            for _ in range(2):
                pipe = redis.pipeline(transaction=False)
                for index in todo:
                    source, keys, values = calls[index]
                    pipe.evalsha(self._shas[source], len(keys), *keys, *values)
                for index, answer in zip(todo, await pipe.execute(raise_on_error=False), strict=True):
                    answers[index] = answer
                todo = [index for index in todo if isinstance(answers[index], NoScriptError)]
                if not todo:
                    break
                for source in {calls[index][0] for index in todo}:
                    await redis.script_load(source)
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
            return answers

        return await self.link.call(run, self._call_s)


def _settled(op: _Settle) -> None:
    """Redis has it, or will be told by the beat."""
    if op.counted:
        for account in op.accounts:
            account.num_shared -= 1
            account.reserved_shared -= op.reserved


def _learn(accounts: Sequence[Account], answer: Sequence[int]) -> None:
    """What is spent after a settlement; nothing where it had been settled before. Redis may forget it; the beat would
    remind it."""
    for account, period, spent in zip(accounts, answer[1::2], answer[2::2], strict=False):
        if account.limits.budget_tokens and period >= account.period:
            known = (account.base, account.spent) if period == account.period else (0, 0)
            account.period, account.base = period, max(known[0], spent)
            account.spent = max(known[1], account.base)


def _numbers(account: Account) -> Words:
    limits = account.limits
    return [
        limits.requests_per_minute, limits.tokens_per_minute, limits.concurrency, limits.budget_tokens,
        limits.budget_period_s,
    ]  # fmt: skip
