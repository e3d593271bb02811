"""The tokenizer and chat template of a model folder, as the bundle that the API process and the gateway work from.

The bundle is read from the files themselves: loading a tokenizer through transformers is slow, and only needed to
convert one that has no tokenizer.json. Truncation and padding that some files carry from training are switched off:
they would shorten prompts silently.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from engine_worker.contract.state import TokenizerBundle
from engine_worker.model.checkpoint_source import first_line, read_json
from engine_worker.model.errors import ModelError

_SLOW_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "merges.txt")


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", *_SLOW_FILES))


def load_tokenizer(folder: Path, max_model_len: int, trust_remote_code: bool = False) -> TokenizerBundle:
    """The folder's tokenizer as a bundle. Raises ModelError if there is none or it can't be used."""
    path = folder / "tokenizer.json"
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else _convert_slow(folder, trust_remote_code)
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except ModelError:
        raise
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ModelError(f"The tokenizer of {folder.name} can't be read: {first_line(error)}") from error
    if tokenizer.truncation is not None or tokenizer.padding is not None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        text = tokenizer.to_str()
    settings = read_json(folder / "tokenizer_config.json")
    bundle = make_bundle(text, chat_template(folder, settings), special_tokens(folder, settings), max_model_len)
    answers = settings.get("response_template")
    return msgspec.structs.replace(bundle, response_template=json.dumps(answers)) if answers else bundle


def make_bundle(
    tokenizer_json: str, template: str | None, specials: dict[str, str], max_model_len: int
) -> TokenizerBundle:
    """A bundle with its fingerprint: 32 hex digits over tokenizer, template and special tokens, not the length."""
    digest = hashlib.sha256()
    for part in (tokenizer_json, template or "", json.dumps(specials, sort_keys=True)):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return TokenizerBundle(
        fingerprint=digest.hexdigest()[:32],
        tokenizer_json=tokenizer_json,
        chat_template=template,
        special_tokens=specials,
        max_model_len=max_model_len,
    )


def chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja, else the one in tokenizer_config.json (of several, `default`), else None."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    for found in (settings.get("chat_template"), read_json(folder / "chat_template.json").get("chat_template")):
        if isinstance(found, str):
            return found
        if isinstance(found, list):
            named = {item["name"]: item["template"] for item in found if {"name", "template"} <= item.keys()}
            if named:
                return named.get("default") or next(iter(named.values()))
    return None


def special_tokens(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the like by name, as plain strings."""
    found: dict[str, str] = {}
    for source in (read_json(folder / "special_tokens_map.json"), settings):
        for name, value in source.items():
            content = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(content, str):
                found[name] = content
    return dict(sorted(found.items()))


def _convert_slow(folder: Path, trust_remote_code: bool) -> str:
    """tokenizer.json's text for a folder that has only older files, through transformers' conversion."""
    from transformers import AutoTokenizer

    if not has_tokenizer(folder):
        raise ModelError(f"{folder.name} has no tokenizer files. Put its tokenizer.json beside the weights.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        return tokenizer.backend_tokenizer.to_str()
    except Exception as error:  # missing sentencepiece or protobuf, unknown classes: many kinds
        raise ModelError(
            f"The tokenizer of {folder.name} can't be converted to tokenizer.json: {first_line(error)}"
        ) from error
