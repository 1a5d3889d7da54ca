"""Gemma 3 4B, 12B and 27B, whose checkpoints have a vision tower: trained on text alone.

Tokens of an image attend to each other in both directions, in the decoder too. Attention here is causal, so
images are refused. Exports have the tower of the model that training started from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from anygauge_hooks.megatron import WeightRule, megatron_model, with_megatron
from anygauge_hooks.models import TransformersModel, text_config
from anygauge_models.architecture import tiny_config, with_config
from anygauge_models.gemma3 import GEMMA3
from anygauge_models.rules import inside

if TYPE_CHECKING:
    import torch

__all__ = ["GEMMA3_MULTIMODAL"]

_DEFAULTS = {"vocab_size": 262_208, "num_attention_heads": 8, "max_position_embeddings": 131_072}
"""Sizes that published configs leave out, as transformers has them."""
_TOWER = ("vision_tower", "multi_modal_projector")
"""Modules of the vision tower, and prefixes of its tensors."""


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {**_DEFAULTS, **text_config(hf)}


def _tower_prefixes(hf: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{name}." for name in _TOWER)


def _weight_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    return inside("language_model.model.", megatron_model(GEMMA3).weight_rules(hf))


def _build(hf: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Return the model of transformers without its tower."""
    from transformers import AutoModelForImageTextToText, Gemma3Config

    parts = {key: hf[key] for key in ("text_config", "vision_config", "mm_tokens_per_image") if key in hf}
    tied = bool(hf.get("tie_word_embeddings", True))
    config = Gemma3Config(**parts, tie_word_embeddings=tied)
    model = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    for name in _TOWER:
        setattr(model.model, name, None)
    model._keys_to_ignore_on_load_unexpected = [rf"^{name}\." for name in _TOWER]
    return model


_SPEC = replace(
    with_megatron(GEMMA3, replace(megatron_model(GEMMA3), weight_rules=_weight_rules)),
    name="gemma3_multimodal",
    architectures=("Gemma3ForConditionalGeneration",),
    tiny=tiny_config("gemma3_multimodal"),
    unused_weights=_tower_prefixes,
    carried_weights=_tower_prefixes,
    refused_media="tokens of an image attend to each other in both directions, which attention here does not",
)
_SPEC = with_config(_SPEC, _read)
GEMMA3_MULTIMODAL = replace(_SPEC, engines={**_SPEC.engines, "transformers": TransformersModel(build=_build)})
