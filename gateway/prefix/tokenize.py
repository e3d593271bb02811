"""Tokenizing a prompt piece by piece, so that what was seen before costs a look-up.

A tokenizer cuts a text at its special tokens first and treats what lies between them separately: no merge and no
normalisation reaches across. So a text may be cut *before* each special token and its pieces tokenized alone, with the
same ids as the whole. A chat's next turn shares all pieces but the last few with the turn before it; the ids of a piece
are remembered under its hash.

That holds for the tokens that are matched in the raw text and only there: not `normalized`, not `single_word`, and
touching no white space around them (`lstrip`, `rstrip`). Others stay inside a piece. Pieces begin with their special
token, so that a rule for the very start of a text (Metaspace's `prepend_scheme: first`) does not meet them. Where two
special tokens overlap, the tokenizer takes the leftmost and then the longest, and so does the pattern here.

`cuts_right` compares pieces and whole on hard probes at start-up; a tokenizer that differs is used whole.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer
from xxhash import xxh3_128_digest

from engine_worker.contract.prompt import PromptRenderer
from gateway.prefix.keys import ID_BYTES, pack_ids

_ENTRY_BYTES = 200  # what an entry costs beside its ids: key, bytes objects, the dict's and the list's share
_PROBES = ("", " ", "  a", "a  ", "\n", "\n\nHello, world", "Hello\n", " é\u0301", "word", "1234567", "日本語 🙂")


class SegmentCache:
    """Packed ids of text pieces, least recently used out first. One tokenizer's; used from one thread.

    `max_bytes` bounds what the ids and their entries hold together (estimated).
    """

    def __init__(self, max_bytes: int) -> None:
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0

    def get(self, piece: str) -> bytes | None:
        key = _piece_key(piece)
        packed = self._entries.get(key)
        if packed is None:
            self.num_misses += 1
            return None
        self.num_hits += 1
        self._entries.move_to_end(key)
        return packed

    def put(self, piece: str, packed: bytes) -> None:
        key = _piece_key(piece)
        if key in self._entries:
            return
        self._entries[key] = packed
        self._num_bytes += len(packed) + _ENTRY_BYTES
        while self._num_bytes > self._max_bytes:
            _, dropped = self._entries.popitem(last=False)
            self._num_bytes -= len(dropped) + _ENTRY_BYTES

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def check_invariants(self) -> None:
        assert self._num_bytes == sum(len(packed) + _ENTRY_BYTES for packed in self._entries.values())
        assert self._num_bytes <= self._max_bytes
        assert all(len(packed) % ID_BYTES == 0 for packed in self._entries.values())


def _piece_key(piece: str) -> bytes:
    return xxh3_128_digest(piece.encode("utf-8", "surrogatepass"))


class Splitter:
    """Cuts text before the special tokens where cutting is safe. Stateless; any thread.

    cuts_all  whether they all are such, so that a piece has none but at its front
    joints    those before which a text may be cut whatever stands in front (known.py): none of the tokens that are
              matched in the raw text reaches into one from the left
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = [token for token in tokenizer.get_added_tokens_decoder().values() if token.content]
        raw = [token for token in added if not token.normalized]
        self.cut_at = frozenset(
            token.content
            for token in raw
            if not (token.lstrip or token.rstrip) and not any(map(str.isspace, token.content))
        )
        # Whether a single_word token matches depends on its neighbours, and with it how far a match reaches.
        usable = bool(self.cut_at) and not any(token.single_word for token in added)
        self._pattern = re.compile(any_of(token.content for token in raw)) if usable else None
        self.joints = joints(self.cut_at, [token.content for token in raw]) if usable else frozenset()
        self.cuts_all = usable and len(self.cut_at) == len({token.content for token in added})

    def begins_apart(self, text: str) -> bool:
        """Whether `text`, behind whatever text, is a piece of its own, or several."""
        found = self._pattern.match(text) if self._pattern is not None else None
        return found is not None and found.group() in self.joints

    def split(self, text: str) -> list[str]:
        """Pieces that join to `text`, none empty; each but the first begins with a special token."""
        if self._pattern is None:
            return [text] if text else []
        pieces = []
        begin = 0
        for match in self._pattern.finditer(text):
            start = match.start()
            if start and (self.cuts_all or match.group() in self.cut_at):
                pieces.append(text[begin:start])
                begin = start
        if begin < len(text):
            pieces.append(text[begin:])
        return pieces


def joints(cut_at: Iterable[str], raw: Sequence[str]) -> frozenset[str]:
    """Those of `cut_at` that no inner part of one of `raw` begins as, or begins with."""
    inner = {token[i:] for token in raw for i in range(1, len(token))}
    return frozenset(
        token
        for token in cut_at
        if not any(token[:end] in inner for end in range(1, len(token) + 1))
        and not any(token in other[1:] for other in raw)
    )


def any_of(words: Iterable[str]) -> str:
    """A regular expression of the longest of `words` that stands at a place: a tree, in which hundreds of tokens that
    begin alike are told apart in as many steps as a few."""
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}
    return _branches(tree)


def _branches(node: dict[str, Any]) -> str:
    start = ""
    while len(node) == 1 and "" not in node:
        ((letter, node),) = node.items()
        start += re.escape(letter)
    branches = [re.escape(letter) + _branches(below) for letter, below in node.items() if letter]
    if not branches:
        return start
    return f"{start}(?:{'|'.join(branches)}){'?' if '' in node else ''}"


def encode_piece(renderer: PromptRenderer, piece: str) -> bytes:
    """Packed ids of a piece, without special tokens added around it. Any thread. Raises PromptError."""
    return pack_ids(renderer.encode(piece, add_special_tokens=False))


def cuts_right(renderer: PromptRenderer, splitter: Splitter) -> bool:
    """Whether pieces tokenize as the whole does, on texts that put hard neighbours beside some special tokens."""
    tokens = sorted(splitter.cut_at)[:8]
    for token in tokens:
        for before in _PROBES:
            for after in _PROBES:
                text = f"{before}{token}{after}{tokens[0]}{before}"
                whole = pack_ids(renderer.encode(text, add_special_tokens=False))
                if b"".join(encode_piece(renderer, piece) for piece in splitter.split(text)) != whole:
                    return False
    return True
