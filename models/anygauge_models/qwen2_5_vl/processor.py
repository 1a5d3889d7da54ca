"""Images of Qwen2.5-VL on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge_hooks.media import Measured
from anygauge_models.glm4v.vision import IMAGE_DEVIATION, IMAGE_MEAN
from anygauge_models.image_processing import Budget, Patches, checked_settings, fitting_size
from anygauge_models.qwen2_5_vl.vision import vision_of
from anygauge_models.qwen3_vl.processor import placeholders
from anygauge_models.vision import patch_of

if TYPE_CHECKING:
    from anygauge_hooks.media import Header, MediaKind, MediaLimits

__all__ = ["make_processor"]

_IMAGE = Budget(3136, 1_003_520)
"""Pixels in transformers; published models have their own."""


def make_processor(directory: Path, hf: Mapping[str, Any]) -> Processor:
    """Return the processor of a model.

    :raises ConfigError: Its settings are another family's.
    """
    sizes = patch_of(vision_of(hf))
    image, _ = checked_settings(directory, "qwen2_5_vl", sizes, IMAGE_MEAN, IMAGE_DEVIATION)
    return Processor(
        kinds={"image": placeholders(hf)["image"]},
        marks={"image": "<|vision_start|><|image_pad|><|vision_end|>"},
        **sizes._asdict(),
        image=Budget.of(image, _IMAGE),
    )


@dataclass(slots=True, kw_only=True)
class Processor(Patches):
    """A ``MediaProcessor``."""

    image: Budget

    def measure(self, kind: MediaKind, header: Header, limits: MediaLimits) -> Measured:
        """Return what an image of this header becomes.

        :raises MediaError: The model cannot take it.
        """
        size = fitting_size(header.size, self.side, self.image.within(limits))
        return Measured(self.grid(1, size), size, (("", self.features(size)),))
