"""A request's hold on a replica: from its dispatch until it is over."""

from __future__ import annotations

from dataclasses import dataclass

from policies.cost import DEFAULT_RATES
from policies.types import PrefixChain, Rates, ReplicaId


@dataclass(init=False, slots=True)
class Lease:
    """A request on a replica (made as types.py says).

    num_held_blocks, num_sure_blocks
                         leading blocks thought held, and confirmed, there when it was dispatched
    num_uncached_tokens  of the prompt, by what it was thought to match
    num_blocks           that the prompt takes: the full ones and the one begun
    place                its order in the replica's line, and
    left_s               the seconds of its prefill that were left when it last was the first there (work_clock.py)
    rates                what the replica was expected to take when it came
    overtaken            a later one's first token came before its own
    interrupted          it was being computed when another was to be computed first
    unreported           dispatched since the replica's last report
    """

    request_id: str
    replica_id: ReplicaId
    chain: PrefixChain
    matched_tokens: int
    num_held_blocks: int
    num_sure_blocks: int
    prefill_s: float
    dispatched_at: float
    streamed: bool
    first_token_at: float | None
    overtaken: bool
    interrupted: bool
    unreported: bool
    num_uncached_tokens: int
    num_blocks: int
    rates: Rates
    place: float
    left_s: float

    def __init__(
        self,
        request_id: str,
        replica_id: ReplicaId,
        chain: PrefixChain,
        matched_tokens: int,
        num_held_blocks: int,
        num_sure_blocks: int,
        prefill_s: float,
        dispatched_at: float,
        streamed: bool = True,
        rates: Rates = DEFAULT_RATES,
    ) -> None:
        self.request_id = request_id
        self.replica_id = replica_id
        self.chain = chain
        self.matched_tokens = matched_tokens
        self.num_held_blocks = num_held_blocks
        self.num_sure_blocks = num_sure_blocks
        self.prefill_s = prefill_s
        self.dispatched_at = dispatched_at
        self.streamed = streamed
        self.first_token_at = None
        self.overtaken = False
        self.interrupted = False
        self.unreported = True
        self.num_uncached_tokens = chain.num_tokens - matched_tokens
        self.num_blocks = len(chain.keys) + 1
        self.rates = rates
        self.place = dispatched_at
        self.left_s = prefill_s

    def take_sure_blocks(self) -> int:
        """The sure ones that can be reused: an engine computes at least the last token, so never the last block of an
        even prompt. They are judged once."""
        num_sure, self.num_sure_blocks = self.num_sure_blocks, 0
        return min(num_sure, (self.chain.num_tokens - 1) // max(self.chain.block_tokens, 1))
