"""Requests that wait for admission, within a priority (a lower number goes first) in the order of

    arrival_s + work_s * (share of its uncached prompt that is left) / AGING

Where nothing is known of their work that is first come, first served. A gateway that knows how much of a prompt is
cached tells the prefill seconds that it expects, and then the shortest goes first, which keeps the mean wait shortest
(Smith, 1956). It ages: a second of work is worth 20 of waiting, so nobody waits for ever behind those who come later.
A made-up number gains nothing: without work a request has its place by arrival, and never a better one.

A long prompt moves up with each chunk of it that is computed (the scheduler asks for its key anew): one that is nearly
through isn't interrupted for another that takes nearly as long as it did, which would help neither's mean (Schrage,
1968). A preempted request has to be computed again and comes back under its first key, so it waits at its old place.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from engine_worker.core.types import Request

AGING = 0.05  # seconds of work that a second of waiting is worth

Key = tuple[int, float, int]  # (priority, place in time, order of arrival here)


def key_of(request: Request, number: int) -> Key:
    """Its place in the order, as far as it is computed. `number`: of requests that came before it."""
    work_s = request.work_s
    if work_s and request.num_cached_tokens is not None:
        num_uncached = max(len(request.prompt_ids) - request.num_cached_tokens, 1)
        work_s *= min((request.num_known_tokens - request.num_computed) / num_uncached, 1.0)
    return request.priority, request.arrival_s + work_s / AGING, number


@dataclass(frozen=True, slots=True)
class _Waiting:
    key: Key
    request: Request
    num_uncached: int  # as expected when it was queued


class WaitingQueue:
    """Sorted by key. `num_uncached_tokens` sums what the waiting requests are expected to have to compute."""

    def __init__(self) -> None:
        self._entries: list[_Waiting] = []
        self.num_uncached_tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        """In order of admission. The queue must not change meanwhile."""
        return (entry.request for entry in self._entries)

    def has_any(self, before: Key | None = None) -> bool:
        """Whether anybody waits; with `before`, anybody whose key comes before it."""
        return bool(self._entries) and (before is None or self._entries[0].key < before)

    def add(self, request: Request, key: Key, num_uncached: int) -> None:
        insort(self._entries, _Waiting(key, request, num_uncached), key=lambda entry: entry.key)
        self.num_uncached_tokens += num_uncached

    def remove(self, request: Request, key: Key) -> None:
        index = bisect_left(self._entries, key, key=lambda entry: entry.key)
        entry = self._entries[index]
        assert entry.request is request, f"{request.request_id} does not wait"
        del self._entries[index]
        self.num_uncached_tokens -= entry.num_uncached

    def check_invariants(self) -> None:
        keys = [entry.key for entry in self._entries]
        assert keys == sorted(set(keys)), "the queue is out of order"
        assert self.num_uncached_tokens == sum(entry.num_uncached for entry in self._entries)
