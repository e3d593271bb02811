"""Which models can be served, told before anything runs wrongly.

The rules are structural (what a class says about itself) with a short list of families whose modelling code gets around
the attention function. Whatever passes here still has to pass the self-test.
"""

from __future__ import annotations

import inspect

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from engine_worker.model.attention import NAME
from engine_worker.model.errors import ModelError

# Model type -> why. Each was found to run without an error, and wrongly.
_REFUSED = {
    "falcon": "its attention ignores the registered function and would attend across requests",
    "bloom": "its attention never calls the registered function, and its ALiBi bias is not implemented",
    "mpt": "its attention never calls the registered function, and its ALiBi bias is not implemented",
    "llama4": "its attention temperature counts positions from a cache that is not used here",
    "llama4_text": "its attention temperature counts positions from a cache that is not used here",
}
_MEND = "Serve it with another engine behind the gateway, or choose another model."


def refuse_config(config: PreTrainedConfig) -> None:
    """Raise ModelError for what the configuration and its modelling class rule out, before any weight is read."""
    model_type = config.model_type
    text_type = config.get_text_config(decoder=True).model_type
    for name in (model_type, text_type):
        if name in _REFUSED:
            raise ModelError(f"Models of type {name} can't be served: {_REFUSED[name]}. {_MEND}")
    if config.is_encoder_decoder:
        raise ModelError(f"{model_type} is an encoder-decoder model; only decoder-only models can be served. {_MEND}")
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        _refuse_class(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])


def refuse_module(module: PreTrainedModel) -> None:
    """Raise ModelError for what the loaded module rules out."""
    refuse_config(module.config)
    name = type(module).__name__
    if module.base_model is module:
        raise ModelError(f"{name} has no language-model head, so it can't generate. {_MEND}")
    for part in module.modules():
        if isinstance(part, PreTrainedModel):
            _refuse_class(type(part))
    accepted = _parameters(module)
    missing = [word for word in ("position_ids", "logits_to_keep") if word not in accepted]
    if missing:
        raise ModelError(f"{name} takes no {' and no '.join(missing)}, so requests can't be packed. {_MEND}")
    for part in module.modules():
        if isinstance(part, PreTrainedModel) and part.config._attn_implementation != NAME:
            raise ModelError(
                f"{type(part).__name__} did not take up paged attention and stayed with "
                f"{part.config._attn_implementation}. {_MEND}"
            )


def _refuse_class(kind: type[PreTrainedModel]) -> None:
    if getattr(kind, "_is_stateful", False):
        raise ModelError(
            f"{kind.__name__} keeps a recurrent state, which a paged cache of keys and values can't hold. {_MEND}"
        )
    if not kind._can_set_attn_implementation():
        raise ModelError(f"{kind.__name__} has its attention built in, so it can't be paged. {_MEND}")


def num_layers(module: PreTrainedModel) -> int:
    """Decoder layers that attend, by the configuration."""
    return int(module.config.get_text_config(decoder=True).num_hidden_layers)


def _parameters(module: PreTrainedModel) -> set[str]:
    """Arguments that the forward names, through its decorators; the base model counts for position_ids."""
    names = set(inspect.signature(module.forward).parameters)
    base = module.base_model
    if isinstance(base, torch.nn.Module) and "kwargs" in names:
        names |= set(inspect.signature(base.forward).parameters) & {"position_ids"}
    return names
