"""Token ids of short texts from the ids of their words, without asking the tokenizer again.

A tokenizer of GPT-2's kind cuts a text into words by a regular expression and then merges bytes inside each word: a
word's ids depend on the word alone. So a question of nine words that were all met before is nine look-ups, where a call
of the tokenizer costs several times as much for what it knows besides (offsets, masks, tokens as text).

That is done only where it can be told to be the same: the cutting rule is one of those below, letter by letter, the
tokenizer has no special token that is matched in any other way than as it stands, and the text is ASCII. There
`\\p{L}` is A to Z, `\\p{N}` is 0 to 9, and Unicode normalisation changes nothing, so that Python's `re` finds the very
same words. Everything else goes to the tokenizer. `words_of` compares both on hard texts at start-up.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from engine_worker.contract.prompt import PromptRenderer
from gateway.prefix.tokenize import Splitter, any_of, encode_piece

MAX_WORDS: Final = 16_384  # in each generation: 3 MB of usual words, 6 MB at most
MAX_WORD_CHARS: Final = 40  # longer ones hardly come again
MAX_CHARS: Final = 2_000  # about 0.1 ms; what is longer is better done in one call, or in a thread
MAX_NEW_WORDS: Final = 8  # so many are learned from one text: each costs a call of the tokenizer

_GPT2: Final = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# GPT-2's after every digit was set apart: white space before a digit ends its stretch, as before the text's end.
_GPT2_DIGITS: Final = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
_WORDS_OF_THREE: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# Llama 3's and GPT-4's, Qwen's with single digits, and the one of gpt-oss.
_SPLITS: Final = frozenset(
    {
        _WORDS_OF_THREE,
        _WORDS_OF_THREE.replace(r"\p{N}{1,3}", r"\p{N}"),
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
_CLASSES: Final = {"L": "a-zA-Z", "N": "0-9", "Lu": "A-Z", "Ll": "a-z", "Lt": "", "Lm": "", "Lo": "", "M": ""}
_RAWS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])  # the vocabulary is large, and not looked at
_ANY: Final = msgspec.json.Decoder()
_PROBES: Final = (
    "Hello, world", "  two  spaces ", "\n\nlines\r\n \n x", "it's IT'S we'll 'tis '", "1 12 123 1234567 a1b22 3.14e-2",
    "snake_case CamelCase HTTPServer", "\ttabs\t\t x \x0b\x0c y", "a  1  2\n 3", "!?... (x) {y: [z]} // a/b\n/", " ",
    "\x1c\x1d a", "~~~\n\n```py\ndef f(x):\n    return x\n```",
)  # fmt: skip


def word_pattern(tokenizer_json: str) -> re.Pattern[str] | None:
    """What finds the words of ASCII text as this tokenizer does; None where that can't be told."""
    raw = _RAWS.decode(tokenizer_json)
    model, nothing = _RAWS.decode(raw["model"]), msgspec.Raw(b"null")
    if _ANY.decode(model.get("type", nothing)) != "BPE" or _ANY.decode(model.get("dropout", nothing)):
        return None
    normalizer = _ANY.decode(raw.get("normalizer", nothing))
    if normalizer is not None and normalizer.get("type") not in ("NFC", "NFD", "NFKC", "NFKD"):
        return None
    cutter = _ANY.decode(raw.get("pre_tokenizer", nothing)) or {}
    steps: list[dict[str, Any]] = cutter.get("pretokenizers", []) if cutter.get("type") == "Sequence" else [cutter]
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space") is not False:
        return None
    uses_own = steps[-1].get("use_regex", True)
    match [{key: step[key] for key in step if key != "trim_offsets"} for step in steps[:-1]]:
        case [] if uses_own:
            return _ascii(_GPT2)
        case [{"type": "Digits", "individual_digits": True}] if uses_own:
            return _ascii(_GPT2_DIGITS)
        case [{"type": "Split", "pattern": {"Regex": rule}, "behavior": "Isolated", "invert": False}] if not uses_own:
            return _ascii(rule) if rule in _SPLITS else None
    return None


def _ascii(rule: str) -> re.Pattern[str]:
    """The rule for ASCII text alone: \\p{...} written out, in brackets or without."""
    parts = re.split(r"(\[[^]]*\])", rule)
    for i, part in enumerate(parts):
        for name, letters in _CLASSES.items():
            part = part.replace(f"\\p{{{name}}}", letters if i % 2 else f"[{letters}]")
        parts[i] = part
    # What is left empty stands for letters that ASCII lacks, beside ones that it has.
    return re.compile("".join(parts), re.ASCII)


class Words:
    """Known words of one tokenizer, in two generations as keys.Strides has them. Used from one thread.

    `pattern` finds the words (word_pattern). The texts are pieces of the splitter's: a special token at the front at
    most, and none further in.
    """

    def __init__(self, renderer: PromptRenderer, splitter: Splitter, pattern: re.Pattern[str]) -> None:
        self._renderer = renderer
        self._pattern = pattern
        self._heads = re.compile(any_of(splitter.cut_at))
        self._young: dict[str, bytes] = {}
        self._old: dict[str, bytes] = {}
        self.max_words = MAX_WORDS

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def packed(self, text: str) -> bytes | None:
        """The text's ids as u32 little-endian; None where the tokenizer had better be asked."""
        if len(text) > MAX_CHARS or not text.isascii():
            return None
        found: list[bytes] = []
        head = self._heads.match(text)
        words = self._pattern.findall(text, 0 if head is None else head.end())
        if head is not None:
            words.insert(0, head.group())
        left = MAX_NEW_WORDS
        for word in words:
            ids = self._young.get(word)
            if ids is None:
                ids = self._old.get(word)
                if ids is None:
                    left -= 1
                    if left < 0:
                        return None
                    ids = encode_piece(self._renderer, word)
                self._keep(word, ids)
            found.append(ids)
        return b"".join(found)

    def _keep(self, word: str, ids: bytes) -> None:
        if len(word) > MAX_WORD_CHARS:
            return
        if len(self._young) >= self.max_words:
            self._old, self._young = self._young, {}
        self._old.pop(word, None)
        self._young[word] = ids

    def check_invariants(self) -> None:
        assert len(self._young) <= self.max_words
        assert len(self._old) <= self.max_words
        assert not self._young.keys() & self._old.keys()


def words_of(renderer: PromptRenderer, splitter: Splitter) -> Words | None:
    """None where the tokenizer isn't one of those that are known, or differs from what is known of it."""
    pattern = word_pattern(renderer.bundle.tokenizer_json) if splitter.cuts_all else None
    if pattern is None:
        return None
    words = Words(renderer, splitter, pattern)
    texts = [before + probe for before in ("", *sorted(splitter.cut_at)[:1]) for probe in _PROBES]
    for text in texts:
        words.packed(text)  # learns
    is_right = all(words.packed(text) in (None, encode_piece(renderer, text)) for text in texts)
    return words if is_right else None
