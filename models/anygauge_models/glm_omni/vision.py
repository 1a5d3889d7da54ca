"""The vision tower of GLM that sees and hears: that of its decoder's family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anygauge_hooks.media import TowerSpec
from anygauge_models.glm4v.vision import flops
from anygauge_models.glm_omni.config import decoder_family

__all__ = ["flops", "towers"]


def towers(hf: Mapping[str, Any]) -> Sequence[TowerSpec]:
    """Return the tower of images and video."""
    media = decoder_family(hf).media
    assert media is not None
    return media.towers(hf)
