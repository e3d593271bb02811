"""Rotary embeddings that would look at the whole pack, frozen so that a request never depends on its neighbours.

transformers updates two kinds on every forward from the largest position in the batch. With packed requests that is a
neighbour's position, and with a cache it would mix keys made under different frequencies. So each is decided once:

- longrope: the long factors if the served length exceeds the original training length, the short ones otherwise. (vLLM
  decides in the same way.)
- dynamic NTK: unscaled, and the served length is capped at the training length, below which it is unscaled anyway.

Other kinds (default, linear, yarn, llama3) have fixed frequencies and are left alone.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def freeze_rope(module: PreTrainedModel, max_model_len: int) -> tuple[int, list[str]]:
    """Freeze what changes with the batch. Returns the length that can be served and a note for each decision."""
    notes: list[str] = []
    for part in module.modules():
        kinds = getattr(part, "rope_type", None)
        if kinds is None or not hasattr(part, "config"):
            continue
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if kind == "longrope":
                notes.append(_freeze_longrope(part, layer_type, max_model_len))
            elif "dynamic" in kind:
                trained = int(part.original_max_seq_len)  # type: ignore[arg-type]
                if max_model_len > trained:
                    max_model_len = trained
                notes.append(f"dynamic RoPE is frozen unscaled, so max_model_len is at most {trained}")
                _set_fixed(part, layer_type)
    return max_model_len, list(dict.fromkeys(notes))


def _freeze_longrope(part: torch.nn.Module, layer_type: str | None, max_model_len: int) -> str:
    config = part.config
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    original = parameters["original_max_position_embeddings"]
    is_long = max_model_len > original
    prefix = "" if layer_type is None else f"{layer_type}_"
    buffer = getattr(part, f"{prefix}inv_freq")
    length = original + 1 if is_long else original
    kwargs = {} if layer_type is None else {"layer_type": layer_type}
    frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](config, buffer.device, seq_len=length, **kwargs)
    buffer.copy_(frequencies)
    _set_fixed(part, layer_type)
    return f"longrope is frozen at its {'long' if is_long else 'short'} factors"


def _set_fixed(part: torch.nn.Module, layer_type: str | None) -> None:
    """Stop the per-forward update. The buffers and the attention scaling stay as they are."""
    if layer_type is None:
        part.rope_type = "default"
    else:
        part.rope_type[layer_type] = "default"  # type: ignore[index]
