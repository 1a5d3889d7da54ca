"""The Mistral family."""

from __future__ import annotations

from anygauge_hooks.models import AssistantTurns, LayerKind, ModelSpec
from anygauge_models.architecture import with_defaults
from anygauge_models.mistral import config
from anygauge_models.mistral.rotary import rotary
from anygauge_models.mistral.weights import weight_rules

__all__ = ["MISTRAL"]

MISTRAL = with_defaults(
    ModelSpec(
        name="mistral",
        architectures=("MistralForCausalLM",),
        transformer_config=config.transformer_config,
        model_options=config.model_options,
        weight_rules=weight_rules,
        rotary=rotary,
        layers=lambda hf: (LayerKind(),) * hf["num_hidden_layers"],
        flops_per_token=config.flops_per_token,
        tiny=config.tiny,
        assistant_turns=AssistantTurns(start="[/INST]", end="</s>"),
    ),
    num_key_value_heads=8,
    rms_norm_eps=1e-6,
    max_position_embeddings=131_072,
)
