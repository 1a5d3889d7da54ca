"""Images, video and sound of Qwen3-Omni on the host. A video is not cut into frames, and has no text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge_hooks.media import Content, Measured
from anygauge_models.audio import check_settings, frames_of, log_mels
from anygauge_models.image_processing import Budget, Patches, checked_settings, content_of, fitting_size
from anygauge_models.qwen3_omni_moe.audio import features_of
from anygauge_models.qwen3_omni_moe.config import audio_of, flat, per_second, token_of
from anygauge_models.qwen3_vl.vision import DEVIATION, MEAN, vision_of
from anygauge_models.vision import patch_of

if TYPE_CHECKING:
    from anygauge_hooks.media import Decoded, Header, MediaKind, MediaLimits

__all__ = ["make_processor"]

_IMAGE, _FRAME = Budget(3136, 12_845_056), Budget(131_072, 786_432)
"""Pixels of an image in the published models, and of a frame of a video in transformers."""
_MARKS: Mapping[MediaKind, str] = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
    "audio": "<|audio_start|><|audio_pad|><|audio_end|>",
}


def make_processor(directory: Path, hf: Mapping[str, Any]) -> Processor:
    """Return the processor of a model.

    :raises ConfigError: Its settings are another family's.
    """
    hf = flat(hf)
    mels = audio_of(hf)["num_mel_bins"]
    sizes = patch_of(vision_of(hf))
    image, video = checked_settings(directory, "qwen3_omni_moe", sizes, MEAN, DEVIATION)
    check_settings(directory, "qwen3_omni_moe", mels)
    return Processor(
        kinds={kind: token_of(hf, kind) for kind in _MARKS},
        marks=_MARKS,
        **sizes._asdict(),
        mels=mels,
        per_second=per_second(hf),
        image=Budget.of(image, _IMAGE),
        frame=_FRAME,
        fewest_frames=video.get("min_frames") or 4,
        most_frames=video.get("max_frames") or 768,
    )


@dataclass(slots=True, kw_only=True)
class Processor(Patches):
    """A ``MediaProcessor``."""

    mels: int
    per_second: int
    """Increment of the temporal position per second."""
    image: Budget
    frame: Budget
    """Pixel budget of each frame of a video."""
    fewest_frames: int
    most_frames: int

    def measure(self, kind: MediaKind, header: Header, limits: MediaLimits) -> Measured:
        """Return what a medium of this header becomes.

        :raises MediaError: The model cannot take it.
        """
        if kind == "audio":
            frames = frames_of(header, limits)
            return Measured((frames, 1, 1), (0, 0), (("", features_of(frames)),))
        if kind == "image":
            return self._seen(header, self.image.within(limits), 1)
        return self._video(header, limits)

    def _video(self, header: Header, limits: MediaLimits) -> Measured:
        times = self.whole_times(header, limits, self.fewest_frames, self.most_frames)
        count = len(times)
        shown = self._seen(header, self.frame.within(limits), -(-count // self.temporal))
        # Positions in time are whole numbers, to which the time between patches is rounded.
        between = (times[-1] - times[0]) / (count - 1) * self.temporal
        return shown._replace(seconds=max(1, round(between * self.per_second)) / self.per_second, times=times)

    def _seen(self, header: Header, budget: Budget, time: int) -> Measured:
        size = fitting_size(header.size, self.side, budget)
        return Measured(self.grid(time, size), size, (("", time * self.features(size)),))

    def load(self, kind: MediaKind, raw: Decoded, measured: Measured) -> Content:
        """Return the content: frames resized, and whole patches in time; or features of sound."""
        if kind == "audio":
            return Content("audio", log_mels(raw, measured.grid[0], self.mels))
        return content_of(kind, raw, measured, self.temporal)
