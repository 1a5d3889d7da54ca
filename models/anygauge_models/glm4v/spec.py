"""The families of GLM-4.1V and GLM-4.6V."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from anygauge_hooks.media import MediaSpec
from anygauge_hooks.megatron import LayerKind, MegatronModel, WeightRule
from anygauge_models.architecture import make_family, tiny_config, with_config
from anygauge_models.glm4 import DENSE
from anygauge_models.glm4v import config, vision
from anygauge_models.glm4v.processor import make_processor
from anygauge_models.positions import frame_by_frame
from anygauge_models.rope import half_rotary, turning_part
from anygauge_models.rules import inside

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DECODER", "GLM4V", "GLM46V", "MEDIA", "in_sections"]

DECODER = "model.language_model."
"""How the decoder's names begin in checkpoints."""


def weight_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return one rule for each canonical tensor."""
    return [*inside(DECODER, DENSE.weight_rules(hf)), *vision.tower_rules(hf)]


def rotary(hf: Mapping[str, Any], positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of each position's angles.

    :param positions: ``[T]`` or ``[3, T]``, int64.
    :returns: Two ``[T, R]`` float32 tensors.
    """
    return _rotary(in_sections(hf), positions)


def in_sections(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return a decoder's config that says what transformers takes where sections are left out."""
    key = "rope_scaling" if text.get("rope_scaling") else "rope_parameters"
    return {**text, key: {"mrope_section": [8, 12, 12], **(text.get(key) or {})}}


_rotary = half_rotary(lambda hf: turning_part(hf, hf["head_dim"], 1.0))


MEDIA = MediaSpec(
    make_processor=make_processor,
    towers=vision.towers,
    positions=frame_by_frame,
    flops=vision.flops,
    forbidden=config.forbidden,
    served={"sglang": frozenset(("image", "video"))},
)

GLM4V = with_config(
    make_family(
        "glm4v",
        "Glm4vForConditionalGeneration",
        model=MegatronModel(
            transformer_config=DENSE.transformer_config,
            weight_rules=weight_rules,
            rotary=rotary,
            layers=lambda hf: (LayerKind(post_norms=True),) * hf["num_hidden_layers"],
        ),
        flops_per_token=DENSE.flops_per_token,
        media=MEDIA,
        defaults={"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 32_768},
    ),
    config.decoder,
)


GLM46V = replace(
    GLM4V, name="glm46v", architectures=("Glm46VForConditionalGeneration",), tiny=tiny_config("glm46v")
)
"""GLM-4.6V is GLM-4.1V, but for the text between the frames of a video: the processor knows both."""
