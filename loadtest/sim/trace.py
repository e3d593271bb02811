"""Request traces: what they say about a request, and how three formats are told apart and read.

`FORMATS_HELP` describes the formats, to readers of the command line too.

A block's id names its content at its place; what is reused is decided by whole prefixes (prompts.py), so an id may
occur behind different prefixes.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import json
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

FORMATS_HELP = """A trace is JSON Lines, gzipped or not. The first line tells the format:

mooncake       {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}: one request a line, blocks
               of 512 tokens. Timestamps sit on ticks of a few seconds; a request came at some moment inside its tick
claude_code    {"session": ..., "requests": [{"t", "think", "in", "out", "ids": [[first, last], ...]}]}: one session a
               line, blocks of 512 tokens as inclusive ranges of ids; `think` seconds pass before a request is sent
own            a trace of your own, one request a line (`warmgate replay`):
                 timestamp            seconds from the start
                 num_output_tokens    how long the answer is
                 prompt_ids           the prompt's token ids, or instead of them
                 block_ids            an id for each of the prompt's blocks, equal only where the texts are equal, and
                 num_prompt_tokens    the prompt's length
                 block_tokens         tokens a block (default 16; one value for the whole file)
                 session              optional: requests of one session follow each other
                 think_s              optional: seconds between the session's previous answer and this request
"""
FORMATS = ("mooncake", "claude_code", "own")
BLOCK_TOKENS = 512
OWN_BLOCK_TOKENS = 16


class BadTrace(ValueError):
    """The file can't be read as a trace; the message says where and why."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `block_ids` are those of its full blocks only.

    at_s      seconds from the trace's start (of its session, where sessions are what the trace records)
    tick_s    the request came somewhere in at_s .. at_s + tick_s
    think_s   seconds between the session's previous answer and this request
    output_block_ids
              the blocks that its answer fills, where a later prompt is known to hold them (outputs.py)
    """

    session: str
    at_s: float
    think_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...]
    tick_s: float = 0.0
    output_block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """`sessions`: requests in order. `timed`: `at_s` counts from the trace's start, so it can be replayed as is."""

    name: str
    format: str
    block_tokens: int
    sessions: tuple[tuple[TraceRequest, ...], ...]
    timed: bool

    @property
    def num_requests(self) -> int:
        return sum(len(session) for session in self.sessions)

    def requests(self) -> list[TraceRequest]:
        """All of them, in order of time (timed traces) or session by session."""
        flat = [request for session in self.sessions for request in session]
        return sorted(flat, key=lambda request: request.at_s) if self.timed else flat

    def fitting(self, max_model_len: int) -> Trace:
        """Without requests whose prompt and output a model of that length could not hold. A session goes on without
        them. Raises BadTrace when nothing is left."""
        sessions = []
        for session in self.sessions:
            kept = tuple(r for r in session if r.num_prompt_tokens + r.num_output_tokens <= max_model_len)
            if kept:
                sessions.append(kept)
        if not sessions:
            raise BadTrace(f"{self.name}: no request fits in {max_model_len} tokens")
        return replace(self, sessions=tuple(sessions))


def read_trace(path: Path, limit: int | None = None, max_model_len: int | None = None) -> Trace:
    """Reads a trace of any known format, at most `limit` requests of it. Raises BadTrace."""
    try:
        with _open(path) as file:
            trace = parse_trace(file, path.name, limit)
        return trace if max_model_len is None else trace.fitting(max_model_len)
    except (EOFError, zlib.error) as error:
        raise BadTrace(f"{path}: the compressed file is damaged or cut off: {error}") from None
    except UnicodeDecodeError:
        raise BadTrace(f"{path}: neither text in UTF-8 nor gzip") from None
    except OSError as error:
        raise BadTrace(f"{path}: {error.strerror or error}") from None


def parse_trace(lines: Iterable[str], name: str, limit: int | None = None) -> Trace:
    """The same from lines."""
    rows = _rows(lines, name)
    first = next(rows, None)
    if first is None:
        raise BadTrace(f"{name}: no requests in it")
    kind = detect(first.row)
    if kind is None:
        keys = ", ".join(sorted(first.row)) or "none"
        raise BadTrace(f"{name}: line {first.number} has the keys {keys}, which fits no known format")
    parse = {"mooncake": _mooncake, "claude_code": _claude_code, "own": _own}[kind]
    trace = parse(itertools.chain((first,), rows), name, limit)
    if not trace.sessions:
        raise BadTrace(f"{name}: no requests in it")
    return trace


def detect(first: dict[str, Any]) -> str | None:
    """The format by the keys of its first line."""
    if "requests" in first and "session" in first:
        return "claude_code"
    if {"hash_ids", "input_length", "output_length", "timestamp"} <= first.keys():
        return "mooncake"
    if "timestamp" in first and ("prompt_ids" in first or "block_ids" in first):
        return "own"
    return None


def _open(path: Path) -> io.TextIOBase:
    with path.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rt", encoding="utf-8") if zipped else path.open(encoding="utf-8")


class _Line(NamedTuple):
    number: int
    row: dict[str, Any]


def _rows(lines: Iterable[str], name: str) -> Iterator[_Line]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise BadTrace(f"{name}: line {number} is no JSON: {error}") from None
            if not isinstance(row, dict):
                raise BadTrace(f"{name}: line {number} is no JSON object")
            yield _Line(number, row)


