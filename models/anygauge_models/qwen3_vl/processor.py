"""Images and video of Qwen3-VL on the host: sizes, frames, and the text between frames."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge_hooks.errors import MediaError
from anygauge_hooks.media import Measured
from anygauge_models.pictures import (
    Budget,
    at_least,
    checked_settings,
    content_of,
    fitting_size,
    frame_times,
)
from anygauge_models.qwen3_vl.config import placeholders
from anygauge_models.qwen3_vl.vision import DEVIATION, MEAN, vision_of

if TYPE_CHECKING:
    from anygauge_hooks.media import Content, Decoded, Header, MediaKind, MediaLimits

__all__ = ["make_processor", "processor_with"]

_IMAGE, _VIDEO = Budget(65_536, 16_777_216), Budget(4096, 25_165_824)
"""Pixels in the published models."""
_START, _END = "<|vision_start|>", "<|vision_end|>"
_MARKS: Mapping[MediaKind, str] = {
    "image": f"{_START}<|image_pad|>{_END}",
    "video": f"{_START}<|video_pad|>{_END}",
}


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
    config = vision_of(hf)
    patch, merge, temporal = (
        config[key] for key in ("patch_size", "spatial_merge_size", "temporal_patch_size")
    )
    image, video = checked_settings(
        directory, family, mean=MEAN, deviation=DEVIATION, patch=patch, merge=merge, temporal=temporal
    )
    return Processor(
        kinds=kinds,
        marks=_MARKS,
        patch=patch,
        merge=merge,
        temporal=temporal,
        image=Budget.of(image, _IMAGE),
        video=Budget.of(video, _VIDEO),
        fewest_frames=video.get("min_frames") or 4,
        most_frames=video.get("max_frames") or 768,
    )


@dataclass(slots=True, kw_only=True)
class Processor:
    """A ``MediaProcessor``. A video is a row of images with their times before them."""

    kinds: Mapping[MediaKind, int]
    marks: Mapping[MediaKind, str]
    patch: int
    merge: int
    temporal: int
    image: Budget
    video: Budget
    fewest_frames: int
    most_frames: int

    def measure(self, kind: MediaKind, header: Header, limits: MediaLimits) -> Measured:
        """Return what an image or a video of this header becomes.

        :raises MediaError: The model cannot take it.
        """
        if kind == "image":
            size = fitting_size(header.size, self.patch * self.merge, self.image.within(limits))
            return Measured(self._grid(1, size), size, (("", self._features(size)),))
        return self._video(header, limits)

    def _video(self, header: Header, limits: MediaLimits) -> Measured:
        most = min(limits.max_frames, self.most_frames)
        times = frame_times(header.frames, header.fps, limits.fps, self.fewest_frames, most)
        count = len(times)
        if count < self.temporal:
            raise MediaError(
                f"It is a video of {header.frames} frames, {count} of which are taken, and a patch takes "
                f"{self.temporal}.",
                hint="Give a single frame as an image, or raise media.max_frames.",
            )
        factor = self.patch * self.merge
        # transformers rounds the frames before it compares, and takes those that there are to correct.
        size = fitting_size(
            at_least(header.size, factor),
            factor,
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
            self._grid(len(middles), size),
            size,
            _with_times(middles, self._features(size)),
            seconds=(times[-1] - times[0]) / (count - 1) * self.temporal,
            times=times,
        )

    def load(self, kind: MediaKind, raw: Decoded, measured: Measured) -> Content:
        """Return the content: resized, and whole patches in time."""
        return content_of(kind, raw, measured, self.temporal)

    def fingerprint(self) -> str:
        """Return what distinguishes this processor's contents from another's."""
        return repr(self)

    def _grid(self, time: int, size: tuple[int, int]) -> tuple[int, int, int]:
        return time, size[0] // self.patch, size[1] // self.patch

    def _features(self, size: tuple[int, int]) -> int:
        side = self.patch * self.merge
        return (size[0] // side) * (size[1] // side)


def _with_times(times: list[float], count: int) -> tuple[tuple[str, int], ...]:
    """Return the pieces of a video: before each frame comes its time."""
    texts = [f"{_END if number else ''}<{time:.1f} seconds>{_START}" for number, time in enumerate(times)]
    return (*((text, count) for text in texts), (_END, 0))
