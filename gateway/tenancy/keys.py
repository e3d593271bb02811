"""Keys and what is known of them.

A key is `wg-` and 256 random bits in URL-safe base64. It is shown once, when it is made; what is kept is its SHA-256,
which is enough for a secret that nobody can guess: no salt and no slow hash are needed. A record is found by the
digest of the key that a client sent, and the digests are then compared in constant time.

Limits stand on a key, on its tenant, or on both; a request must pass them all.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from typing import Annotated, Literal

import msgspec

PREFIX = "wg-"
_KEY = re.compile(rb"wg-[A-Za-z0-9_-]{43}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")
PERIODS = {"m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}

Priority = Literal["high", "normal", "low"]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # what a double holds exactly, as Redis counts


class KeysError(Exception):
    """Something is wrong with the keys or where they are kept. The message is one sentence for whoever runs this."""


class NoKeysFile(KeysError):
    """The command was given a file that isn't there."""


class Limits(msgspec.Struct, frozen=True, omit_defaults=True):
    """0 is no limit. Tokens are prompt and output tokens together, cached ones included.

    budget_tokens  in each period of `budget_period_s`; periods are counted from 1970-01-01, so days begin at midnight
                   UTC. A period of 0 never ends.
    """

    requests_per_minute: _Count = 0
    tokens_per_minute: _Count = 0
    concurrency: _Count = 0
    budget_tokens: _Count = 0
    budget_period_s: _Count = 86_400

    @property
    def any(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute or self.concurrency or self.budget_tokens)


class KeyRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is kept of a key: everything but the key. `models` empty: all of them. `created` is a Unix time."""

    id: Annotated[str, msgspec.Meta(pattern=r"^[!-~]{1,128}\Z")]
    digest: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-fA-F]{64}\Z")]
    tenant: Annotated[str, msgspec.Meta(pattern=rf"^{NAME.pattern}\Z")]
    created: int = 0
    models: tuple[str, ...] = ()
    priority: Priority = "normal"
    limits: Limits = Limits()


class KeyBook(msgspec.Struct, frozen=True):
    """All keys by id, the limits of tenants that have their own, and the secret that salts are made with."""

    keys: dict[str, KeyRecord] = {}
    tenants: dict[str, Limits] = {}
    salt_secret: str = ""


def new_key(
    tenant: str, models: tuple[str, ...] = (), priority: Priority = "normal", limits: Limits | None = None
) -> tuple[str, KeyRecord]:
    """A fresh key and its record. Raises KeysError for a tenant's name that can't stand in logs and metrics."""
    check_name(tenant)
    key = PREFIX + secrets.token_urlsafe(32)
    record = KeyRecord(
        id=f"key_{secrets.token_hex(6)}",
        digest=hashlib.sha256(key.encode()).hexdigest(),
        tenant=tenant,
        created=int(time.time()),
        models=models,
        priority=priority,
        limits=limits or Limits(),
    )
    return key, record


def check_name(tenant: str) -> None:
    if not NAME.fullmatch(tenant):
        raise KeysError(f"{tenant!r} is no tenant's name: up to 64 letters, digits and `_.@-`, a letter or digit first")


def digest_of(given: bytes) -> bytes | None:
    """The digest of what a client sent; None when it can't be a key of ours."""
    return hashlib.sha256(given).digest() if _KEY.fullmatch(given) else None


def read_period(text: str) -> int:
    """Seconds of `30d`, `12h`, `1w`, or 0 for `none`. Raises KeysError."""
    if text == "none":
        return 0
    found = re.fullmatch(r"([1-9][0-9]{0,5})([mhdw])", text)
    if found is None:
        raise KeysError(f"{text!r} is no period: write it like 30d, 12h or 1w, or `none` for one that never ends")
    return int(found[1]) * PERIODS[found[2]]