@contextlib.contextmanager
def _reading(kind: str, name: str, line: _Line) -> Iterator[None]:
    """What is wrong with the line becomes one sentence that says where it is."""
    try:
        yield
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, KeyError):
            problem = f"{error.args[0]!r} is missing"
        else:
            problem = str(error)
        raise BadTrace(f"{name}: line {line.number} is not as format {kind} has it: {problem}") from None


def _number(row: dict[str, Any], key: str, default: float | None = None) -> float:
    value = row[key] if default is None else row.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{key!r} is {value!r}, and has to be a number")
    return float(value)


def _list(row: dict[str, Any], key: str) -> list[Any]:
    value = row[key]
    if not isinstance(value, list):
        raise ValueError(f"{key!r} has to be a list")
    return value


def _id(value: Any) -> int:
    """Of a block or a token."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{value!r} is no id: ids are whole numbers")
    return value


def _lengths(prompt: float, output: float) -> tuple[int, int]:
    if prompt < 1:
        raise ValueError(f"a prompt of {prompt:.0f} tokens")
    return int(prompt), max(int(output), 1)


def _mooncake(rows: Iterator[_Line], name: str, limit: int | None) -> Trace:
    read = []
    for line in itertools.islice(rows, limit):
        with _reading("mooncake", name, line):
            prompt, output = _lengths(_number(line.row, "input_length"), _number(line.row, "output_length"))
            ids = tuple([_id(block) for block in _list(line.row, "hash_ids")[: prompt // BLOCK_TOKENS]])
            read.append((_number(line.row, "timestamp") / 1000, prompt, output, ids))
    stamps = sorted({at for at, *_ in read})
    ticks = {a: b - a for a, b in pairwise(stamps)}
    usual = min(ticks.values(), default=0.0)
    requests = []
    for number, (at, prompt, output, ids) in enumerate(read):
        tick = min(ticks.get(at, usual), 2 * usual)  # after a gap in the trace a tick is not longer for it
        requests.append((TraceRequest(str(number), at, 0.0, prompt, output, ids, tick),))
    return Trace(name, "mooncake", BLOCK_TOKENS, tuple(requests), timed=True)


def _claude_code(rows: Iterator[_Line], name: str, limit: int | None) -> Trace:
    sessions, left = [], limit
    for line in rows:
        with _reading("claude_code", name, line):
            requests = [_turn(line.row, entry) for entry in _list(line.row, "requests")[:left]]
        if requests:
            sessions.append(tuple(requests))
        if left is not None:
            left -= len(requests)
            if not left:
                break
    return Trace(name, "claude_code", BLOCK_TOKENS, tuple(sessions), timed=False)


def _turn(session: dict[str, Any], entry: Any) -> TraceRequest:
    if not isinstance(entry, dict):
        raise ValueError("'requests' has to be a list of objects")
    prompt, output = _lengths(_number(entry, "in"), _number(entry, "out"))
    ids: list[int] = []
    for span in _list(entry, "ids"):
        if not isinstance(span, list) or len(span) != 2 or _id(span[0]) > _id(span[1]):
            raise ValueError(f"'ids' has {span!r}, which is no range [first, last]")
        ids.extend(range(span[0], min(span[1] + 1, span[0] + prompt // BLOCK_TOKENS - len(ids))))
    think_s = max(_number(entry, "think", 0.0), 0.0)  # recorded clocks may disagree
    at_s = _number(entry, "t", 0.0)
    return TraceRequest(str(session["session"]), at_s, think_s, prompt, output, tuple(ids[: prompt // BLOCK_TOKENS]))


def _own(rows: Iterator[_Line], name: str, limit: int | None) -> Trace:
    block_tokens = 0
    known: dict[tuple[int, ...], int] = {}
    read = []
    for line in itertools.islice(rows, limit):
        with _reading("own", name, line):
            if not block_tokens:
                block_tokens = int(_number(line.row, "block_tokens", OWN_BLOCK_TOKENS))
                if block_tokens < 1:
                    raise ValueError(f"'block_tokens' is {block_tokens}, and has to be 1 or more")
            read.append((_number(line.row, "timestamp"), line.number, _own_request(line, block_tokens, known)))
    sessions: dict[str, list[TraceRequest]] = {}
    for _, _, request in sorted(read, key=lambda entry: entry[:2]):
        sessions.setdefault(request.session, []).append(request)
    return Trace(name, "own", block_tokens, tuple(tuple(requests) for requests in sessions.values()), timed=True)


def _own_request(line: _Line, block_tokens: int, known: dict[tuple[int, ...], int]) -> TraceRequest:
    """`known`: the ids given so far to blocks that are written out."""
    row, num_output = line.row, _number(line.row, "num_output_tokens")
    if "prompt_ids" in row:
        tokens = [_id(token) for token in _list(row, "prompt_ids")]
        prompt, output = _lengths(len(tokens), num_output)
        full = range(0, prompt - prompt % block_tokens, block_tokens)
        ids = tuple([known.setdefault(tuple(tokens[i : i + block_tokens]), len(known)) for i in full])
    else:
        prompt, output = _lengths(_number(row, "num_prompt_tokens"), num_output)
        ids = tuple([_id(block) for block in _list(row, "block_ids")[: prompt // block_tokens]])
    session = str(row.get("session", f"#{line.number}"))
    think_s = max(_number(row, "think_s", 0.0), 0.0)
    return TraceRequest(session, _number(row, "timestamp"), think_s, prompt, output, ids)
