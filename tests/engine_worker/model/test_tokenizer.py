"""Bundles: what a folder's files say about tokenizing and chat, and a fingerprint that notices every change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from engine_worker.model.errors import ModelError
from engine_worker.model.tokenizer import has_tokenizer, load_tokenizer
from tests.engine_worker.model.checkpoints import edit_json, save_tokenizer
from tests.support.tiny_tokenizer import CHATML, tiny_tokenizer

pytestmark = pytest.mark.engine

TEXT = "<|im_start|>user\nGröße, 日本語 🙂  <|im_end|>"


def test_a_folder_gives_tokenizer_template_and_special_tokens(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    bundle = load_tokenizer(tmp_path, 512)
    assert bundle.chat_template == CHATML
    assert bundle.special_tokens == {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    assert bundle.max_model_len == 512
    assert Tokenizer.from_str(bundle.tokenizer_json).encode(TEXT).ids == tiny_tokenizer().encode(TEXT).ids


def test_the_bundle_agrees_with_transformers(tmp_path: Path) -> None:
    """Template and ids as AutoTokenizer has them for a folder that transformers itself wrote."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer(), bos_token="<s>", eos_token="<|im_end|>", pad_token="<unk>"
    )
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(tmp_path)
    bundle = load_tokenizer(tmp_path, 64)
    assert bundle.chat_template == CHATML
    assert bundle.special_tokens == {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<unk>"}
    ours = Tokenizer.from_str(bundle.tokenizer_json)
    for special in (True, False):
        assert (
            ours.encode(TEXT, add_special_tokens=special).ids
            == tokenizer(TEXT, add_special_tokens=special)["input_ids"]
        )


def test_where_the_chat_template_is_looked_for(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    edit_json(settings, chat_template=[{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}])
    assert load_tokenizer(tmp_path, 1).chat_template == "D"
    edit_json(settings, chat_template=[{"name": "only", "template": "O"}])
    assert load_tokenizer(tmp_path, 1).chat_template == "O"
    edit_json(settings, chat_template=None)
    assert load_tokenizer(tmp_path, 1).chat_template is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "P"}))
    assert load_tokenizer(tmp_path, 1).chat_template == "P"
    edit_json(settings, chat_template="S")
    assert load_tokenizer(tmp_path, 1).chat_template == "S"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert load_tokenizer(tmp_path, 1).chat_template == "J"


def test_older_special_token_files_count(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"unk_token": {"content": "<unk>"}, "eos_token": "old", "additional_special_tokens": ["<x>"]})
    )
    assert load_tokenizer(tmp_path, 1).special_tokens == {
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "unk_token": "<unk>",
    }


def test_truncation_and_padding_from_training_are_switched_off(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_str(tiny_tokenizer().to_str())
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=64)
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    bundle = load_tokenizer(tmp_path, 1)
    assert Tokenizer.from_str(bundle.tokenizer_json).encode(TEXT).ids == tiny_tokenizer().encode(TEXT).ids


def test_the_fingerprint_follows_the_content_alone(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    first = load_tokenizer(tmp_path, 10).fingerprint
    assert len(first) == 32
    assert load_tokenizer(tmp_path, 20).fingerprint == first
    prints = {first}
    edit_json(tmp_path / "tokenizer_config.json", bos_token="<unk>")
    prints.add(load_tokenizer(tmp_path, 10).fingerprint)
    edit_json(tmp_path / "tokenizer_config.json", chat_template="other")
    prints.add(load_tokenizer(tmp_path, 10).fingerprint)
    (tmp_path / "tokenizer.json").write_text(tiny_tokenizer(vocab_size=300).to_str())
    prints.add(load_tokenizer(tmp_path, 10).fingerprint)
    assert len(prints) == 4


def test_older_tokenizer_files_are_converted(tmp_path: Path) -> None:
    """vocab.json and merges.txt, as GPT-2 had them."""
    described = json.loads(tiny_tokenizer().to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(described["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in described["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    bundle = load_tokenizer(tmp_path, 1)
    text = "The quick brown dog, naïve"
    expected = tiny_tokenizer().encode(text, add_special_tokens=False).ids
    assert Tokenizer.from_str(bundle.tokenizer_json).encode(text, add_special_tokens=False).ids == expected


def test_folders_without_a_usable_tokenizer(tmp_path: Path) -> None:
    assert not has_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="no tokenizer files"):
        load_tokenizer(tmp_path, 1)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert has_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="can't be read"):
        load_tokenizer(tmp_path, 1)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(b"damaged")
    with pytest.raises(ModelError, match="can't be converted"):
        load_tokenizer(tmp_path, 1)
