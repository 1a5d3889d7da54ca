"""Images and video of GLM-4.1V on the host: sizes, frames, and the text between frames."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge_hooks.media import Measured
from anygauge_models.glm4v.config import token_of, vision_of
from anygauge_models.glm4v.vision import IMAGE_DEVIATION, IMAGE_MEAN
from anygauge_models.image_processing import (
    Budget,
    Patches,
    at_least,
    checked_settings,
    fitting_size,
    frame_times,
)
from anygauge_models.vision import patch_of

if TYPE_CHECKING:
    from anygauge_hooks.media import Header, MediaKind, MediaLimits

__all__ = ["Processor", "make_processor"]

_IMAGE, _VIDEO = Budget(12_544, 11_760_000), Budget(12_544, 47_040_000)
"""Pixels in transformers; those of an image are counted once for each frame of a patch."""
_START, _END = "<|begin_of_image|>", "<|end_of_image|>"
_MARKS: Mapping[MediaKind, str] = {
    "image": f"{_START}<|image|>{_END}",
    "video": "<|begin_of_video|><|video|><|end_of_video|>",
}
_TENTHS = "Glm46V"
"""How the names of the processors begin that write the time of a frame in tenths of a second."""


def make_processor(directory: Path, hf: Mapping[str, Any]) -> Processor:
    """Return the processor of a model. Its directory says which of two ways to write times it has.

    :raises ConfigError: Its settings are another family's.
    """
    sizes = patch_of(vision_of(hf))
    image, video = checked_settings(directory, hf["model_type"], sizes, IMAGE_MEAN, IMAGE_DEVIATION)
    named = image.get("processor_class") or image.get("image_processor_type")
    return Processor(
        # The frames of a video are images to the model, and have their token.
        kinds=dict.fromkeys(_MARKS, token_of(hf, "image")),
        marks=_MARKS,
        **sizes._asdict(),
        image=Budget.of(image, _IMAGE),
        video=Budget.of(video, _VIDEO),
        in_tenths=named.startswith(_TENTHS) if named else hf["model_type"] == "glm46v",
    )


@dataclass(slots=True, kw_only=True)
class Processor(Patches):
    """A ``MediaProcessor``. A video is a row of images with their times after them."""

    image: Budget
    video: Budget
    in_tenths: bool
    """Whether the times of frames are written in tenths of a second; else in whole seconds."""

    def measure(self, kind: MediaKind, header: Header, limits: MediaLimits) -> Measured:
        """Return what an image or a video of this header becomes.

        :raises MediaError: The model cannot take it.
        """
        if kind == "image":
            size = self._size(header, self.image.within(limits, self.temporal), self.temporal)
            return Measured(self.grid(1, size), size, (("", self.features(size)),))
        times = frame_times(header.frames, header.fps, limits.fps, 1, limits.max_frames)
        count = len(times) + -len(times) % self.temporal
        size = self._size(header, self.video.within(limits, count), count)
        shown = times[:: self.temporal]
        return Measured(
            self.grid(len(shown), size),
            size,
            self._with_times(shown, self.features(size)),
            seconds=shown[1] - shown[0] if len(shown) > 1 else 0.0,
            times=times,
        )

    def _size(self, header: Header, budget: Budget, frames: int) -> tuple[int, int]:
        return fitting_size(at_least(header.size, self.side), self.side, budget, frames=frames)

    def _with_times(self, times: tuple[float, ...], count: int) -> tuple[tuple[str, int], ...]:
        """Return the pieces of a video: after each frame comes its time."""
        written = [f"{time:.1f} seconds" if self.in_tenths else str(int(time)) for time in times]
        before = ["<|begin_of_video|>", *(f"{_END}{time}" for time in written[:-1])]
        pieces = ((f"{text}{_START}", count) for text in before)
        return (*pieces, (f"{_END}{written[-1]}<|end_of_video|>", 0))
