"""GLM-4.5V and GLM-4.6V: GLM-4.5-Air's mixture of experts beside GLM-4.1V's tower (https://arxiv.org/abs/2507.01006)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from anygauge_hooks.megatron import MegatronModel, WeightRule
from anygauge_hooks.models import text_config
from anygauge_models import glm4_moe
from anygauge_models.architecture import make_family, next_token_layers, with_config
from anygauge_models.glm4v import vision
from anygauge_models.glm4v.spec import DECODER, MEDIA, in_sections
from anygauge_models.rules import inside

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GLM4V_MOE"]


def decoder(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the decoder as one of GLM-4.5 with biases, without norms of queries and keys."""
    return {"attention_bias": True, **text_config(hf), "use_qk_norm": False}


def weight_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return one rule for each canonical tensor."""
    return [*inside(DECODER, glm4_moe.weight_rules(hf)), *vision.tower_rules(hf)]


def unused_weights(hf: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the prefixes of the layers that predict tokens after the next."""
    return tuple(f"{DECODER}{each.removeprefix('model.')}" for each in next_token_layers(hf))


def rotary(hf: Mapping[str, Any], positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of each position's angles.

    :param positions: ``[T]`` or ``[3, T]``, int64.
    :returns: Two ``[T, R]`` float32 tensors.
    """
    return glm4_moe.rotary(in_sections(hf), positions)


GLM4V_MOE = with_config(
    make_family(
        "glm4v_moe",
        "Glm4vMoeForConditionalGeneration",
        model=MegatronModel(
            transformer_config=glm4_moe.transformer_config,
            weight_rules=weight_rules,
            rotary=rotary,
            layers=glm4_moe.layers,
        ),
        flops_per_token=glm4_moe.flops_per_token,
        unused_weights=unused_weights,
        media=replace(MEDIA, towers=partial(vision.towers, model_type="glm4v_moe_vision")),
        defaults={**glm4_moe.DEFAULTS, "max_position_embeddings": 65_536},
    ),
    decoder,
)
