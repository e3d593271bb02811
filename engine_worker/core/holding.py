"""Who isn't admitted yet, since another is computing the same tokens: they will be a hit when it is through.

Theory. Copies of a prompt that come together, the branches of a search, or the first users of a new system prompt all
miss the cache at once, and each would compute what all begin with. A prompt shares blocks with a prefill under way if
the next block that it lacks is the very block that the prefill computes next: names are those of whole prefixes. Both
lack the same tokens from there on, so waiting for them takes the other no longer than computing them would take this
one, and then nobody computes them twice. It may even be admitted ahead of the prefill (it counts as short, when whoever
sent it expected the hit) and is then no better off: it would compute those tokens itself.

But a prefill's step goes on behind what both share. Where it is in the coming step anyway, all tokens of that come out
together, and waiting costs what a step costs besides its tokens, once for each new prefix. Where the prompt would go
first, it waits only if the step that it waits for is at most twice what it would compute itself. And it waits only for
one that gets on: if the prefill stalls, it doesn't. To see that they wait, their tokens are hashed: no more of them are
looked at in a step than can run at once, for hundreds of long copies would hold up all that decode.
Sharing what is under way is SGLang's in-batch prefix caching and vLLM's caching at allocation, done by waiting.

Followers (n > 1) wait for their leader's whole prompt, which is theirs.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine_worker.core.kv_manager import KVCacheManager
from engine_worker.core.step import Step
from engine_worker.core.types import BlockHash, Request, RequestStatus


class Leaders:
    """Followers' leaders, of those that had one when they were added."""

    def __init__(self) -> None:
        self._leaders: dict[str, Request] = {}

    def add(self, request: Request, leader: Request | None) -> None:
        if leader is not None and leader is not request:
            self._leaders[request.request_id] = leader

    def forget(self, request: Request) -> None:
        self._leaders.pop(request.request_id, None)

    def hold(self, request: Request) -> bool:
        """Whether its leader is on the way to computing the prompt that both share."""
        leader = self._leaders.get(request.request_id)
        if leader is None or leader.status is RequestStatus.FINISHED:
            return False
        return leader.num_computed < len(leader.prompt_ids)

    def check_invariants(self, request_ids: Iterable[str]) -> None:
        assert self._leaders.keys() <= set(request_ids), "the leader of a request that is over"


class Awaited:
    """What prefills under way compute next, for one round of admissions to `step`."""

    def __init__(self, kv: KVCacheManager, running: Iterable[Request], step: Step) -> None:
        self._kv = kv
        self._step = step
        self._prefills: dict[BlockHash, Request] = {}  # by the name of the next block
        self.num_held = 0
        for request in running:
            if request.num_known_tokens - request.num_computed > 1:
                self.add(request)

    def add(self, request: Request) -> None:
        """A prefill under way, or one just admitted."""
        index, size = request.num_computed // self._kv.block_size, self._kv.block_size
        if (index + 1) * size <= request.num_tokens and (names := self._kv.names(request, index + 1)):
            self._prefills.setdefault(names[index], request)

    def hold(self, request: Request) -> bool:
        """Whether to wait for one of them."""
        if not self._prefills or request.skips_cache_reads:
            return False
        index = len(self._kv.lookup(request))
        most = (request.num_tokens - 1) // self._kv.block_size
        names = self._kv.names(request, index + 1) if index < most else []
        other = self._prefills.get(names[index]) if names else None
        if other is None:
            return False
        if other.request_id not in self._step.segments:
            chunk = min(self._step.budget, other.num_tokens - other.num_computed)
            if 2 * self._num_shared_tokens(request, other, index) < chunk:
                return False
        self.num_held += 1
        return True

    def _num_shared_tokens(self, request: Request, other: Request, index: int) -> int:
        """How many tokens in whole blocks, from block `index` on, `other` computes next and the request lacks."""
        size = self._kv.block_size
        end = min((request.num_tokens - 1) // size, other.num_tokens // size)
        while index < end and self._kv.names(request, index + 1)[index] == self._kv.names(other, index + 1)[index]:
            index += 1
        return index * size - other.num_computed
