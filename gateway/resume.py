"""Going on with a broken answer on another replica (contract/resume.py has the protocol with bundled workers).

    off     never: what breaks after its first token ends in an error event
    exact   answers that are determined, greedy or seeded: another replica's continuation is the one that was cut off
    all     sampled ones as well: the rest is drawn anew, from the same distribution that it would have been drawn from

A transcript is what has to be known for it: the tokens that went into what the client has, which the scanner keeps, and
the ids that the stream began with. Only a replica whose worker says that it has the same model, tokenizer and version
may go on, chosen by the policy as ever. What the client sees of it is a comment, and nothing twice and nothing missing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from engine_worker.contract.resume import MARKS_HEADER, RESUME_PATH, ResumeOrder
from engine_worker.contract.work import work_line
from gateway.exchange import Exchange, Failure, body_for
from gateway.openai.marks import MarkedScanner, num_told, told_drafts, told_ids
from gateway.openai.sse import StreamScanner, events
from gateway.replicas.registry import Registry, Replica
from gateway.router import Lease, Router
from gateway.upstream import Target, UpstreamResponse
from policies.events import FailureKind
from policies.types import RouteRequest

ResumeMode = Literal["off", "exact", "all"]
MAX_RESUMES = 2
MAX_TOLD_BYTES = 4 * 1024 * 1024
_MAX_HEAD_BYTES = 64 * 1024


class _Head(msgspec.Struct, frozen=True):
    """What all events of a stream repeat."""

    id: str
    created: int
    model: str


@dataclass(slots=True, eq=False)
class Transcript:
    """What a client has of a marked stream.

    told           the tokens in it, as openai/marks.py keeps them
    head           the events that it began with
    fingerprint    of the worker that began it
    cached_tokens  of the prompt, as that worker found them
    num_resumes    continuations that were tried
    """

    told: bytearray
    head: bytes
    fingerprint: str
    cached_tokens: int | None
    num_resumes: int = 0

    @property
    def num_tokens(self) -> int:
        return num_told(self.told)

    def order(self, path: str, body: bytes) -> bytes | None:
        """What asks a worker for the rest of the answer to `body`; None where the stream doesn't say enough."""
        try:
            first = next(data for _, data in events(self.head, 0))
            head = msgspec.json.decode(first, type=_Head)
            ids, (drafts, accepted) = told_ids(self.told), told_drafts(self.told)
        except (StopIteration, ValueError, msgspec.DecodeError):
            return None
        return msgspec.json.encode(
            ResumeOrder(
                path=path,
                request=msgspec.Raw(body),
                id=head.id,
                created=head.created,
                model=head.model,
                output_ids=ids,
                cached_tokens=self.cached_tokens,
                draft_tokens=drafts,
                accepted_tokens=accepted,
            )
        )


def can_resume(transcript: Transcript | None, failure: Failure) -> bool:
    """Whether another replica may help. A request that is wrong, or whose time is up, is so everywhere."""
    if transcript is None or transcript.num_resumes >= MAX_RESUMES or len(transcript.told) > MAX_TOLD_BYTES:
        return False
    if failure.final or failure.kind is FailureKind.CANCELLED:
        return False
    return failure.kind is not FailureKind.REJECTED or failure.status in (408, 429) or failure.status >= 500


class Resumer:
    """What replicas are asked for so that streams can be continued, and where they are continued. `secret` is the
    workers'."""

    def __init__(self, mode: ResumeMode, secret: str | None, registry: Registry, router: Router) -> None:
        self._marks = b"" if mode == "off" else b"%b: %b\r\n" % (MARKS_HEADER, mode.encode())
        self._secret = b"" if secret is None else b"x-warmgate-secret: %b\r\n" % secret.encode("latin-1")
        self._registry = registry
        self._router = router

    def request(self, exchange: Exchange, lease: Lease) -> tuple[Target, bytes, bytes]:
        """Where, with which headers and with which body the replica is asked: for the answer, or for its rest."""
        parsed, replica, work_s = exchange.parsed, lease.replica, lease.decision.work_s
        headers = exchange.upstream_headers(replica.api_key)
        if replica.model_fingerprint:
            if work_s is not None:
                headers += work_line(work_s)
            if parsed.stream and parsed.num_choices == 1:
                headers += self._marks
        if not exchange.answer.started:
            return replica.target(exchange.path), headers, body_for(parsed, replica)
        return replica.target(RESUME_PATH), headers + self._secret, exchange.order

    def scanner(
        self, exchange: Exchange, replica: Replica, response: UpstreamResponse, max_event_bytes: int
    ) -> StreamScanner:
        parsed = exchange.parsed
        if replica.model_fingerprint and parsed.num_choices == 1 and response.header(MARKS_HEADER) is not None:
            told = exchange.transcript.told if exchange.transcript is not None else bytearray()
            return MarkedScanner(max_event_bytes, told, strip_usage=parsed.adds_usage)
        exchange.transcript = None  # what is relayed from now on is not known
        return StreamScanner(max_event_bytes, hold_end=parsed.num_choices == 1, strip_usage=parsed.adds_usage)

    def begun(self, exchange: Exchange, lease: Lease, scanner: StreamScanner, head: bytes, cached: int | None) -> None:
        """The first events `head` of an answer, or of its rest, are going out. Where another replica could go on with
        it, the request stays among those that are told when this one is stuck."""
        replica = lease.replica
        is_first = exchange.transcript is None and not exchange.answer.started
        if is_first and isinstance(scanner, MarkedScanner) and len(head) <= _MAX_HEAD_BYTES:
            exchange.transcript = Transcript(scanner.told, head, replica.model_fingerprint, cached)
        if exchange.transcript is None or not any(
            other is not replica and other.model_fingerprint == replica.model_fingerprint
            for other in self._registry.ready(exchange.record.model)
        ):
            replica.waiting.discard(exchange.guard)

    def elsewhere(self, exchange: Exchange, route: RouteRequest) -> RouteRequest | None:
        """Where the rest of the answer may come from, as a route; None where it can't be had."""
        transcript = exchange.transcript
        assert transcript is not None
        strangers = {r.replica_id for r in self._registry if r.model_fingerprint != transcript.fingerprint}
        route = replace(route, excluded=route.excluded | strangers)
        order = transcript.order(exchange.path, exchange.parsed.body)
        if order is None or not self._router.num_candidates(route):
            return None
        exchange.order = order
        transcript.num_resumes += 1
        return route
