"""A real byte-level BPE tokenizer, trained in a moment on a few sentences, with the special tokens of a chat."""

from __future__ import annotations

import functools
import hashlib

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from engine_worker.contract.state import TokenizerBundle

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'"
    " }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = [
    "You are a helpful assistant. Answer in short sentences and name your sources.",
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "A cache holds what was computed before, so that it need not be computed again.",
    "Größe, naïve, café, 日本語, emoji 🙂 and numbers 0123456789 belong to the alphabet as well.",
]


@functools.cache
def tiny_tokenizer(vocab_size: int = 600, kind: str = "bytes") -> Tokenizer:
    """`kind` is "bytes" (GPT-2's way) or "metaspace" (Llama's way, with the space put first)."""
    tokenizer = Tokenizer(models.BPE(unk_token=None if kind == "bytes" else "<unk>", byte_fallback=kind != "bytes"))
    if kind == "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = []
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<tool>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    tokenizer.add_special_tokens(
        [AddedToken("<|im_end|>\n<|end|>", special=True), AddedToken("<mask>", lstrip=True, special=True)]
    )
    tokenizer.add_tokens([AddedToken("fox", normalized=True), AddedToken("<think>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def tiny_bundle(chat_template: str | None = CHATML, kind: str = "bytes", max_model_len: int = 2048) -> TokenizerBundle:
    tokenizer_json = tiny_tokenizer(kind=kind).to_str()
    return TokenizerBundle(
        fingerprint=hashlib.sha256(tokenizer_json.encode()).hexdigest(),
        tokenizer_json=tokenizer_json,
        chat_template=chat_template,
        special_tokens={"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>"},
        max_model_len=max_model_len,
    )
