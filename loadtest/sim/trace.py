"""Request traces: what they say about a request, and how three formats are told apart and read.

`FORMATS_HELP` describes the formats, to readers of the command line too.

A block's id names its content at its place; what is reused is decided by whole prefixes (prompts.py), so an id may
occur behind different prefixes.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

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
    except OSError as error:
        raise BadTrace(f"{path}: {error.strerror or error}") from None


def parse_trace(lines: Iterable[str], name: str, limit: int | None = None) -> Trace:
    """The same from lines."""
    rows = _rows(lines, name)
    first = next(rows, None)
    if first is None:
        raise BadTrace(f"{name}: no requests in it")
    kind = detect(first)
    if kind is None:
        raise BadTrace(f"{name}: line 1 has the keys {', '.join(sorted(first)) or 'none'}, which fits no known format")
    parse = {"mooncake": _mooncake, "claude_code": _claude_code, "own": _own}[kind]
    try:
        return parse(_chained(first, rows), name, limit)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, BadTrace):
            raise
        raise BadTrace(f"{name}: not as format {kind} has it: {type(error).__name__} {error}") from None


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


def _rows(lines: Iterable[str], name: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise BadTrace(f"{name}: line {number} is no JSON: {error}") from None
            if not isinstance(row, dict):
                raise BadTrace(f"{name}: line {number} is no JSON object")
            yield row


def _chained(first: dict[str, Any], rest: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield first
    yield from rest


def _limited(rows: Iterator[dict[str, Any]], limit: int | None) -> Iterator[dict[str, Any]]:
    for count, row in enumerate(rows):
        if limit is not None and count >= limit:
            return
        yield row


def _lengths(prompt: int, output: int) -> tuple[int, int]:
    if prompt < 1:
        raise ValueError(f"a prompt of {prompt} tokens")
    return int(prompt), max(int(output), 1)


def _mooncake(rows: Iterator[dict[str, Any]], name: str, limit: int | None) -> Trace:
    entries = list(_limited(rows, limit))
    stamps = sorted({entry["timestamp"] / 1000 for entry in entries})
    ticks = {a: b - a for a, b in pairwise(stamps)}
    usual = min(ticks.values(), default=0.0)
    requests = []
    for number, entry in enumerate(entries):
        prompt, output = _lengths(entry["input_length"], entry["output_length"])
        ids = tuple(entry["hash_ids"][: prompt // BLOCK_TOKENS])
        at = entry["timestamp"] / 1000
        tick = min(ticks.get(at, usual), 2 * usual)  # after a gap in the trace a tick is not longer for it
        requests.append((TraceRequest(str(number), at, 0.0, prompt, output, ids, tick),))
    return Trace(name, "mooncake", BLOCK_TOKENS, tuple(requests), timed=True)


def _claude_code(rows: Iterator[dict[str, Any]], name: str, limit: int | None) -> Trace:
    sessions, count = [], 0
    for row in rows:
        requests = []
        for entry in row["requests"]:
            prompt, output = _lengths(entry["in"], entry["out"])
            ids: list[int] = []
            for first, last in entry["ids"]:
                ids.extend(range(first, last + 1))
            request = TraceRequest(
                row["session"],
                float(entry["t"] or 0.0),
                float(entry["think"] or 0.0),
                prompt,
                output,
                tuple(ids[: prompt // BLOCK_TOKENS]),
            )
            requests.append(request)
            count += 1
            if count == limit:
                break
        if requests:
            sessions.append(tuple(requests))
        if count == limit:
            break
    return Trace(name, "claude_code", BLOCK_TOKENS, tuple(sessions), timed=False)


def _own(rows: Iterator[dict[str, Any]], name: str, limit: int | None) -> Trace:
    entries = list(_limited(rows, limit))
    block_tokens = int(entries[0].get("block_tokens", OWN_BLOCK_TOKENS))
    known: dict[tuple[int, ...], int] = {}
    sessions: dict[str, list[TraceRequest]] = {}
    for number, entry in enumerate(sorted(entries, key=lambda entry: float(entry["timestamp"]))):
        if "prompt_ids" in entry:
            tokens = [int(token) for token in entry["prompt_ids"]]
            prompt, output = _lengths(len(tokens), entry["num_output_tokens"])
            full = range(0, prompt - prompt % block_tokens, block_tokens)
            ids = tuple(known.setdefault(tuple(tokens[i : i + block_tokens]), len(known)) for i in full)
        else:
            prompt, output = _lengths(entry["num_prompt_tokens"], entry["num_output_tokens"])
            ids = tuple(int(block) for block in entry["block_ids"][: prompt // block_tokens])
        session = str(entry.get("session", f"#{number}"))
        think_s = float(entry.get("think_s", 0.0))
        request = TraceRequest(session, float(entry["timestamp"]), think_s, prompt, output, ids)
        sessions.setdefault(session, []).append(request)
    return Trace(name, "own", block_tokens, tuple(tuple(requests) for requests in sessions.values()), timed=True)
