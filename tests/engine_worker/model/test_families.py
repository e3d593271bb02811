"""Models that would run wrongly are refused with the reason, and why each is refused is still true."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from engine_worker.model import attention
from engine_worker.model.errors import ModelError
from engine_worker.model.families import num_layers, refuse_config, refuse_module
from tests.engine_worker.model.tiny_models import FAMILIES, tiny_config, tiny_model

pytestmark = pytest.mark.engine

SMALL = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1}


@pytest.mark.parametrize("family", FAMILIES)
def test_served_families_are_accepted(family: str) -> None:
    module = tiny_model(family)
    refuse_config(module.config)
    refuse_module(module)
    assert num_layers(module) == 3


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("falcon", "across requests"),
        ("bloom", "ALiBi"),
        ("mpt", "ALiBi"),
        ("llama4_text", "temperature"),
    ],
)
def test_families_that_run_wrongly_are_refused_by_config(family: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        refuse_config(AutoConfig.for_model(family))


def test_a_multimodal_wrapper_is_judged_by_its_text_model() -> None:
    with pytest.raises(ModelError, match="temperature"):
        refuse_config(AutoConfig.for_model("llama4"))


def test_encoder_decoders_are_refused() -> None:
    with pytest.raises(ModelError, match="decoder-only"):
        refuse_config(AutoConfig.for_model("t5"))


@pytest.mark.parametrize("family", ["mamba", "jamba", "qwen3_next", "recurrent_gemma"])
def test_recurrent_models_are_refused(family: str) -> None:
    with pytest.raises(ModelError, match="recurrent state"):
        refuse_config(AutoConfig.for_model(family))


@pytest.mark.parametrize("family", ["openai-gpt", "gpt_neo", "xglm"])
def test_models_with_built_in_attention_are_refused(family: str) -> None:
    with pytest.raises(ModelError, match="built in"):
        refuse_config(AutoConfig.for_model(family))


def test_modules_are_judged_like_their_configs() -> None:
    with pytest.raises(ModelError, match="recurrent state"):
        refuse_module(AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **SMALL, state_size=4)))


def test_models_that_kept_another_attention_are_refused() -> None:
    """transformers may only warn and stay with sdpa, which would attend across all requests of a pack."""
    module = AutoModelForCausalLM.from_config(tiny_config("llama"), attn_implementation="sdpa")
    with pytest.raises(ModelError, match="stayed with sdpa"):
        refuse_module(module)


def test_models_without_a_head_are_refused() -> None:
    with pytest.raises(ModelError, match="no language-model head"):
        refuse_module(tiny_model("llama").model)


def test_every_refusal_says_what_to_do_instead() -> None:
    for family in ("falcon", "bloom", "t5", "llama4"):
        with pytest.raises(ModelError, match="another engine behind the gateway, or choose another model"):
            refuse_config(AutoConfig.for_model(family))


def test_sequence_to_sequence_modules_are_refused() -> None:
    config = AutoConfig.for_model("t5", vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(ModelError, match="decoder-only"):
        refuse_module(AutoModelForSeq2SeqLM.from_config(config))


def test_bloom_really_gets_around_the_attention_function() -> None:
    """The refusal's reason, so that it goes when a later transformers mends it."""
    attention.register()
    config = AutoConfig.for_model("bloom", vocab_size=50, hidden_size=16, n_layer=1, n_head=2)
    module = AutoModelForCausalLM.from_config(config)
    assert not module._can_set_attn_implementation()
    assert torch.isfinite(module(torch.tensor([[1, 2, 3]])).logits).all()
