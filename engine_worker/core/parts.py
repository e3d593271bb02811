"""Which cached block begins as a prompt goes on, where the whole blocks that it hits end.

A hit on whole blocks leaves up to a block of tokens that are cached, too, in a block that goes on differently or isn't
full. Their keys and values depend on nothing behind them, so they can be copied into a block of the request's own. To
find them, blocks are kept by their parent: behind a parent, the block with the most leading tokens in common with a
text is one of the text's two neighbours in the order of their tokens. So a look-up takes two comparisons, however many
blocks follow one parent (all conversations that begin with the same system prompt do).

Three kinds of blocks have such tokens: named blocks, the last block of a request that is over (a *part*, with fewer
tokens than a block has, and no hash), and the blocks that running requests are filling (`OpenBlocks`, which reads from
the request how far it has come, so that a decoding step changes nothing here).

A part that another block begins with is worth nothing beside it: no entry's tokens begin another entry's.

Memory: one entry for each block that carries something, taken out when it is handed out, and one for each running
request. The parent's hash names the whole prefix, salt included, so what is found was computed behind the same tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Generic, TypeVar

from engine_worker.core.types import BlockHash, BlockId, Request

T = TypeVar("T")
Tokens = tuple[int, ...]


def num_common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading tokens they share."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))


class Siblings(Generic[T]):
    """parent -> (tokens, value) of all that follows it, sorted by tokens."""

    def __init__(self) -> None:
        self._behind: dict[BlockHash, list[tuple[Tokens, T]]] = {}

    def add(self, parent: BlockHash, tokens: Tokens, value: T) -> T | None:
        """Adds an entry that `covers` does not hold for; returns the value of the part that it took the place of."""
        entries = self._behind.get(parent)
        if entries is None:
            self._behind[parent] = [(tokens, value)]
            return None
        at = bisect_left(entries, (tokens,))
        if at and _begins(entries[at - 1][0], tokens):  # what lies between a beginning of `tokens` and them has it, too
            covered, entries[at - 1] = entries[at - 1][1], (tokens, value)
            return covered
        entries.insert(at, (tokens, value))
        return None

    def covers(self, parent: BlockHash, tokens: Tokens) -> bool:
        """Whether an entry has these tokens, or begins with them."""
        entries = self._behind.get(parent, ())
        at = bisect_left(entries, (tokens,))
        return at < len(entries) and _begins(tokens, entries[at][0])

    def remove(self, parent: BlockHash, tokens: Tokens) -> None:
        entries = self._behind[parent]
        at = bisect_left(entries, (tokens,))
        assert entries[at][0] == tokens, "an entry was lost"
        del entries[at]
        if not entries:
            del self._behind[parent]

    def closest(self, parent: BlockHash, tokens: Tokens) -> tuple[T, int] | None:
        """The value that has most leading tokens in common, and how many; None without any."""
        entries = self._behind.get(parent)
        if entries is None:
            return None
        at = bisect_left(entries, (tokens,))
        best: tuple[T, int] | None = None
        for found, value in entries[max(at - 1, 0) : at + 1]:
            common = num_common(found, tokens)
            if common > (best[1] if best else 0):
                best = value, common
        return best

    def clear(self) -> None:
        self._behind.clear()

    def __iter__(self) -> Iterator[tuple[BlockHash, Tokens, T]]:
        for parent, entries in self._behind.items():
            for tokens, value in entries:
                yield parent, tokens, value

    def check_invariants(self) -> None:
        for entries in self._behind.values():
            assert entries, "a parent without children"
            for (left, _), (right, _) in pairwise(entries):
                assert left < right, "siblings are out of order"
                assert not _begins(left, right), "a part beside a block that begins with it"


def _begins(tokens: Tokens, longer: Tokens) -> bool:
    return longer[: len(tokens)] == tokens


class OpenBlocks:
    """parent -> running requests whose first unnamed block follows it."""

    def __init__(self) -> None:
        self._behind: dict[BlockHash, list[Request]] = {}

    def open(self, parent: BlockHash, request: Request) -> None:
        self._behind.setdefault(parent, []).append(request)

    def close(self, parent: BlockHash, request: Request) -> None:
        requests = self._behind[parent]
        requests.remove(request)
        if not requests:
            del self._behind[parent]

    def clear(self) -> None:
        self._behind.clear()

    def closest(self, parent: BlockHash, tokens: Tokens, start: int, block_size: int) -> tuple[BlockId, int] | None:
        """The block with most leading tokens in common, and how many; `start` is the blocks' first position.

        Who still waits for a copy has tokens that its block doesn't.
        """
        best: tuple[BlockId, int] | None = None
        for request in self._behind.get(parent, ()):
            most = min(request.num_computed, start + len(tokens))
            if most > start and request.copy_from is None:
                common = num_common(request.token_ids(start, most), tokens)
                if common > (best[1] if best else 0):
                    best = request.block_ids[start // block_size], common
                    if common == len(tokens):
                        break
        return best

    def check_invariants(self, expected: Iterable[tuple[BlockHash, Request]]) -> None:
        """Asserts that exactly these are open."""
        found = [(parent, r.request_id) for parent, requests in self._behind.items() for r in requests]
        assert sorted(found) == sorted((parent, r.request_id) for parent, r in expected), "open blocks were lost"
