"""The family of Qwen3-Omni's thinkers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from anygauge_hooks.media import MediaSpec, TowerSpec
from anygauge_hooks.megatron import MegatronModel, WeightRule
from anygauge_models import qwen3_moe
from anygauge_models.architecture import make_family
from anygauge_models.positions import Block, in_three_axes
from anygauge_models.qwen3_omni_moe import audio, config, vision
from anygauge_models.qwen3_omni_moe.config import prefix
from anygauge_models.qwen3_omni_moe.processor import make_processor
from anygauge_models.qwen3_vl.spec import rotary as of_qwen3_vl
from anygauge_models.qwen3_vl.vision import vision_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from anygauge_hooks.media import Media

__all__ = ["QWEN3_OMNI_MOE"]


def weight_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return one rule for each canonical tensor."""
    before = prefix(hf)
    rules = [*qwen3_moe.weight_rules(hf), *vision.tower_rules(hf), *audio.tower_rules(hf)]
    return [replace(rule, hf=tuple(f"{before}{name}" for name in rule.hf)) for rule in rules]


def unused_weights(hf: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the prefixes of the parts that speak."""
    return ("talker.", "code2wav.") if prefix(hf) else ()


def rotary(hf: Mapping[str, Any], positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of each position's angles.

    :param positions: ``[T]`` or ``[3, T]``, int64.
    :returns: Two ``[T, R]`` float32 tensors.
    """
    return of_qwen3_vl({"rope_theta": 1_000_000.0, **hf}, positions)


def _towers(hf: Mapping[str, Any]) -> Sequence[TowerSpec]:
    return vision.tower(hf), audio.tower(hf)


def _positions(hf: Mapping[str, Any], length: int, media: Sequence[Media]) -> NDArray[Any]:
    """Return positions in three axes. Sound counts on like text; a video is one block, with its own time."""
    hf = config.flat(hf)
    merge = vision_of(hf)["spatial_merge_size"]
    blocks = (
        Block(
            start,
            (medium.grid[0], medium.grid[1] // merge, medium.grid[2] // merge),
            round(medium.seconds * config.per_second(hf)),
        )
        for medium in media
        if medium.kind != "audio"
        for start, _ in medium.spans
    )
    return in_three_axes(length, blocks)


def _flops(hf: Mapping[str, Any], media: Media) -> float:
    flops = audio.flops if media.kind == "audio" else vision.flops
    return flops(config.flat(hf), media)


QWEN3_OMNI_MOE = make_family(
    "qwen3_omni_moe",
    *("Qwen3OmniMoeForConditionalGeneration", "Qwen3OmniMoeThinkerForConditionalGeneration"),
    model=MegatronModel(
        transformer_config=config.transformer_config,
        weight_rules=weight_rules,
        rotary=rotary,
        layers=qwen3_moe.layers,
    ),
    flops_per_token=qwen3_moe.flops_per_token,
    unused_weights=unused_weights,
    media=MediaSpec(
        make_processor=make_processor,
        towers=_towers,
        positions=_positions,
        flops=_flops,
        forbidden=lambda hf: config.forbidden(config.flat(hf)),
        served={"sglang": frozenset(("image", "video", "audio"))},
    ),
    defaults={
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32_768,
        "norm_topk_prob": True,
    },
)
