"""Images and video of Qwen3-VL on the host: sizes, frames, and the text between frames."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge_hooks.media import Measured
from anygauge_models.image_processing import Budget, Patches, at_least, checked_settings, fitting_size
from anygauge_models.qwen3_vl.vision import DEVIATION, MEAN, vision_of
from anygauge_models.vision import patch_of

if TYPE_CHECKING:
    from anygauge_hooks.media import Header, MediaKind, MediaLimits

__all__ = ["forbidden", "make_processor", "processor_with"]

_IMAGE, _VIDEO = Budget(65_536, 16_777_216), Budget(4096, 25_165_824)
"""Pixels in the published models."""
_START, _END = "<|vision_start|>", "<|vision_end|>"
_MARKS: Mapping[MediaKind, str] = {
    "image": f"{_START}<|image_pad|>{_END}",
    "video": f"{_START}<|video_pad|>{_END}",
}


def placeholders(hf: Mapping[str, Any]) -> dict[MediaKind, int]:
    """Return the tokens that hold the places of features."""
    return {"image": hf.get("image_token_id", 151_655), "video": hf.get("video_token_id", 151_656)}


def forbidden(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens that hold places."""
    return tuple(placeholders(hf).values())


def make_processor(directory: Path, hf: Mapping[str, Any]) -> Processor:
    """Return the processor of a model.

    :raises ConfigError: Its settings are another family's.
    """
    return processor_with(directory, hf, "qwen3_vl", placeholders(hf))


def processor_with(
    directory: Path, hf: Mapping[str, Any], family: str, kinds: Mapping[MediaKind, int]
) -> Processor:
    """Return the processor of a model of this family or of one like it.

    :param kinds: The tokens that hold places.
    :raises ConfigError: Its settings are another family's.
    """
    sizes = patch_of(vision_of(hf))
    image, video = checked_settings(directory, family, sizes, MEAN, DEVIATION)
    return Processor(
        kinds=kinds,
        marks=_MARKS,
        **sizes._asdict(),
        image=Budget.of(image, _IMAGE),
        video=Budget.of(video, _VIDEO),
        fewest_frames=video.get("min_frames") or 4,
        most_frames=video.get("max_frames") or 768,
    )


@dataclass(slots=True, kw_only=True)
class Processor(Patches):
    """A ``MediaProcessor``. A video is a row of images with their times before them."""

    image: Budget
    video: Budget
    fewest_frames: int
    most_frames: int

    def measure(self, kind: MediaKind, header: Header, limits: MediaLimits) -> Measured:
        """Return what an image or a video of this header becomes.

        :raises MediaError: The model cannot take it.
        """
        if kind == "image":
            size = fitting_size(header.size, self.side, self.image.within(limits))
            return Measured(self.grid(1, size), size, (("", self.features(size)),))
        return self._video(header, limits)

    def _video(self, header: Header, limits: MediaLimits) -> Measured:
        times = self.whole_times(header, limits, self.fewest_frames, self.most_frames)
        count = len(times)
        # transformers rounds the frames before it compares, and takes those that there are to correct.
        size = fitting_size(
            at_least(header.size, self.side),
            self.side,
            self.video.within(limits, count),
            frames=count,
            counted=round(count / self.temporal) * self.temporal,
        )
        shown = times + times[-1:] * (-count % self.temporal)
        middles = [
            (shown[first] + shown[first + self.temporal - 1]) / 2
            for first in range(0, len(shown), self.temporal)
        ]
        return Measured(
            self.grid(len(middles), size),
            size,
            _with_times(middles, self.features(size)),
            seconds=(times[-1] - times[0]) / (count - 1) * self.temporal,
            times=times,
        )


def _with_times(times: list[float], count: int) -> tuple[tuple[str, int], ...]:
    """Return the pieces of a video: before each frame comes its time."""
    texts = [f"{_END if number else ''}<{time:.1f} seconds>{_START}" for number, time in enumerate(times)]
    return (*((text, count) for text in texts), (_END, 0))
