"""What the processes behind one port (processes.py) ask each other: figures and orders concern all of them, whichever
of them a scraper or an administrator reaches.

Each serves the same application on a Unix socket, too. A request that comes with `?process=own` is answered by the one
process alone, all others by the one that got it and its siblings together.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from pathlib import Path
from typing import Any

import httpx
import msgspec
from starlette.requests import Request

from engine_worker.contract.errors import ApiError
from gateway.observe.merge import Tally, merged
from gateway.observe.watched import Told, Watched
from gateway.orders import OrderBook
from gateway.processes import Place

_log = logging.getLogger("warmgate")
OWN = "own"
_ANSWER_S = 2.0
_PID_HEADER = "x-warmgate-pid"
_TALLY = msgspec.json.Decoder(Tally)


class Siblings:
    """The other processes, as seen by the one in `place`."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.count = place.count
        self.orders = OrderBook(place.folder)

    def concerns_all(self, request: Request) -> bool:
        return request.query_params.get("process") != OWN

    async def metrics(self, own: bytes) -> bytes:
        """The figures of all processes as one's. Counters don't fall when a process dies: what it had counted when it
        was last asked is kept in a file beside the sockets."""
        texts = {self._place.number: (os.getpid(), own.decode())}
        for number, answer in (await self._ask("GET", "/metrics", {}, {})).items():
            if isinstance(answer, httpx.Response) and answer.status_code == 200:
                texts[number] = (int(answer.headers[_PID_HEADER]), answer.text)
        return await asyncio.to_thread(_with_tally, self._place.folder / "tally.json", texts)

    async def watched(self) -> list[Watched]:
        """What the shadow policies of those siblings have seen that answer."""
        answers = (await self._ask("GET", "/advice", {}, {})).values()
        told = [each.content for each in answers if isinstance(each, httpx.Response) and each.status_code == 200]
        return [msgspec.json.decode(content, type=Told).sums for content in told]

    async def repeat(self, request: Request) -> list[dict[str, Any]]:
        """The same order to every sibling; their answers. Raises ApiError(503) where one did not take it."""
        secret = {"x-warmgate-secret": request.headers.get("x-warmgate-secret", "")}
        answers = await self._ask(request.method, request.url.path, dict(request.query_params), secret)
        told = []
        for number, answer in answers.items():
            if not isinstance(answer, httpx.Response) or answer.status_code != 200:
                message = f"Process {number} of this gateway did not take the order; the others did. Try again."
                raise ApiError(503, message, code="process_unreachable", retry_after_s=1.0)
            told.append(msgspec.json.decode(answer.content, type=dict[str, Any]))
        return told

    async def _ask(
        self, method: str, path: str, query: dict[str, str], headers: dict[str, str]
    ) -> dict[int, httpx.Response | BaseException]:
        others = [number for number in range(self._place.count) if number != self._place.number]
        asked = [self._ask_one(number, method, path, {**query, "process": OWN}, headers) for number in others]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return dict(zip(others, answers, strict=True))

    async def _ask_one(
        self, number: int, method: str, path: str, query: dict[str, str], headers: dict[str, str]
    ) -> httpx.Response:
        transport = httpx.AsyncHTTPTransport(uds=self._place.path_of(number), verify=False)  # no TLS on this socket
        async with httpx.AsyncClient(transport=transport, timeout=_ANSWER_S, trust_env=False) as client:
            return await client.request(method, f"http://process{path}", params=query, headers=headers)


def pid_header() -> dict[str, str]:
    return {_PID_HEADER: str(os.getpid())}


def _with_tally(path: Path, texts: dict[int, tuple[int, str]]) -> bytes:
    """A disk that is full costs what dead processes had counted, not the figures of those that live."""
    try:
        with open(path, "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            tally = _stored(file.read())
            text = merged(texts, tally)
            file.seek(0)
            file.truncate()
            file.write(msgspec.json.encode(tally))
    except OSError as error:
        _log.warning("what processes had counted can't be kept in %s: %s", path, error.strerror)
        text = merged(texts, Tally())
    return text.encode()


def _stored(data: bytes) -> Tally:
    try:
        return _TALLY.decode(data) if data else Tally()
    except msgspec.DecodeError:  # cut off: its writer was killed, or the disk was full
        return Tally()
