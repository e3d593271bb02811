"""Words that are looked up must give the tokenizer's own ids, for every way of cutting that is said to be known."""

from __future__ import annotations

import functools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from engine_worker.contract.prompt import PromptRenderer
from engine_worker.contract.state import TokenizerBundle
from gateway.prefix import words as module
from gateway.prefix.tokenize import Splitter, any_of, encode_piece
from gateway.prefix.words import Words, word_pattern, words_of

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_OSS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(rule: str) -> PreTokenizer:
    return Sequence([Split(Regex(rule), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])


CUTS = {
    "gpt-2": ByteLevel(add_prefix_space=False),
    "smollm": Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
    "llama-3": split(LLAMA_3),
    "qwen-2": split(LLAMA_3.replace("{1,3}", "")),
    "gpt-oss": split(GPT_OSS),
}
CORPUS = [
    "It's what they'll say: the quick brown fox doesn't jump 12 times, or 1234567.",
    "def f(x):\n    return x  # 3.14\n\n\tif   a / b //c:\r\n  pass",
    "HTTPServer CamelCase snake_case WE'LL 'tis ... !? (a) [b] {c}  ",
]
SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>", "<|im_", "<think>"]
TEXTS = st.lists(
    st.sampled_from(["the", "It's", " 'LL", "12", "1234", "\n", "\r\n", "  ", " ", "\t", "a", "B", "/", "'", "é", ".,"])
    | st.text(st.characters(max_codepoint=127), max_size=6),
    max_size=14,
).map("".join)


@functools.cache
def renderer(cut: str, normalizer: bool = False) -> PromptRenderer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = CUTS[cut]
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    return renderer_of(tokenizer)


def renderer_of(tokenizer: Tokenizer) -> PromptRenderer:
    return PromptRenderer(
        TokenizerBundle(
            fingerprint="x", tokenizer_json=tokenizer.to_str(), chat_template=None, special_tokens={}, max_model_len=100
        )
    )


@functools.cache
def known(cut: str, normalizer: bool = False) -> tuple[Splitter, Words]:
    splitter = Splitter(renderer(cut, normalizer).tokenizer)
    words = words_of(renderer(cut, normalizer), splitter)
    assert words is not None
    return splitter, words


@pytest.mark.parametrize("normalizer", [False, True])
@pytest.mark.parametrize("cut", CUTS)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS, heads=st.lists(st.sampled_from(SPECIAL), max_size=2))
def test_words_have_the_ids_of_the_text(cut: str, normalizer: bool, text: str, heads: list[str]) -> None:
    splitter, words = known(cut, normalizer)
    for piece in splitter.split("".join(heads) + text):
        found = words.packed(piece)
        found = words.packed(piece) if found is None else found  # what was new is known now, as far as it is learned
        assert found is None or found == encode_piece(renderer(cut, normalizer), piece)
        assert found is not None or not piece.isascii() or len(piece) > 10
    words.check_invariants()


@pytest.mark.parametrize("cut", CUTS)
def test_a_known_text_needs_no_tokenizer(cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, words = known(cut)
    ids = words.packed("<s>It's the fox, 12 times\n")
    assert ids is not None

    def asked(renderer: PromptRenderer, piece: str) -> bytes:
        raise AssertionError("the tokenizer was asked")

    monkeypatch.setattr(module, "encode_piece", asked)
    assert words.packed("<s>It's the fox, 12 times\n") == ids


def test_much_that_is_new_or_not_ascii_or_long_is_left_to_the_tokenizer() -> None:
    words = Words(renderer("gpt-2"), known("gpt-2")[0], word_pattern_of("gpt-2"))
    new = " ".join("abcdefghijkl")
    assert words.packed(new) is None
    assert len(words) == module.MAX_NEW_WORDS, "a part was learned"
    assert words.packed(new) == encode_piece(renderer("gpt-2"), new)
    assert words.packed("café") is None
    assert words.packed("a" * (module.MAX_CHARS + 1)) is None
    long = "x" * (module.MAX_WORD_CHARS + 1)
    before = len(words)
    assert words.packed(long) == encode_piece(renderer("gpt-2"), long)
    assert len(words) == before, "not kept"


def word_pattern_of(cut: str) -> re.Pattern[str]:
    pattern = word_pattern(renderer(cut).bundle.tokenizer_json)
    assert pattern is not None
    return pattern


def test_old_words_are_forgotten_and_used_ones_kept() -> None:
    words = Words(renderer("gpt-2"), known("gpt-2")[0], word_pattern_of("gpt-2"))
    words.max_words = 4
    for letter in "abcdefgh":
        assert words.packed("z") is not None
        assert words.packed(letter) is not None
        words.check_invariants()
    assert len(words) <= 8
    assert "z" in words._young
    assert "a" not in {**words._young, **words._old}


def changed(**fields: object) -> PromptRenderer:
    data = json.loads(renderer("gpt-2").bundle.tokenizer_json)
    for path, value in fields.items():
        first, _, second = path.partition("__")
        if second:
            data[first][second] = value
        else:
            data[first] = value
    return renderer_of(Tokenizer.from_str(json.dumps(data)))


@pytest.mark.parametrize(
    "fields",
    [
        {"pre_tokenizer__add_prefix_space": True},
        {"pre_tokenizer__use_regex": False},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "Prepend", "prepend": "_"}},
        {"model__dropout": 0.5},
        {"pre_tokenizer": json.loads(split(LLAMA_3.replace("{1,3}", "{1,4}")).__getstate__())},
    ],
)  # fmt: skip
def test_other_tokenizers_are_left_alone(fields: dict[str, object]) -> None:
    other = changed(**fields)
    assert words_of(other, Splitter(other.tokenizer)) is None


@pytest.mark.parametrize("how", ["lstrip", "rstrip", "normalized", "single_word"])
def test_special_tokens_that_touch_their_neighbours_are_not_for_words(how: str) -> None:
    tokenizer = Tokenizer.from_str(renderer("gpt-2").bundle.tokenizer_json)
    tokenizer.add_tokens([AddedToken("fox", **{"normalized": False, how: True})])
    other = renderer_of(tokenizer)
    assert words_of(other, Splitter(other.tokenizer)) is None


def test_a_rule_that_is_not_what_was_thought_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GPT2", module._GPT2.replace(r" ?\p{L}+", r"\p{L}+"))
    assert words_of(renderer("gpt-2"), Splitter(renderer("gpt-2").tokenizer)) is None


@given(st.sets(st.text("ab|.", min_size=1, max_size=4), min_size=1, max_size=8), st.text("ab|.", max_size=12))
def test_any_of_finds_the_longest(tokens: set[str], text: str) -> None:

    plain = re.compile("|".join(re.escape(token) for token in sorted(tokens, key=lambda token: -len(token))))
    assert re.findall(any_of(tokens), text) == plain.findall(text)
