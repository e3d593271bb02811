"""Attention masks without family code.

transformers builds each layer's mask from a *mask function*: `fn(batch, head, q_pos, kv_pos)` says whether the query at
one position may see the key at another. Causal, sliding and chunked layers differ in nothing else. Registered under our
attention's name, the mask builder below keeps that function instead of a tensor, and a backend evaluates it on the true
positions of the tokens it is attending with. So no window setting is ever read from a config: families name, place and
switch them in too many ways (some pass no `sliding_window` to the attention function at all).

A tag lives for one forward. Positions are absolute within a request, so one tag serves every request of a pack.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import causal_mask_function

MaskFunction = Callable[[Any, Any, torch.Tensor, torch.Tensor], torch.Tensor]


class MaskTag:
    """One mask function of the model, handed to the layers in place of a mask tensor.

    `is_causal` is True only where the function is transformers' plain causal one, so that nothing need be evaluated;
    False says "evaluate me", not "not causal".
    """

    __slots__ = ("is_causal", "mask_function")

    def __init__(self, mask_function: MaskFunction) -> None:
        self.mask_function = mask_function
        self.is_causal = mask_function is causal_mask_function

    def allow(self, q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        """Whether queries may see keys: bool, in the broadcast shape of the two position tensors (any shapes)."""
        shape = torch.broadcast_shapes(q_pos.shape, kv_pos.shape)
        return self.mask_function(0, 0, q_pos, kv_pos).expand(shape)


CAUSAL = MaskTag(causal_mask_function)


def build_mask_tag(*, mask_function: MaskFunction, **_: Any) -> MaskTag:
    """The mask builder that is registered with transformers (AttentionMaskInterface)."""
    return MaskTag(mask_function)


def additive(allow: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask to be added to the scores: 0 where `allow`, minus infinity elsewhere."""
    return torch.zeros(allow.shape, dtype=dtype, device=allow.device).masked_fill_(~allow, float("-inf"))
