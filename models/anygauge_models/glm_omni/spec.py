"""The family of GLM that sees and hears."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from anygauge_hooks.media import MediaSpec, TowerSpec
from anygauge_hooks.megatron import Compose, LayerKind, MegatronModel, WeightRule
from anygauge_hooks.models import ModelSpec, TransformersModel
from anygauge_models.architecture import tiny_config
from anygauge_models.glm4v import vision
from anygauge_models.glm_omni import audio, config
from anygauge_models.glm_omni.config import decoder_family, decoder_model
from anygauge_models.glm_omni.processor import make_processor
from anygauge_models.positions import frame_by_frame

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from anygauge_hooks.media import Media

__all__ = ["GLM_OMNI"]

OWNER = "language_model"
"""The part of the model that has its output layer."""


def weight_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return one rule for each canonical tensor."""
    rules = [*decoder_model(hf).weight_rules(hf), *audio.tower_rules(hf)]
    return [replace(rule, canonical=f"{OWNER}.{rule.canonical}") for rule in rules]


def unused_weights(hf: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the prefixes of the layers that predict tokens after the next."""
    return tuple(decoder_family(hf).unused_weights(hf))


def rotary(hf: Mapping[str, Any], positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of each position's angles.

    :param positions: ``[T]`` or ``[3, T]``, int64.
    :returns: Two ``[T, R]`` float32 tensors.
    """
    return decoder_model(hf).rotary(hf, positions)


def _build(*, config: Any, hf: Mapping[str, Any], decoder: Any, compose: Compose, **ends: Any) -> Any:
    """Return this stage of the model, whose decoder and towers are its ``language_model``."""
    return compose.held(OWNER, compose(_towers(hf), config, decoder, **ends))


def _build_transformers(hf: Mapping[str, Any], dtype: torch.dtype) -> Any:
    from anygauge_models.glm_omni.composition import compose

    return compose(hf, dtype)


def _layers(hf: Mapping[str, Any]) -> Sequence[LayerKind]:
    return decoder_model(hf).layers(hf)


def _towers(hf: Mapping[str, Any]) -> Sequence[TowerSpec]:
    seeing = decoder_family(hf).media
    assert seeing is not None
    return (*seeing.towers(hf), audio.tower(hf))


def _positions(hf: Mapping[str, Any], length: int, media: Sequence[Media]) -> NDArray[Any]:
    """Return positions in three axes; sound counts on like text."""
    return frame_by_frame(hf, length, [each for each in media if each.kind != "audio"])


def _flops(hf: Mapping[str, Any], media: Media) -> float:
    flops = audio.flops if media.kind == "audio" else vision.flops
    return flops(hf, media)


GLM_OMNI = ModelSpec(
    name="glm_omni",
    architectures=("GlmOmniForConditionalGeneration",),
    model_options=config.model_options,
    unused_weights=unused_weights,
    flops_per_token=config.flops_per_token,
    tiny=tiny_config("glm_omni"),
    rollout_engines=("transformers",),
    media=MediaSpec(
        make_processor=make_processor,
        towers=_towers,
        positions=_positions,
        flops=_flops,
        forbidden=config.forbidden,
    ),
    engines={
        "megatron": MegatronModel(
            transformer_config=config.transformer_config,
            weight_rules=weight_rules,
            rotary=rotary,
            layers=_layers,
            build=_build,
            output_owner=OWNER,
        ),
        "transformers": TransformersModel(build=_build_transformers),
    },
)
