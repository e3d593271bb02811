"""A plan in the making: what the scheduler has given out so far, and what is left to give."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_worker.core.types import Request, Segment


@dataclass(slots=True)
class Step:
    """A plan in the making. `budget` is what is left of the tokens it may compute."""

    budget: int
    segments: dict[str, Segment] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)

    def add(self, request: Request, end: int) -> None:
        start = request.num_computed
        token_ids, sample = request.token_ids(start, end), end == request.num_tokens
        num_drafts = len(request.draft_ids)
        self.segments[request.request_id] = Segment(request, start, token_ids, request.block_ids, sample, num_drafts)
        self.budget -= end - start

    def drop(self, victim: Request) -> None:
        """Takes back what the victim was given, and notes that it was preempted."""
        segment = self.segments.pop(victim.request_id, None)
        if segment is not None:
            self.budget += len(segment.token_ids)
        self.preempted.append(victim.request_id)
