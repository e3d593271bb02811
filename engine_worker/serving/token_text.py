"""Token ids to text, one token at a time, without ever splitting a character.

A token is a run of bytes, and a character of one to four bytes may be spread over several tokens. Decoding each token
alone turns emoji and CJK into replacement characters. Two ways to do it right:

* For byte-level BPE and for SentencePiece with byte fallback (nearly every model of today) the bytes of each token are
  known exactly, so an incremental UTF-8 decoder gives each character with the token that completes it.
* For any other decoder: decode a window of tokens with and without the newest ones, and hand out the difference once
  it does not end in a replacement character (the way of text-generation-inference and vLLM).

Text follows a prompt, so a leading space is kept: "▁world" is " world", never "world".

A sequence that ends in the middle of a character gives one replacement character (U+FFFD) at its end; it is no error.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"
_MAX_HELD = 8  # tokens a windowed stream holds back at most; a character has at most 4 bytes

Part = str | bytes


class TextStream(Protocol):
    def push(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is unfinished."""
        ...

    def flush(self) -> str:
        """What is left at the end: "" or the replacement character of an unfinished one."""
        ...


class TokenText:
    """What one tokenizer's tokens look like. Shared by all sequences; remembers each token's bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        spec = json.loads(tokenizer.to_str())
        self._special = frozenset(
            token["id"] for token in spec.get("added_tokens") or [] if token.get("special", False)
        )
        self._steps = _byte_steps(spec.get("decoder"))
        self._bytes: dict[int, bytes] = {}

    @property
    def is_exact(self) -> bool:
        """Whether every token's bytes are known, so that streams need no window."""
        return self._steps is not None

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text. Empty for ids that are only padding of the vocabulary."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._lookup(token_id)
        return found

    def string_of(self, token_id: int) -> str:
        """The token as text of its own, replacement characters where it is a part of a character."""
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def stream(
        self, skip_special_tokens: bool, prompt_tail: Sequence[int] = (), kept: frozenset[int] = frozenset()
    ) -> TextStream:
        """A stream for one sequence. `prompt_tail` is the prompt's last few ids, context for windowed decoding.

        `kept` are special tokens that are text even where the others are left out.
        """
        skipped = self._special - kept if skip_special_tokens else frozenset()
        if self.is_exact:
            return _ByteStream(self, skipped)
        return _WindowStream(self._tokenizer, skipped, prompt_tail, skip_special_tokens and not kept)

    def _lookup(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._steps is None:
            text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
            return text.encode()
        part: Part = token
        for step in self._steps:
            part = step(part)
        return part.encode() if isinstance(part, str) else part


class _ByteStream:
    def __init__(self, tokens: TokenText, skipped: frozenset[int]) -> None:
        self._tokens = tokens
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._tokens.bytes_of(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class _WindowStream:
    """Keeps the ids from one settled token before the unsettled ones. See the module's second way."""

    def __init__(
        self, tokenizer: Tokenizer, skipped: frozenset[int], prompt_tail: Sequence[int], skip_special: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._skip_special = skip_special
        self._ids = [token_id for token_id in prompt_tail if token_id not in skipped]
        self._num_settled = len(self._ids)
        self._emitted = self._decode(self._ids)  # text of the window that was handed out or belongs to the prompt

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        num_held = len(self._ids) - self._num_settled
        if len(text) <= len(self._emitted) or (text.endswith(_REPLACEMENT) and num_held < _MAX_HELD):
            return ""
        return self._settle(text)

    def flush(self) -> str:
        if len(self._ids) == self._num_settled:
            return ""
        return self._settle(self._decode(self._ids))

    def _settle(self, text: str) -> str:
        new = text[len(self._emitted) :]
        self._ids = self._ids[self._num_settled :]
        self._num_settled = len(self._ids)
        self._emitted = self._decode(self._ids)
        return new

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)
        return text


def _byte_steps(decoder: dict[str, Any] | None) -> list[Callable[[Part], Part]] | None:
    """The decoder as functions on one token at a time, or None where it can't be taken apart so."""
    if decoder is None:
        return None
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    steps: list[Callable[[Part], Part]] = []
    for part in parts:
        match part["type"]:
            case "ByteLevel":
                steps.append(_from_byte_level)
            case "ByteFallback":
                steps.append(_from_byte_fallback)
            case "Metaspace":
                steps.append(_replacing(part["replacement"], " "))
            case "Replace" if "String" in part["pattern"]:
                steps.append(_replacing(part["pattern"]["String"], part["content"]))
            case "Fuse":
                pass  # joins tokens; here they are joined as bytes
            case "Strip" if part.get("stop", 0) == 0 and "Fuse" in [other["type"] for other in parts]:
                pass  # cuts the start of a whole text, and ours has begun in the prompt
            case _:
                return None
    return steps or None


def _replacing(pattern: str, content: str) -> Callable[[Part], Part]:
    return lambda part: part.replace(pattern, content) if isinstance(part, str) else part


def _from_byte_fallback(part: Part) -> Part:
    found = _BYTE_TOKEN.fullmatch(part) if isinstance(part, str) else None
    return bytes.fromhex(found[1]) if found else part


def _from_byte_level(part: Part) -> Part:
    if isinstance(part, bytes):
        return part
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in part)
    except KeyError:  # an added token that is written as plain text
        return part.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's visible character for each byte: printable Latin-1 stands for itself, the rest from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in visible}
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    table.update({chr(0x100 + i): byte for i, byte in enumerate(hidden)})
    return table


_BYTE_OF_CHAR = _byte_level_alphabet()
