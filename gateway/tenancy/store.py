"""Where records of keys are kept: in a file, or in Redis. One source a gateway; both hold no keys, only digests.

The file is JSON, written whole beside itself with mode 0600 and moved into place, so a reader sees the old or the new
one; writers take turns by a lock. In Redis a hash holds a record a field, with a version that every change counts up
and the secret that the first one makes: a book that was begun anew after a loss is known by another secret.
A gateway looks for a change every RELOAD_S. That, and CALL_S more, bounds how long a revoked key is still taken.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from gateway.tenancy.keys import KeyBook, KeyRecord, KeysError, Limits

RELOAD_S = 1.0
_KEY = "key:"
_TENANT = "tenant:"
_SALT = "salt"
_VERSION = "version"

_T = TypeVar("_T")


class KeyStore(Protocol):
    """What `warmgate keys` needs. All raise KeysError."""

    def read(self) -> KeyBook: ...
    def put(self, record: KeyRecord) -> None: ...
    def remove(self, key_id: str) -> bool: ...
    def limit(self, tenant: str, limits: Limits) -> None: ...


class FileStore:
    """`path` need not exist: it is then a book without keys, and made by the first change."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def stamp(self) -> tuple[int, int, int]:
        """Changes whenever the file does. Raises KeysError."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return (0, 0, 0)
        except OSError as error:
            raise KeysError(f"the keys' file {self.path} can't be read: {error.strerror}") from None
        return (found.st_mtime_ns, found.st_ino, found.st_size)

    def put(self, record: KeyRecord) -> None:
        with self._changed() as file:
            file["keys"][record.id] = record
            file["salt_secret"] = file["salt_secret"] or new_secret()

    def remove(self, key_id: str) -> bool:
        with self._changed() as file:
            return file["keys"].pop(key_id, None) is not None

    def limit(self, tenant: str, limits: Limits) -> None:
        with self._changed() as file:
            file["tenants"].pop(tenant, None)
            if limits.any:
                file["tenants"][tenant] = limits

    def read(self) -> KeyBook:
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=KeyBook)
        except FileNotFoundError:
            return KeyBook()
        except OSError as error:
            raise KeysError(f"the keys' file {self.path} can't be read: {error.strerror}") from None
        except (msgspec.DecodeError, RecursionError) as error:
            raise KeysError(f"the keys' file {self.path} is not what `warmgate keys` writes ({error})") from None

    @contextlib.contextmanager
    def _changed(self) -> Iterator[dict[str, Any]]:
        """The file's fields, to be changed; written when the block ends."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise KeysError(f"the keys' file {self.path} can't be written: {error.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            file = self.read()
            fields: dict[str, Any] = {
                "keys": dict(file.keys), "tenants": dict(file.tenants), "salt_secret": file.salt_secret,
            }  # fmt: skip
            yield fields
            write_privately(self.path, msgspec.json.format(msgspec.json.encode(KeyBook(**fields)), indent=1) + b"\n")
        except OSError as error:
            raise KeysError(f"the keys' file {self.path} can't be written: {error.strerror}") from None
        finally:
            os.close(lock)


def write_privately(path: Path, data: bytes) -> None:
    """Replace `path` at once, readable by its owner only. Raises OSError, and leaves nothing behind then."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def new_secret() -> str:
    return secrets.token_hex(32)


def redis_key(fleet: str) -> str:
    return f"warmgate:{{{fleet}}}:keys"


def book_of(fields: dict[bytes, bytes]) -> KeyBook:
    """The book from the hash in Redis. Raises KeysError."""
    keys: dict[str, KeyRecord] = {}
    tenants: dict[str, Limits] = {}
    salt_secret = ""
    try:
        for raw, value in fields.items():
            name = raw.decode()
            if name.startswith(_KEY):
                keys[name.removeprefix(_KEY)] = msgspec.json.decode(value, type=KeyRecord)
            elif name.startswith(_TENANT):
                tenants[name.removeprefix(_TENANT)] = msgspec.json.decode(value, type=Limits)
            elif name == _SALT:
                salt_secret = value.decode()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise KeysError(f"the keys in Redis are not what `warmgate keys` writes ({error})") from None
    return KeyBook(keys, tenants, salt_secret)


def fields_of(book: KeyBook) -> dict[str, bytes]:
    """The book's part of the hash in Redis, but for the secret."""
    return {
        **{_KEY + record.id: msgspec.json.encode(record) for record in book.keys.values()},
        **{_TENANT + tenant: msgspec.json.encode(limits) for tenant, limits in book.tenants.items()},
    }


class RedisStore:
    """Keys in Redis, for the command line. Raises KeysError when `url` is no Redis URL."""

    def __init__(self, url: str, fleet: str) -> None:
        from redis import Redis  # slow to import

        try:
            self._redis = Redis.from_url(url, socket_timeout=5.0, socket_connect_timeout=5.0)
        except ValueError as error:
            raise KeysError(f"the Redis URL is wrong: {error}") from None
        self._name = redis_key(fleet)

    def read(self) -> KeyBook:
        return book_of(self._do(lambda redis: redis.hgetall(self._name)))

    def put(self, record: KeyRecord) -> None:
        self._change("hset", _KEY + record.id, msgspec.json.encode(record))

    def remove(self, key_id: str) -> bool:
        return bool(self._change("hdel", _KEY + key_id))

    def limit(self, tenant: str, limits: Limits) -> None:
        if limits.any:
            self._change("hset", _TENANT + tenant, msgspec.json.encode(limits))
        else:
            self._change("hdel", _TENANT + tenant)

    def _change(self, verb: str, *words: str | bytes) -> int:
        def change(redis: Any) -> int:
            pipe = redis.pipeline(transaction=True)
            getattr(pipe, verb)(self._name, *words)
            pipe.hsetnx(self._name, _SALT, new_secret())
            pipe.hincrby(self._name, _VERSION, 1)
            return int(pipe.execute()[0])

        return self._do(change)

    def _do(self, work: Callable[[Any], _T]) -> _T:
        from redis.exceptions import RedisError

        try:
            return work(self._redis)
        except RedisError as error:
            raise KeysError(f"Redis can't be used: {error}") from None
