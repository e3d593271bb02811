"""Which inputs of each linear layer are large: what int4's rounding minds.

A weight's rounding error reaches the output times the input that it meets, and inputs differ: a few channels are many
times as large as their neighbours, in every text. So before the weights are rounded the model reads a short text, once,
and the mean square of what came into each layer is noted for every column. Only that: the errors of different columns
are taken for independent (GPTQ, Frantar et al. 2022, doesn't, but a few hundred tokens tell too little about pairs of
columns; AWQ, Lin et al. 2023, scales columns by such statistics, which needs a place to fold the scales into).

A token whose inputs are larger than most (the first of a text can be, a thousand times) counts no more than a usual
one. Means are rounded to quarters of a power of two, so that replicas on different processors, whose sums differ in the
last bit, weigh alike almost everywhere. A layer that hardly a token reached, such as an expert or where the model's
length is a few tokens, is rounded as if all its inputs were equal: one token's inputs say so little of the next ones'
that weighing by them makes int4 worse (a third more error with one token, a few percent with four, less from eight on).
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine_worker.model.attention import NAME

TEXT = Path(__file__).parent / "importance.txt"
MAX_TOKENS = 512
MIN_TOKENS = 16  # that came into a layer, for it to be weighed
_LEAST = 1e-3  # of the layer's mean: a channel that is silent in this text may speak in another
_STEPS = 4  # in a power of two
_ATTRIBUTE = "input_importance"


@torch.inference_mode()
def measure_importance(module: PreTrainedModel, tokenizer_json: str, max_model_len: int) -> int:
    """Let the dense model read the text and leave with each nn.Linear its inputs' importance. Returns the tokens read.

    It runs in transformers' eager attention, as the self-test does, and leaves the module as it was otherwise.
    """
    vocab_size = module.get_input_embeddings().weight.shape[0]
    ids = Tokenizer.from_str(tokenizer_json).encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False).ids
    ids = [token for token in ids if token < vocab_size][: min(MAX_TOKENS, max_model_len)]
    if not ids:
        return 0
    hooks = [part.register_forward_pre_hook(_note) for part in module.modules() if type(part) is nn.Linear]
    module.set_attn_implementation("eager")
    try:
        module(input_ids=torch.tensor([ids], device=module.device), use_cache=False)
    finally:
        module.set_attn_implementation(NAME)
        for hook in hooks:
            hook.remove()
    return len(ids)


def importance_of(linear: nn.Linear) -> Tensor | None:
    """[K] in float32 on the layer's device, None for a layer that wasn't measured."""
    return getattr(linear, _ATTRIBUTE, None)


def importance_from(x: Tensor) -> Tensor | None:
    """Inputs [..., K] of a layer -> the importance [K] of its columns, above 0 everywhere, in float32.

    None where the inputs tell nothing: fewer than MIN_TOKENS rows, only zeros, or not finite.
    """
    squares = x.detach().flatten(0, -2).float().square()
    sizes = squares.sum(1, keepdim=True)
    if squares.shape[0] < MIN_TOKENS or not bool(torch.isfinite(sizes).all()):
        return None
    usual = sizes.median()
    means = (squares * (usual / sizes.clamp(min=1e-30)).clamp(max=1.0)).mean(0)
    whole = means.mean()
    if not float(whole) > 0:
        return None
    means = (means / whole).clamp(min=_LEAST)
    return torch.exp2((means.log2() * _STEPS).round() / _STEPS)


def _note(linear: nn.Module, args: tuple[Tensor, ...]) -> None:
    if args and not hasattr(linear, _ATTRIBUTE):
        setattr(linear, _ATTRIBUTE, importance_from(args[0]))
