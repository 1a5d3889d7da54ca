"""GLM-4.5V and GLM-4.6V: GLM-4.5-Air's mixture of experts beside GLM-4.1V's tower (https://arxiv.org/abs/2507.01006)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from anygauge_hooks.media import MediaSpec
from anygauge_hooks.megatron import MegatronModel, WeightRule
from anygauge_hooks.models import ModelSpec, text_config
from anygauge_models import glm4_moe
from anygauge_models.architecture import next_token_layers, tiny_config, with_defaults, with_experts
from anygauge_models.glm4v import vision
from anygauge_models.glm4v.config import forbidden
from anygauge_models.glm4v.processor import make_processor
from anygauge_models.glm4v.spec import DECODER, in_sections
from anygauge_models.positions import frame_by_frame
from anygauge_models.rules import inside

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GLM4V_MOE"]


def decoder(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the decoder as one of GLM-4.5 with biases, without norms of queries and keys."""
    return {"attention_bias": True, **text_config(hf), "use_qk_norm": False}


def expert_layers(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers whose MLP is a mixture of experts: all but the first ones."""
    return glm4_moe.expert_layers(decoder(hf))


def transformer_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``TransformerConfig`` that the architecture fixes.

    :raises ConfigError: The checkpoint uses a variant that is not implemented.
    """
    return glm4_moe.transformer_config(decoder(hf))


def model_options(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return vocabulary size, longest sequence, and whether the embeddings are tied."""
    return glm4_moe.model_options(decoder(hf))


def flops_per_token(hf: Mapping[str, Any], sequence_length: int) -> float:
    """Return the floating-point operations of a forward pass per token, causal attention counted once."""
    return glm4_moe.flops_per_token(decoder(hf), sequence_length)


def weight_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return one rule for each canonical tensor."""
    return [*inside(DECODER, glm4_moe.weight_rules(decoder(hf))), *vision.tower_rules(hf)]


def unused_weights(hf: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the prefixes of the layers that predict tokens after the next."""
    return tuple(f"{DECODER}{each.removeprefix('model.')}" for each in next_token_layers(decoder(hf)))


def rotary(hf: Mapping[str, Any], positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of each position's angles.

    :param positions: ``[T]`` or ``[3, T]``, int64.
    :returns: Two ``[T, R]`` float32 tensors.
    """
    return glm4_moe.rotary(in_sections(decoder(hf)), positions)


GLM4V_MOE = with_defaults(
    ModelSpec(
        name="glm4v_moe",
        architectures=("Glm4vMoeForConditionalGeneration",),
        model_options=model_options,
        unused_weights=unused_weights,
        flops_per_token=flops_per_token,
        tiny=tiny_config("glm4v_moe"),
        media=MediaSpec(
            make_processor=make_processor,
            towers=partial(vision.towers, model_type="glm4v_moe_vision"),
            positions=frame_by_frame,
            flops=vision.flops,
            forbidden=forbidden,
        ),
        engines={
            "megatron": MegatronModel(
                transformer_config=transformer_config,
                weight_rules=weight_rules,
                rotary=rotary,
                layers=lambda hf: with_experts(decoder(hf), expert_layers(hf)),
            )
        },
    ),
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    max_position_embeddings=65_536,
)
