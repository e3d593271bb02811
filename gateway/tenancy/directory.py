"""The keys as the gateway has them in memory: a digest -> who that is, with all that a request needs made beforehand.

A watcher looks for changes every store.RELOAD_S and builds the directory anew. What can't be read changes nothing: the
keys that are known stay in use for `max_stale_s`; after that nobody is let in, since a revocation might have been
missed. A Redis that lost its data (the book there is gone, or another one was begun since) is given the keys again, so
losing Redis loses none.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine_worker.contract.errors import ApiError
from gateway.sharing.errors import LinkDown
from gateway.tenancy.keys import KeyBook, KeysError, Limits, digest_of
from gateway.tenancy.limits import Account, Ledger
from gateway.tenancy.salt import Salts, narrowed
from gateway.tenancy.scripts import GIVE_BACK
from gateway.tenancy.store import RELOAD_S, FileStore, book_of, fields_of, redis_key

if TYPE_CHECKING:
    from gateway.sharing.link import Link

_log = logging.getLogger("warmgate.tenants")
WEIGHTS = {"high": 4.0, "normal": 2.0, "low": 1.0}


@dataclass(frozen=True, slots=True, eq=False)
class Identity:
    """Whose key a request came with. `salt` goes upstream; `accounts` are those with limits."""

    tenant: str
    key_id: str
    digest: bytes
    weight: float
    models: frozenset[str]
    salt: str
    accounts: tuple[Account, ...]

    def may_use(self, *names: str) -> bool:
        """`names`: the model as asked for, and as it is served."""
        return not self.models or any(name in self.models for name in names)

    def check_model(self, *names: str) -> None:
        """Raises ApiError(404), as if the model were not there."""
        if not self.may_use(*names):
            message = f"The model {names[0][:128]!r} does not exist or you do not have access to it."
            raise ApiError(404, message, param="model", code="model_not_found")

    def salted(self, own: str) -> str:
        return narrowed(self.salt, own)


class Directory:
    """Finds identities by keys. `load` puts a book in force."""

    def __init__(self, ledger: Ledger, salt_secret: str | None, groups: Mapping[str, Sequence[str]]) -> None:
        self._ledger = ledger
        self._salt_secret = salt_secret
        self._groups = groups
        self._by_digest: dict[bytes, Identity] = {}
        self.book: KeyBook | None = None
        self.num_loads = 0  # an identity that was found is in force until this changes

    def __len__(self) -> int:
        return len(self._by_digest)

    def find(self, given: bytes) -> Identity | None:
        """The identity of a key as the client sent it."""
        digest = digest_of(given)
        if digest is None:
            return None
        found = self._by_digest.get(digest)
        return found if found is not None and hmac.compare_digest(found.digest, digest) else None

    def load(self, book: KeyBook) -> None:
        """Raises KeysError for a book that can't be used; the one before then stays."""
        secret = self._salt_secret or book.salt_secret
        if book.keys and not secret:
            raise KeysError("the keys come without a salt_secret: set WARMGATE_SALT_SECRET, or make one more key")
        salts = Salts(secret, self._groups)
        identities: dict[bytes, Identity] = {}
        names: set[str] = set()
        for record in book.keys.values():
            digest = bytes.fromhex(record.digest)
            named = ((f"key {record.id}", record.limits), (f"tenant {record.tenant}", self._of(book, record.tenant)))
            names.update(name for name, _ in named)
            accounts = [self._ledger.account(name, limits) for name, limits in named]
            identities[digest] = Identity(
                record.tenant, record.id, digest, WEIGHTS[record.priority], frozenset(record.models),
                salts.of(record.tenant), tuple(account for account in accounts if account is not None),
            )  # fmt: skip
        self._by_digest, self.book = identities, book
        self.num_loads += 1
        self._ledger.forget([name for name in self._ledger.accounts if name not in names])

    def _of(self, book: KeyBook, tenant: str) -> Limits:
        return book.tenants.get(tenant) or Limits()


class Watcher:
    """Keeps a directory up to date. One of `file` and `link` is given; `start` and `close` it on the event loop."""

    def __init__(
        self, directory: Directory, file: FileStore | None, link: Link | None, fleet: str, max_stale_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._directory = directory
        self._file = file
        self._link = link
        self._name = redis_key(fleet)
        self._max_stale_s = max_stale_s
        self._clock = clock
        self._stamp: object = None
        self._version = 0
        self._said = ""
        self._fresh_at = float("-inf")
        self._task: asyncio.Task[None] | None = None

    @property
    def is_stale(self) -> bool:
        """The keys could not be read for too long, or never yet."""
        return self._clock() - self._fresh_at > self._max_stale_s

    def load_file(self) -> None:
        """The first load of a file, before anything is served. Raises KeysError."""
        assert self._file is not None
        stamp = self._file.stamp()
        if stamp != self._stamp:
            self._directory.load(self._file.read())
            self._stamp = stamp
        self._fresh_at = self._clock()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="keys")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._link is not None:
            await self._link.close()

    async def _run(self) -> None:
        while True:
            try:
                if self._file is not None:
                    await self._load_changed(self._file)
                else:
                    await self._load_redis()
                self._say("")
            except (KeysError, LinkDown) as error:
                self._say(str(error))
            await asyncio.sleep(RELOAD_S)

    async def _load_changed(self, file: FileStore) -> None:
        """Off the loop: the folder may be a slow one."""
        stamp = await asyncio.to_thread(file.stamp)
        if stamp != self._stamp:
            self._directory.load(await asyncio.to_thread(file.read))
            self._stamp = stamp
        self._fresh_at = self._clock()

    def _say(self, trouble: str) -> None:
        if trouble and trouble != self._said:
            _log.warning("%s: the keys known so far stay in use for up to %g s", trouble, self._max_stale_s)
        self._said = trouble

    async def _load_redis(self) -> None:
        """Read the book when its version has changed, and give Redis its keys back when it has lost them."""
        assert self._link is not None
        version, salt = await self._stands(self._link)
        known = self._directory.book
        if known is not None and known.keys and (salt != known.salt_secret or not version):
            fields = [word for pair in fields_of(known).items() for word in pair]
            words = ("EVAL", GIVE_BACK, 1, self._name, known.salt_secret, self._version, *fields)
            if await self._link.raw(*words):
                _log.warning("Redis has lost the keys; it is given them again")
            version, salt = await self._stands(self._link)
        if version != self._version or known is None or salt != known.salt_secret:
            flat = await self._link.raw("HGETALL", self._name)
            pairs = flat if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))
            self._directory.load(book_of(pairs))
            self._version = version
        self._fresh_at = self._clock()

    async def _stands(self, link: Link) -> tuple[int, str]:
        """The version of the book in Redis and the secret that it began with; 0 and "" where there is none."""
        version, salt = await link.raw("HMGET", self._name, "version", "salt")
        try:
            return int(version or 0), (salt or b"").decode()
        except ValueError:
            raise KeysError(f"the keys in Redis ({self._name}) have a version that is no number") from None
