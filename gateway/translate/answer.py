"""The answer to a translated request: an `Answer` that says in the client's shapes what the proxy says in chat's.

The proxy, its relay and its rules on failures know nothing of it. A stream's end is translated when [DONE] goes by,
which the relay lets through only when the stream was whole; an error event ends the stream in the client's shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from engine_worker.contract.errors import ApiError
from gateway.answer import Answer, Headers, Scope, Send
from gateway.observe.record import RequestRecord
from gateway.openai.errors import error_in, error_of
from gateway.openai.sse import SseError
from gateway.translate.chat import ChatAnswer, read_answer, read_chunks

_SSE = (b"content-type", b"text/event-stream; charset=utf-8")
_JSON = (b"content-type", b"application/json")
_NOT_CHAT = ApiError(502, "The replica's answer is not a chat completion.", code="replica_failed")


class Translation(Protocol):
    """One request's translation. `stream` is known once `request` has returned.

    `chunk` is called for each chunk of a stream, then `finished` or `failed` once; or `whole` once.
    """

    owner: str  # whose request it is; set before `request`

    @property
    def name(self) -> str: ...
    @property
    def stream(self) -> bool: ...

    def request(self, body: bytes) -> bytes:
        """The chat request for the client's body. Raises ApiError."""
        ...

    def chunk(self, chunk: ChatAnswer, record: RequestRecord) -> bytes: ...
    def finished(self) -> bytes: ...
    def failed(self, error: ApiError) -> bytes: ...
    def whole(self, answer: ChatAnswer) -> bytes: ...

    def raw(self, body: bytes) -> bytes | None:
        """The answer from a body that is no chat answer; None to have it read as one. Raises msgspec.DecodeError."""
        ...

    def error(self, error: ApiError, request_id: str) -> bytes:
        """The body of an error response."""
        ...


class TranslatedAnswer(Answer):
    """Raises SseError from `write` where the replica's words are not chat's."""

    __slots__ = ("_ended", "_record", "_translation")
    is_verbatim = False

    def __init__(self, scope: Scope, send: Send, translation: Translation, record: RequestRecord) -> None:
        super().__init__(scope, send)
        self._translation = translation
        self._record = record
        self._ended = False

    async def start(self, status: int, headers: Headers) -> None:
        # What clients of these APIs read in place of x-request-id.
        request_id = (b"request-id", self._record.request_id.encode("ascii"))
        await super().start(status, [*headers, request_id])

    async def write(self, data: bytes) -> None:
        out = self._translated(data)
        if out:
            await super().write(out)

    @property
    def push(self) -> Callable[[bytes], None]:
        return self._push

    def _push(self, data: bytes) -> None:
        out = self._translated(data)
        if out:
            super().push(out)

    async def end(self, data: bytes = b"") -> None:
        try:
            out = self._translated(data)
        except SseError:  # the exchange has ended for the proxy, so nobody else would say it
            out = self._translation.failed(_NOT_CHAT)
        await super().end(out)

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        if status >= 400:
            return await self._whole(status, headers, self._error_body(status, body))
        try:
            if (raw := self._translation.raw(body)) is not None:
                return await self._whole(status, headers, raw)
            answer = read_answer(body)
        except (SseError, msgspec.DecodeError):
            return await self._whole(502, headers, self._translation.error(_NOT_CHAT, self._record.request_id))
        if not self._translation.stream:
            return await self._whole(status, headers, self._translation.whole(answer))
        # A replica that doesn't stream: its answer as a stream of one chunk.
        out = self._translation.chunk(answer.streamed(), self._record) + self._translation.finished()
        await self.start(status, [_SSE, *(header for header in headers if header[0] != b"content-type")])
        await super().end(out)

    async def error(self, error: ApiError) -> None:
        if not self.started:
            await super().error(error)  # comes back through `whole`
        elif self._ended:
            await super().end()
        else:
            await super().end(self._translation.failed(error))

    async def _whole(self, status: int, headers: Headers, body: bytes) -> None:
        kept = [header for header in headers if header[0] != b"content-type"]
        await self.start(status, [*kept, _JSON, (b"content-length", b"%d" % len(body))])
        await super().end(body)

    def _error_body(self, status: int, body: bytes) -> bytes:
        return self._translation.error(error_in(body, status), self._record.request_id)

    def _translated(self, data: bytes) -> bytes:
        translation = self._translation
        out: list[bytes] = []
        for chunk in read_chunks(data):
            if self._ended:
                break
            if chunk is None:
                self._ended = True
                out.append(translation.finished())
            elif chunk.error is not None:
                self._ended = True
                out.append(translation.failed(error_of(chunk.error, 500)))
            else:
                out.append(translation.chunk(chunk, self._record))
        if not out and data.startswith(b":"):
            return b": ping\n\n"
        return b"".join(out)
