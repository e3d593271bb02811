"""What no policy can beat: hit ratios of a cache for the same requests in the same order.

In a closed loop that order depends on the policy; the bounds shown are those of the pooled run where there is one.

infinite  nothing is ever evicted
lru       one cache of all replicas' blocks; the least recently used goes, of one prompt the tail before the root
belady    the same size, and what goes is what is needed again last (never again first): no rule evicts better

All three count what a prefix cache can use: the leading blocks that are there, no more than leaves one token to
compute. Requests follow each other without overlapping, answers take room only where a later prompt is known to hold
them, and a prompt larger than the cache holds what fits of it. They are bounds on hits, not on seconds; the pooled
simulation is the one on seconds.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.sim.prompts import BlockName, PromptBook
from loadtest.sim.trace import TraceRequest

NEVER = 1 << 60


@dataclass(frozen=True, slots=True)
class Bounds:
    """Hit ratios in tokens, 0 to 1."""

    infinite: float
    lru: float
    belady: float


def bounds(requests: Sequence[TraceRequest], book: PromptBook, num_blocks: int, block_tokens: int) -> Bounds:
    """For `requests` in this order and one cache of `num_blocks`."""
    prompts = [book.names(request.block_ids + request.output_block_ids) for request in requests]
    total = sum(request.num_prompt_tokens for request in requests)
    most = [min((r.num_prompt_tokens - 1) // block_tokens, len(r.block_ids)) for r in requests]
    if not total:
        return Bounds(0.0, 0.0, 0.0)

    def ratio(hits: Sequence[int]) -> float:
        return sum(min(h, m) for h, m in zip(hits, most, strict=True)) * block_tokens / total

    return Bounds(ratio(infinite(prompts)), ratio(lru(prompts, num_blocks)), ratio(belady(prompts, num_blocks)))


def infinite(prompts: Sequence[Sequence[BlockName]]) -> list[int]:
    """Leading blocks of each prompt that an earlier one had."""
    seen: set[BlockName] = set()
    hits = []
    for prompt in prompts:
        hits.append(_leading(prompt, seen))
        seen.update(prompt[hits[-1] :])
    return hits


def lru(prompts: Sequence[Sequence[BlockName]], num_blocks: int) -> list[int]:
    """Leading blocks of each prompt found in an LRU of `num_blocks`."""
    cache: OrderedDict[BlockName, None] = OrderedDict()
    hits = []
    for prompt in prompts:
        hits.append(_leading(prompt, cache))
        for name in reversed(prompt):
            cache[name] = None
            cache.move_to_end(name)
        while len(cache) > num_blocks:
            cache.popitem(last=False)
    return hits


def belady(prompts: Sequence[Sequence[BlockName]], num_blocks: int) -> list[int]:
    """Leading blocks of each prompt found when the block needed last is evicted. A child is never needed before its
    parent, so what is held stays whole prefixes."""
    following = _next_uses(prompts)
    cache: dict[BlockName, int] = {}  # block -> when it is needed next
    heap: list[tuple[int, int, int, BlockName]] = []
    number, hits = 0, []
    for prompt, needed in zip(prompts, following, strict=True):
        hits.append(_leading(prompt, cache))
        for depth, (name, when) in enumerate(zip(prompt, needed, strict=True)):
            if when == NEVER:
                cache.pop(name, None)
                continue
            cache[name] = when
            number += 1
            heapq.heappush(heap, (-when, -depth, number, name))
        while len(cache) > num_blocks:
            when, _, _, name = heapq.heappop(heap)
            if cache.get(name) == -when:
                del cache[name]
    return hits


def _next_uses(prompts: Sequence[Sequence[BlockName]]) -> list[list[int]]:
    last: dict[BlockName, int] = {}
    found: list[list[int]] = []
    for index in range(len(prompts) - 1, -1, -1):
        prompt = prompts[index]
        found.append([last.get(name, NEVER) for name in prompt])
        for name in prompt:
            last[name] = index
    found.reverse()
    return found


def _leading(
    prompt: Sequence[BlockName], held: OrderedDict[BlockName, None] | dict[BlockName, int] | set[BlockName]
) -> int:
    for index, name in enumerate(prompt):
        if name not in held:
            return index
    return len(prompt)
