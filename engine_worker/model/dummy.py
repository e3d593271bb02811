"""Models without weights: random numbers in the architecture that a config.json describes, for benchmarks and tests.

They compute exactly as much as the real ones and say nothing sensible. The same configuration and seed give the same
weights on the same kind of device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine_worker.contract.state import TokenizerBundle
from engine_worker.model.checkpoint_source import first_line
from engine_worker.model.errors import ModelError
from engine_worker.model.tokenizer import make_bundle

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIALS = ("<|unknown|>", "<|im_start|>", "<|im_end|>")


def build(
    hf_config: Any,
    dtype: torch.dtype,
    device: torch.device,
    attn_implementation: str,
    seed: int,
    trust_remote_code: bool = False,
) -> nn.Module:
    """The configured model with its family's own initialisation (normal weights, unit norms), seeded.

    Parameters are created on the device in their final type, so a large model never exists twice. Raises ModelError.
    """
    from transformers import AutoModelForCausalLM

    cuda_devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=cuda_devices), torch.device(device):
            torch.manual_seed(seed)
            module = AutoModelForCausalLM.from_config(
                hf_config, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code
            )
            _fill(module)
    except Exception as error:  # unknown architectures, impossible sizes, no memory: many classes
        raise ModelError(f"No model can be built from this config.json: {first_line(error)}") from error
    return module


def _fill(module: nn.Module) -> None:
    """Replace what initialisation left empty or not finite: some families leave parameters to the checkpoint."""
    with torch.no_grad():
        for parameter in module.parameters():
            if not bool(torch.isfinite(parameter.sum())):
                parameter.normal_(0, 0.02)


def stand_in_tokenizer(text_config: Any, max_model_len: int) -> TokenizerBundle:
    """A tokenizer for any vocabulary size: one token a byte, and a made-up word for every other id.

    The words never come out of encoding; they make visible what a random model puts out. With fewer than 259 ids the
    bytes that have none become <|unknown|>, printable ASCII being served first.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab_size = int(text_config.vocab_size)
    if vocab_size <= len(_SPECIALS):
        raise ModelError(f"A vocabulary of {vocab_size} ids is too small for a stand-in tokenizer.")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: (not (c.isascii() or c in "ĠĊ"), c))
    names = [*_SPECIALS, *letters][:vocab_size]
    names += [f"Ġw{i}" for i in range(len(names), vocab_size)]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=_SPECIALS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in _SPECIALS])
    specials = {"unk_token": _SPECIALS[0], "bos_token": _SPECIALS[1], "eos_token": _SPECIALS[2]}
    return make_bundle(tokenizer.to_str(), _CHAT_TEMPLATE, specials, max_model_len)
