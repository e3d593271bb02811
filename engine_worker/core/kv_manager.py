"""The paged KV cache seen by the scheduler: block tables, prefix hits, and the events about them.

The manager owns the block pool and the block table of every request that was admitted (`Request.block_ids`). A
request's life here::

    find     the longest cached prefix, if there is room for the request, without changing anything
    admit    takes that prefix's blocks, so num_computed starts behind them
    allocate blocks for the positions that the coming step computes
    commit   the step ran: num_computed advances, and full blocks become reusable under their hash
    free     drops the table (preempted); forget: also the remembered hashes (finished)

Two rules keep hits true. A hit covers at most num_tokens - 1 tokens, so the last one is always computed and gives
logits. A block gets its hash only in `commit`, after its KV was computed. Output tokens are hashed like prompt tokens,
so the next turn of a conversation hits the answer, too.

With `enable_partial_hits` a hit goes on behind its whole blocks, where another block has the same tokens next
(parts.py). They are copied: the request gets a block of its own, num_computed starts behind them, and the step's runner
moves the rows before anything else (`Request.copy_from`). The source is held until that step is committed, or the
request lets go of its table. Events, and what others are told of the cache, are about whole blocks only.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine_worker.core import block_pool
from engine_worker.core.block_pool import BlockPool, Registered
from engine_worker.core.chains import BlockTokens, Chain, Hit
from engine_worker.core.events import AllBlocksCleared, BlocksRemoved, BlocksStored, KVEvent
from engine_worker.core.parts import OpenBlocks
from engine_worker.core.types import BlockHash, BlockId, Request


class KVCacheManager:
    """`num_blocks` blocks of `block_size` tokens. `cache_root` names model, weights, dtype and KV format.

    With `enable_prefix_caching` off nothing is ever a hit and there are no events. `enable_kv_events` off keeps none;
    otherwise whoever drives this must take them regularly. `enable_partial_hits` is for runners that copy.

    prefix_cache_queries, prefix_cache_hits
                    tokens looked up at first admissions, and those of them that were found (cumulative)
    num_copied_tokens
                    of the latter, those in parts of blocks
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        cache_root: bytes,
        enable_prefix_caching: bool = True,
        enable_kv_events: bool = True,
        enable_partial_hits: bool = False,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {block_size}")
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.num_copied_tokens = 0
        with_parts = enable_prefix_caching and enable_partial_hits
        self._pool = BlockPool(num_blocks, with_parts)
        self._open = OpenBlocks() if with_parts else None
        self._cache_root = cache_root
        self._record = enable_prefix_caching and enable_kv_events
        self._chains: dict[str, Chain] = {}
        self._events: list[KVEvent] = []

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks in no table, those with a cached prefix included."""
        return self._pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        return self._pool.num_cached

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` positions take."""
        return -(-num_tokens // self.block_size)

    def most_cacheable(self, num_tokens: int) -> int:
        """The longest hit, in tokens, that a sequence of `num_tokens` could have."""
        return (num_tokens - 1) // self.block_size * self.block_size if self.enable_prefix_caching else 0

    def lookup(self, request: Request) -> list[BlockId]:
        """The cached blocks of the request's longest cached prefix, first to last. Changes nothing but its hashes."""
        hit: list[BlockId] = []
        if not self.enable_prefix_caching or request.skips_cache_reads:
            return hit
        chain = self._chain(request)
        most = (request.num_tokens - 1) // self.block_size
        while True:
            known = min(len(chain.hashes), most)
            start = len(hit)
            hit += self._pool.find_all(chain.parent(start), chain.hashes[start:known], chain.token_ids[start:known])
            if len(hit) < known or known == most:
                return hit
            self._extend(chain, request, known + 1)  # one at a time: hashes behind a miss would be of no use yet

    def find(self, request: Request, num_reserved: int) -> Hit | None:
        """The longest hit; None while not all of the request's tokens fit beside `num_reserved` free blocks."""
        block_ids = self.lookup(request)
        num_spare = self._pool.num_free - num_reserved - self.num_blocks_missing(request, block_ids)
        if num_spare < 0:
            return None
        part = None if self._open is None or request.skips_cache_reads else self._find_part(request, len(block_ids))
        num_tokens = len(block_ids) * self.block_size
        if part is None or self._pool.is_free(part[0]) > num_spare:  # holding it must take no block that is wanted
            return Hit(block_ids, num_tokens)
        return Hit(block_ids, num_tokens + part[1], part[0])

    def names(self, request: Request, num_blocks: int) -> list[BlockHash]:
        """The names of its full blocks, the first `num_blocks` at least; none while no hit can come of its blocks."""
        if not self.enable_prefix_caching or not (chain := self._chain(request)).caching:
            return []
        self._extend(chain, request, num_blocks)
        return chain.hashes

    def num_blocks_missing(self, request: Request, hit: list[BlockId]) -> int:
        """Free blocks that holding all of the request's tokens would use up, given `hit` from `lookup`."""
        return self.num_blocks_for(request.num_tokens) - self._pool.num_held(hit)

    def num_blocks_to_come(self, request: Request) -> int:
        """Blocks it still lacks for its tokens, and one more if it may grow into it."""
        most = len(request.prompt_ids) + request.params.max_tokens - 1  # the last token is never stored
        num_tokens = min(request.num_known_tokens + self.block_size, most)
        return max(0, self.num_blocks_for(num_tokens) - len(request.block_ids))  # drafts may have found more

    def admit(self, request: Request, hit: Hit) -> None:
        """Starts the table with what `find` found. Sets block_ids, num_computed, copy_from and, the first time,
        num_cached_tokens."""
        assert not request.block_ids, f"{request.request_id} has a block table already"
        self._pool.take(hit.block_ids)
        request.block_ids = hit.block_ids
        request.num_computed = hit.num_tokens
        if self.enable_prefix_caching:
            chain = self._chain(request)
            chain.num_registered, chain.caching = len(hit.block_ids), True
            if self._open is not None:
                self._open.open(chain.tail, request)
        if hit.part is not None:
            self._pool.take([hit.part])
            request.copy_from = hit.part
            fits = self.allocate(request, hit.num_tokens)
            assert fits, "there was room for all of its tokens"
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(request.num_computed, len(request.prompt_ids))
            self.prefix_cache_queries += request.num_tokens
            self.prefix_cache_hits += request.num_computed
            self.num_copied_tokens += request.num_computed % self.block_size

    def has_slot(self, request: Request) -> bool:
        """Whether the table already covers the position behind num_computed."""
        return request.num_computed < len(request.block_ids) * self.block_size

    def num_tokens_allocatable(self, request: Request) -> int:
        """How many positions behind num_computed could get a slot now, without freeing anything."""
        return (len(request.block_ids) + self._pool.num_free) * self.block_size - request.num_computed

    def allocate(self, request: Request, end: int) -> bool:
        """Grows the table to cover positions 0 to end - 1; False, and no change, when too few blocks are free."""
        num_new = self.num_blocks_for(end) - len(request.block_ids)
        if num_new <= 0:
            return True
        if num_new > self._pool.num_free:
            return False
        block_ids, evicted = self._pool.allocate(num_new)
        request.block_ids.extend(block_ids)
        if evicted and self._record:
            self._events.append(BlocksRemoved(tuple(evicted)))
        return True

    def extend(self, request: Request, num_tokens: int, num_left: int) -> int:
        """Grows the table behind the request's tokens for up to `num_tokens` more, leaving `num_left` blocks free.

        Returns for how many there are slots now.
        """
        spare = max(0, self._pool.num_free - num_left)
        most = (len(request.block_ids) + spare) * self.block_size - request.num_tokens
        num_tokens = max(0, min(num_tokens, most))
        if num_tokens:
            fits = self.allocate(request, request.num_tokens + num_tokens)
            assert fits, "it takes no more than there is"
        return num_tokens

    def commit(self, request: Request, end: int) -> None:
        """Positions num_computed to end - 1 were computed: advances num_computed and names the blocks now full."""
        start, num_full = request.num_computed, end // self.block_size
        assert start < end <= request.num_tokens
        request.num_computed = end
        if request.copy_from is not None:
            self._let_go(request)
        if self.enable_prefix_caching and num_full > start // self.block_size:
            chain = self._chains[request.request_id]
            if num_full > chain.num_registered and chain.caching:
                self._register(chain, request, num_full)

    def free(self, request: Request) -> None:
        """Drops the table and sets num_computed to 0. Cached blocks stay reusable until they are handed out.

        The list that plans may still point to is left as it is; the request gets a new one.
        """
        if self._open is not None and request.block_ids:
            self._close(request, self._open)
        self._pool.free(request.block_ids)
        request.block_ids = []
        request.num_computed = 0

    def forget(self, request: Request) -> None:
        """Forgets the hashes of a request that is over (or was never admitted)."""
        assert not request.block_ids
        self._chains.pop(request.request_id, None)

    def reset(self) -> None:
        """Empties the prefix cache. Running requests keep their blocks, which nobody will hit."""
        self._pool.clear_cache()
        for chain in self._chains.values():
            chain.caching = False  # `admit` turns it on again for a new table
        if self._open is not None:
            self._open.clear()
        if self._record:
            self._events.append(AllBlocksCleared())

    def take_events(self) -> list[KVEvent]:
        """Events since the last call, in the order in which they happened."""
        events, self._events = self._events, []
        return events

    def _chain(self, request: Request) -> Chain:
        chain = self._chains.get(request.request_id)
        if chain is None:
            root = block_pool.root_hash(self._cache_root, request.salt)
            chain = self._chains[request.request_id] = Chain(root, *self.known_names(request))
        return chain

    def known_names(self, request: Request) -> tuple[list[BlockHash], list[BlockTokens]]:
        """Hashes and token ids of the request's first full blocks, as far as they are known without hashing: none.

        A driver whose requests have no real tokens overrides this and `name_block`.
        """
        return [], []

    def name_block(self, request: Request, index: int, parent: BlockHash) -> tuple[BlockHash, BlockTokens]:
        """Hash and token ids of the request's full block number `index` behind `parent`."""
        token_ids = request.token_ids(index * self.block_size, (index + 1) * self.block_size)
        return block_pool.hash_block(parent, token_ids), token_ids

    def _extend(self, chain: Chain, request: Request, num_blocks: int) -> None:
        """Names the request's first `num_blocks` full blocks, as far as they have no name yet."""
        for i in range(len(chain.hashes), num_blocks):
            block_hash, token_ids = self.name_block(request, i, chain.parent(i))
            chain.hashes.append(block_hash)
            chain.token_ids.append(token_ids)

    def _find_part(self, request: Request, num_blocks: int) -> tuple[BlockId, int] | None:
        """A block that has more tokens of the request's behind its first `num_blocks`, and how many."""
        assert self._open is not None
        start = num_blocks * self.block_size
        parent = self._chain(request).parent(num_blocks)
        token_ids = request.token_ids(start, min(start + self.block_size, request.num_tokens) - 1)
        found = self._pool.find_part(parent, token_ids)
        if found is not None and found[1] == len(token_ids):
            return found
        running = self._open.closest(parent, token_ids, start, self.block_size)
        return max(filter(None, (found, running)), key=lambda part: part[1], default=None)

    def _let_go(self, request: Request) -> None:
        """The copy was made, or won't be."""
        assert request.copy_from is not None
        self._pool.free([request.copy_from])
        request.copy_from = None

    def _close(self, request: Request, open_blocks: OpenBlocks) -> None:
        """Before the table goes: what was computed of its last block stays there to be copied."""
        chain = self._chains[request.request_id]
        if chain.caching:
            open_blocks.close(chain.tail, request)
        if request.copy_from is not None:
            self._let_go(request)  # before the table, whose blocks are its parents
        elif chain.caching:
            index = chain.num_registered
            tokens = request.token_ids(index * self.block_size, request.num_computed)
            if tokens:
                self._pool.keep_part(request.block_ids[index], chain.tail, tokens, is_first=index == 0)

    def _register(self, chain: Chain, request: Request, num_full: int) -> None:
        """Registers the table's blocks up to `num_full`; the new ones become one event.

        Duplicates come before new ones only: a cached block's parent is always cached.
        """
        self._extend(chain, request, num_full)
        first_new = index = chain.num_registered
        if self._open is not None:
            self._open.close(chain.tail, request)
        while index < num_full:
            names = chain.hashes[index], chain.parent(index), chain.token_ids[index]
            outcome = self._pool.register(request.block_ids[index], *names, is_first=index == 0)
            if outcome is Registered.COLLISION:
                chain.caching = False
                break
            index += 1
            if outcome is Registered.DUPLICATE:
                assert first_new == index - 1, "a child was cached without its parent"
                first_new = index
        chain.num_registered = index
        if self._open is not None and chain.caching:
            self._open.open(chain.tail, request)
        if self._record and first_new < index:
            self._events.append(self._stored(chain, request, first_new, index))

    def _stored(self, chain: Chain, request: Request, start: int, end: int) -> BlocksStored:
        return BlocksStored(
            block_hashes=tuple(chain.hashes[start:end]),
            parent_block_hash=chain.hashes[start - 1] if start else None,
            token_ids=tuple(token_id for ids in chain.token_ids[start:end] for token_id in ids),
            block_size=self.block_size,
            salt=request.salt,
        )

    def check_invariants(self, requests: Iterable[Request]) -> None:
        """Asserts that tables, pool and hashes agree. `requests` are all that are waiting or running. O(pool)."""
        requests = list(requests)
        copied = [[r.copy_from] for r in requests if r.copy_from is not None]
        self._pool.check_invariants([request.block_ids for request in requests] + copied)
        assert self._chains.keys() <= {request.request_id for request in requests}, "hashes of a request that is over"
        for request in requests:
            covered = len(request.block_ids) * self.block_size
            assert request.num_computed <= covered, f"{request.request_id}: more computed than its table covers"
            chain = self._chains.get(request.request_id)
            if chain is not None and request.block_ids and chain.caching:
                assert chain.num_registered == request.num_computed // self.block_size
        if self._open is not None:
            held = [(self._chains[r.request_id], r) for r in requests if r.block_ids]
            self._open.check_invariants([(chain.tail, r) for chain, r in held if chain.caching])
