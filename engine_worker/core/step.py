"""A plan in the making: what the scheduler has given out so far, and what is left to give.

Theory. All tokens of a step come out together, so whatever is added behind a prompt that the step completes delays that
prompt's first token by its own time, and gains what it adds no more than the fixed cost of the step that it would
otherwise have. A chunk of a long prompt, added to fill the step, gains nothing at all: its prompt isn't done by then.
So a step that completes a prompt takes no more of others, unless they are completed too and all are so short that
together they cost little more than the step itself: a few hundred tokens take a GPU about as long as reading the
weights does. The chunk comes in the next step, and those that decode get a token in between.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_worker.core.types import Request, Segment


@dataclass(slots=True)
class Step:
    """A plan in the making. `budget` is what is left of the tokens it may compute, `joint` how many tokens the prompts
    that it completes may have where there are several (0: no bound), `num_completing` how many they have."""

    budget: int
    joint: int = 0
    num_completing: int = 0
    segments: dict[str, Segment] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)

    def add(self, request: Request, end: int) -> None:
        start = request.num_computed
        token_ids, sample = request.token_ids(start, end), end == request.num_tokens
        self.segments[request.request_id] = Segment(
            request, start, token_ids, request.block_ids, sample, len(request.draft_ids), request.copy_from
        )
        self.budget -= end - start

    def takes(self, num_missing: int) -> bool:
        """Whether some of a prompt that lacks so many tokens may join what the step completes so far."""
        if not self.num_completing or not self.joint:
            return True
        return num_missing <= self.budget and self.num_completing + num_missing <= self.joint

    def add_prefill(self, request: Request, end: int) -> None:
        """`add`, of a prompt's tokens."""
        if end == request.num_tokens:
            self.num_completing += end - request.num_computed
        self.add(request, end)

    def drop(self, victim: Request) -> None:
        """Takes back what the victim was given, and notes that it was preempted."""
        segment = self.segments.pop(victim.request_id, None)
        if segment is not None:
            self.budget += len(segment.token_ids)
        self.preempted.append(victim.request_id)
