"""The gateway's own traffic as a trace that `warmgate replay` reads: a JSON line for each request answered in full.

    {"timestamp": s, "num_prompt_tokens": n, "num_output_tokens": n, "block_ids": [...], "block_tokens": n, "model": m}

A block's id is a keyed hash of the router's key for the prefix that ends with it: equal where prefixes are equal, and
of no use to anybody who would compare it with the keys of known prompts, since the secret is drawn at random when the
program starts and kept nowhere. So a restart begins with other ids. `session` (a client's prompt_cache_key, hashed
likewise) is there where the client gave one.

`timestamp` is when the request came, in seconds of the wall's clock; lines are in the order in which requests ended,
and the reader sorts them. A file has one size of blocks: what goes to replicas that cut otherwise is left out, counted.
Several processes append to one file: they are forked from one program, so their secret is the same. A line that a
full disk or a crash has cut off is taken back, since a reader stops at what is no JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import time
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from gateway.observe.batches import Batches
from gateway.observe.record import RequestRecord
from gateway.openai.fields import ParsedRequest
from policies.types import PrefixChain

_log = logging.getLogger("warmgate.trace")
_SECRET: Final = secrets.token_bytes(32)  # drawn on import, which is before processes are forked
_ID_BYTES: Final = 5  # alike only has to differ what follows the same prefix
_MAX_REQUESTS: Final = 20_000
_MAX_BLOCKS: Final = 1_000_000  # that wait to be written: 50 MB
_STEP_BYTES: Final = 64 * 1024
_ENDPOINTS: Final = ("chat", "completions")


class TraceFileError(Exception):
    """The file can't be appended to. The message is one sentence for whoever starts the gateway."""


class _Entry(NamedTuple):
    at: float
    chain: PrefixChain
    num_prompt_tokens: int
    num_output_tokens: int
    model: str
    session: str | None


class _Line(msgspec.Struct):
    timestamp: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: list[int]
    block_tokens: int
    model: str
    session: str | UnsetType = UNSET


class TraceFile(Batches[_Entry]):
    """Appends to `path` until the file has `max_bytes`. Raises TraceFileError."""

    name = "the trace"

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.num_left_out = 0
        self._max_bytes = max_bytes
        self._num_blocks = 0
        self._encoder = msgspec.json.Encoder()
        self._wall_offset = time.time() - time.monotonic()
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise TraceFileError(f"the trace {path} can't be opened: {error.strerror}.") from None
        super().__init__(fd, True, _MAX_REQUESTS, _log)
        try:
            self._block_tokens = self._found_block_tokens()
            self._mend_end()
        except TraceFileError:
            os.close(fd)
            raise

    def write(self, parsed: ParsedRequest, record: RequestRecord, chain: PrefixChain) -> None:
        """Queue the line of a request that has its whole answer."""
        if not self.enabled or parsed.endpoint not in _ENDPOINTS:
            return
        if not self._entries:
            self._num_blocks = 0
        if self._num_blocks >= _MAX_BLOCKS:
            self.num_dropped += 1
            return
        self._num_blocks += len(chain.keys)
        num_prompt = chain.num_tokens
        if record.prompt_tokens and (record.broken_at or not chain.keys):  # else as the blocks were cut
            num_prompt = record.prompt_tokens
        at = record.started_at + self._wall_offset
        self.add(_Entry(at, chain, num_prompt, record.output_tokens or 0, record.model, parsed.session))

    async def close(self) -> None:
        await super().close()
        if self.num_dropped or self.num_left_out:
            _log.warning(
                "the trace %s lacks %d requests that came faster than they could be written, and %d whose blocks have "
                "another size than the file's or which came after it was full",
                self.path, self.num_dropped, self.num_left_out,
            )  # fmt: skip

    def render(self, entries: list[_Entry]) -> bytes:
        """As many as there is room for."""
        room = self._max_bytes - os.fstat(self._fd).st_size
        found: list[bytes] = []
        for number, entry in enumerate(entries):
            line = self._line(entry)
            if line is None:
                self.num_left_out += 1
                continue
            data = self._encoder.encode(line) + b"\n"
            room -= len(data)
            if room < 0:
                self.num_left_out += len(entries) - number
                self._is_full()
                break
            found.append(data)
        return b"".join(found)

    def _write_out(self, entries: list[_Entry]) -> None:
        try:
            super()._write_out(entries)
        except OSError:
            self._mend_end()
            raise

    def _mend_end(self) -> None:
        """Take back a last line that was cut off; end one that only lacks its end."""
        with contextlib.suppress(OSError):  # no file but a pipe, or a disk that is beyond help
            size = start = os.fstat(self._fd).st_size
            line = b""
            while start and b"\n" not in line:
                start = max(0, start - _STEP_BYTES)
                line = os.pread(self._fd, size - start, start)
            line = line.rpartition(b"\n")[2]
            if not line:
                return
            try:
                json.loads(line)
            except ValueError:
                os.ftruncate(self._fd, size - len(line))
            else:
                os.write(self._fd, b"\n")

    def _is_full(self) -> None:
        if self.enabled:
            self.enabled = False
            _log.warning(
                "the trace %s has the %d bytes that it may have: nothing is recorded any more "
                "(record_trace_bytes sets the bound)", self.path, self._max_bytes,
            )  # fmt: skip

    def _line(self, entry: _Entry) -> _Line | None:
        chain = entry.chain
        if not self._block_tokens:
            self._block_tokens = self._found_block_tokens()  # another process may have begun the file
        if not self._block_tokens and (chain.keys or chain.block_tokens > 1):
            self._block_tokens = chain.block_tokens
        if not self._block_tokens or (chain.keys and chain.block_tokens != self._block_tokens):
            return None
        ids = [_hashed(key.to_bytes(16, "little")) for key in chain.keys]
        line = _Line(
            round(entry.at, 3), max(entry.num_prompt_tokens, 1), entry.num_output_tokens, ids, self._block_tokens,
            entry.model,
        )  # fmt: skip
        if entry.session is not None:
            line.session = f"{_hashed(entry.session.encode('utf-8', 'surrogatepass')):x}"
        return line

    def _found_block_tokens(self) -> int:
        """Those of the file's first line; 0 while there is none."""
        if not os.fstat(self._fd).st_size:
            return 0
        try:
            with self.path.open("rb") as file:
                found = json.loads(file.readline())["block_tokens"]
            if isinstance(found, int) and found > 0:
                return found
        except (OSError, ValueError, KeyError, TypeError):
            pass
        raise TraceFileError(f"the trace {self.path} can't be appended to: it holds something else; name another file.")


def _hashed(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, key=_SECRET, digest_size=_ID_BYTES).digest())
