"""Speculation in the engine's loop: asks a drafter for guesses, hands them to the scheduler, learns from the outcome.

A drafter that computes nothing (n-grams) guesses first, and then it is decided how much of its guesses is worth trying.
One that computes (a draft model) is asked only for what is worth it, once there are KV slots for its guesses.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Sequence
from typing import Protocol

from engine_worker.core.scheduler import Scheduler
from engine_worker.core.speculation import SpeculationControl
from engine_worker.core.types import Request, StepPlan

_MAX_FAILURES = 3  # of the drafter in a row: from then on there is no speculation
_MEMORY = 0.9  # of the measured cost of a level of drafting


class Drafter(Protocol):
    """Guesses what requests will put out next. `needs_slots`: it needs block-table entries for its guesses."""

    name: str
    needs_slots: bool

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[tuple[int, ...]]: ...

    def release(self, request_id: str) -> None: ...


class Speculator:
    """Call `before_plan`, then plan; after the step ran `before_commit`, and after its commit `after_commit`."""

    def __init__(
        self, scheduler: Scheduler, drafter: Drafter, num_speculative_tokens: int, always: bool = False
    ) -> None:
        self._scheduler = scheduler
        self._drafter = drafter
        self._most = num_speculative_tokens
        self._control = SpeculationControl(always)
        self._depth_s = 0.0
        self._num_failures = 0  # of the drafter, in a row
        self._pending: list[tuple[Request, int, int]] = []

    @property
    def is_on(self) -> bool:
        """Whether it pays at present, as far as is known."""
        return self._control.is_on and self._num_failures < _MAX_FAILURES

    def before_plan(self) -> None:
        found = self._scheduler.can_speculate(self._most)
        if not found or self._num_failures >= _MAX_FAILURES:
            return
        num_decodes = len(found)
        num_queued = self._scheduler.stats().queued_prefill_tokens
        num_other = max(0, min(num_queued, self._scheduler.config.max_num_batched_tokens - num_decodes))
        if not self._drafter.needs_slots:
            guesses = self._drafter.propose(found)
            rooms = [(request.request_id, len(guess)) for (request, _), guess in zip(found, guesses, strict=True)]
            rooms = [(request_id, room) for request_id, room in rooms if room]
            depths = dict(zip((name for name, _ in rooms), self._depths(rooms, num_decodes, num_other), strict=True))
            guesses = [g[: depths.get(request.request_id, 0)] for (request, _), g in zip(found, guesses, strict=True)]
        else:
            rooms = [(request.request_id, room) for request, room in found]
            depths_found = self._depths(rooms, num_decodes, num_other)
            slots = [self._scheduler.reserve(r, d) if d else 0 for (r, _), d in zip(found, depths_found, strict=True)]
            found = [(request, n) for (request, _), n in zip(found, slots, strict=True) if n]
            guesses = self._draft(found)
        for (request, _), guess in zip(found, guesses, strict=True):
            if guess:
                self._scheduler.speculate(request, guess)

    def _depths(self, rooms: list[tuple[str, int]], num_decodes: int, num_other: int) -> list[int]:
        return self._control.depths(rooms, num_decodes, num_other, self._depth_s)

    def _draft(self, wanted: list[tuple[Request, int]]) -> list[tuple[int, ...]]:
        if not wanted:
            return []
        begin = time.perf_counter()
        try:
            guesses = self._drafter.propose(wanted)
        except Exception:  # guesses are a help, no need: an error in them fails nobody
            traceback.print_exc(file=sys.stderr)
            self._num_failures += 1
            return [()] * len(wanted)
        self._num_failures = 0
        cost = (time.perf_counter() - begin) / max(most for _, most in wanted)
        self._depth_s = cost if not self._depth_s else _MEMORY * self._depth_s + (1 - _MEMORY) * cost
        return guesses

    def before_commit(self, plan: StepPlan, seconds: float) -> None:
        """The plan ran in so many seconds."""
        self._control.costs.record(plan.num_tokens, seconds)
        self._pending = [
            (s.request, s.num_drafts, s.request.num_accepted_tokens) for s in plan.segments if s.num_drafts
        ]

    def after_commit(self) -> None:
        for request, num_drafts, before in self._pending:
            self._control.tried(request.request_id, num_drafts, request.num_accepted_tokens - before)
        self._pending = []

    def check_idle(self) -> None:
        """Asserts that nothing is remembered of any request."""
        assert self._control.num_requests == 0, "luck of a request that is over"
        assert getattr(self._drafter, "num_states", 0) == 0, "drafts of a request that is over"

    def release(self, request_id: str) -> None:
        self._control.release(request_id)
        self._drafter.release(request_id)
