"""Reading an answer strictly and saying how it ended: against the truth, token by token. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from loadtest.chaos.asks import Ask, Truth

_NUMBERED = re.compile(r" (q\d+)t(\d+)")


class Ending(StrEnum):
    """How a try ended; exactly one each.

    COMPLETED     a whole answer: finish_reason, and [DONE] if it was streamed
    REJECTED      an error status, before any token
    FAILED        tokens, then an error event and no finish_reason
    LEFT          the client closed the connection, as it meant to
    GATEWAY_LOST  the connection broke or was refused, and the gateway's process had been ended
    UNFINISHED    none of these: the connection ended, or nothing came for too long
    """

    COMPLETED = "completed"
    REJECTED = "rejected"
    FAILED = "failed"
    LEFT = "left"
    GATEWAY_LOST = "gateway_lost"
    UNFINISHED = "unfinished"


@dataclass(slots=True, eq=False)
class Reading:
    """What one answer's body has said so far. `faults` are breaches of the protocol."""

    is_chat: bool
    stream: bool
    parts: list[str] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    faults: list[str] = field(default_factory=list)
    _rest: bytes = b""

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def feed(self, data: bytes) -> None:
        """The next bytes of the body."""
        self._rest += data
        if not self.stream:
            return
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._event(line[5:].strip())
            elif line and not line.startswith(b":"):
                self.faults.append(f"a line that is no event: {line[:80]!r}")

    def close(self, status: int) -> None:
        """The body has ended properly."""
        if self.stream and status == 200:
            if self._rest:
                self.faults.append(f"the body ends inside an event: {self._rest[:80]!r}")
            return
        try:
            self._frame(msgspec.json.decode(self._rest), whole=True)
        except msgspec.DecodeError as error:
            self.faults.append(f"the body is not JSON ({error})")

    def _event(self, data: bytes) -> None:
        if self.done or self.error is not None:
            self.faults.append("an event after the last one")
        if data == b"[DONE]":
            self.done = True
            return
        try:
            self._frame(msgspec.json.decode(data), whole=False)
        except msgspec.DecodeError as error:
            self.faults.append(f"an event is not JSON ({error})")

    def _frame(self, frame: Any, whole: bool) -> None:
        if not isinstance(frame, dict):
            self.faults.append("a frame is no object")
            return
        if "error" in frame:
            self.error = frame["error"]
            if set(frame["error"]) < {"message", "type", "param", "code"}:
                self.faults.append("an error without its four keys")
            return
        if frame.get("usage"):
            self.usage = frame["usage"]
        for choice in frame.get("choices", ()):
            if text := self._text(choice, whole):
                if self.finish_reason is not None:
                    self.faults.append("text after the finish_reason")
                self.parts.append(text)
                self.num_tokens += 1
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def _text(self, choice: dict[str, Any], whole: bool) -> str:
        if not self.is_chat:
            return choice.get("text") or ""
        return choice.get("message" if whole else "delta", {}).get("content") or ""


def judge(ask: Ask, status: int, reading: Reading, ended_well: bool) -> tuple[Ending, list[str]]:
    """How an answer that the client waited for ended, and what is wrong with it. `ended_well`: its framing is whole."""
    faults = list(reading.faults)
    if not ended_well or not status:
        wrong = mismatch(reading.text, ask.truth, whole=False) if status == 200 and ask.stream else None
        return Ending.UNFINISHED, faults + ([wrong] if wrong else [])
    if status != 200:
        if reading.error is None:
            faults.append(f"status {status} without an error object")
        return Ending.REJECTED, faults
    if reading.error is not None:
        if reading.finish_reason is not None or reading.done:
            faults.append("an error event beside a finish_reason or [DONE]")
        if not reading.parts:
            faults.append("status 200 and an error before the first token")
        if wrong := mismatch(reading.text, ask.truth, whole=False):
            faults.append(wrong)
        return Ending.FAILED, faults
    if reading.finish_reason is None or (ask.stream and not reading.done):
        return Ending.UNFINISHED, faults
    if wrong := mismatch(reading.text, ask.truth, whole=True):
        faults.append(wrong)
    faults += _usage_faults(ask, reading)
    return Ending.COMPLETED, faults


def _usage_faults(ask: Ask, reading: Reading) -> list[str]:
    wanted = not ask.stream or (ask.body.get("stream_options") or {}).get("include_usage", False)
    if reading.usage is None:
        return ["no usage though it was asked for"] if wanted else []
    if not wanted:
        return ["usage though it wasn't asked for"]
    counted = reading.usage.get("completion_tokens")
    if ask.truth.num_tokens is not None and counted != ask.truth.num_tokens:
        return [f"usage says {counted} tokens of {ask.truth.num_tokens}"]
    return []


def mismatch(text: str, truth: Truth, whole: bool) -> str | None:
    """What is wrong with `text` as the answer (`whole`) or as its beginning; None: nothing. Numbered tokens tell in
    which way it is wrong."""
    if text == truth.text if whole else truth.text.startswith(text):
        return None
    wanted, got = _NUMBERED.findall(truth.text), _NUMBERED.findall(text)
    if not wanted:
        at = next((i for i, (a, b) in enumerate(zip(text, truth.text, strict=False)) if a != b), len(text))
        return f"wrong text from character {at}: {text[at : at + 40]!r} for {truth.text[at : at + 40]!r}"
    if any(tag != wanted[0][0] for tag, _ in got):
        return "tokens of another request"
    numbers = [int(number) for _, number in got]
    if len(set(numbers)) < len(numbers):
        return f"doubled tokens: {numbers}"
    if numbers != sorted(numbers):
        return f"reordered tokens: {numbers}"
    return f"lost tokens: {numbers} of {len(wanted)}"
