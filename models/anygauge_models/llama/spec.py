"""The Llama family."""

from __future__ import annotations

from anygauge_hooks.models import AssistantTurns, LayerKind, ModelSpec
from anygauge_models.architecture import with_defaults
from anygauge_models.llama import config
from anygauge_models.llama.rotary import rotary
from anygauge_models.llama.weights import weight_rules

__all__ = ["LLAMA"]

LLAMA = with_defaults(
    ModelSpec(
        name="llama",
        architectures=("LlamaForCausalLM",),
        transformer_config=config.transformer_config,
        model_options=config.model_options,
        weight_rules=weight_rules,
        rotary=rotary,
        layers=lambda hf: (LayerKind(),) * hf["num_hidden_layers"],
        flops_per_token=config.flops_per_token,
        tiny=config.tiny,
        assistant_turns=AssistantTurns(
            start="<|start_header_id|>assistant<|end_header_id|>\n\n", end="<|eot_id|>"
        ),
    ),
    num_key_value_heads=None,
    rms_norm_eps=1e-6,
    max_position_embeddings=2048,
)
