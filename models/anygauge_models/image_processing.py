"""Images and frames on the host: what a checkpoint says of their size, and how they are resized to it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from anygauge_hooks.errors import ConfigError, MediaError
from anygauge_hooks.media import Content

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from anygauge_hooks.media import Decoded, Header, Measured, MediaKind, MediaLimits
    from anygauge_models.vision import PatchSizes

__all__ = [
    "Budget",
    "Patches",
    "at_least",
    "checked_settings",
    "content_of",
    "fitting_size",
    "frame_times",
    "resized",
    "settings",
]

LARGEST_RATIO = 200
"""Largest aspect ratio of an image."""
UNKNOWN_RATE = 24.0
"""Frames a second of a video that does not say."""
_FILES: Mapping[str, tuple[tuple[str, str | None], ...]] = {
    "image": (("processor_config.json", "image_processor"), ("preprocessor_config.json", None)),
    "video": (
        ("processor_config.json", "video_processor"),
        ("video_preprocessor_config.json", None),
        ("preprocessor_config.json", None),
    ),
    "audio": (("processor_config.json", "feature_extractor"), ("preprocessor_config.json", None)),
}
"""Where transformers looks for settings, in its order."""
_MADE: Mapping[str, Any] = {
    "do_resize": True,
    "resample": 3,  # cubic splines, by Pillow's number
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "cap_pixels_per_frame": False,
}
"""How every family makes pixels, as transformers' settings say it."""


class Budget(NamedTuple):
    """How many pixels an image may have, or a video in all of its frames."""

    smallest: int
    largest: int

    @classmethod
    def of(cls, settings: Mapping[str, Any], default: Budget) -> Budget:
        """Return what settings of a processor say; ``min_pixels`` and ``max_pixels`` go before ``size``.

        :raises ConfigError: They say a size otherwise than by a number of pixels.
        """
        given = settings.get("size", {"shortest_edge": default.smallest, "longest_edge": default.largest})
        size = given if isinstance(given, Mapping) else {}
        low, high = settings.get("min_pixels"), settings.get("max_pixels")
        low = size.get("shortest_edge") if low is None else low
        high = size.get("longest_edge") if high is None else high
        if not isinstance(low, int | float) or not isinstance(high, int | float):
            own = {key: settings.get(key) for key in ("size", "min_pixels", "max_pixels")}
            raise ConfigError(
                f"The checkpoint's {', '.join(f'{key} = {value}' for key, value in own.items())} do not say "
                "the fewest and the most pixels of an image.",
                hint="Give its size a shortest_edge and a longest_edge, in pixels of the whole image, in "
                "preprocessor_config.json or its like.",
            )
        return cls(int(low), int(high))

    def within(self, limits: MediaLimits, frames: int = 1) -> Budget:
        """Return it with a run's own limits, which are those of one frame."""
        low = self.smallest if limits.min_pixels is None else limits.min_pixels * frames
        high = self.largest if limits.max_pixels is None else limits.max_pixels * frames
        return Budget(min(low, high), high)


def settings(directory: Path, kind: MediaKind) -> dict[str, Any]:
    """Return what a model's directory says of its processor for a kind; nothing if it has no file.

    :raises ConfigError: A file is not a JSON object.
    """
    for name, part in _FILES[kind]:
        if (path := directory / name).is_file():
            values = _read(path)
            if part is None:
                return values
            if isinstance(inside := values.get(part), dict):
                return inside
    return {}


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}.", hint="Download the file again.") from error
    if not isinstance(value, dict):
        raise ConfigError(
            f"{path} holds {type(value).__name__}, not an object.", hint="Download the file again."
        )
    return value


def checked_settings(
    directory: Path, family: str, sizes: PatchSizes, mean: Sequence[float], deviation: Sequence[float]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a model's directory says of its processors for images and for video.

    :param sizes: Sizes of patches, as the tower has them.
    :param mean: Mean of pixels from 0 to 1, by color; with ``deviation`` it normalizes them on the device.
    :raises ConfigError: They are made otherwise than the family makes them.
    """
    needed = {
        "image_mean": list(mean),
        "image_std": list(deviation),
        "patch_size": sizes.patch,
        "merge_size": sizes.merge,
        "temporal_patch_size": sizes.temporal,
        **_MADE,
    }
    image, video = settings(directory, "image"), settings(directory, "video")
    for values in (image, video):
        for key, needs in needed.items():
            if not _agree(given := values.get(key), needs):
                raise ConfigError(
                    f"The checkpoint's {key} = {given} is not supported by the {family} family, "
                    f"which needs {needs}.",
                    hint="Check the settings of its processor, preprocessor_config.json or one like it, and "
                    "the vision_config of its config.json.",
                )
    return image, video


def _agree(given: Any, needs: Any) -> bool:
    """Return whether a setting is what is needed; one that is null counts as not given."""
    try:
        return given is None or bool(np.allclose(given, needs))
    except (TypeError, ValueError):  # no number, or another number of them
        return False


def at_least(size: tuple[int, int], side: int) -> tuple[int, int]:
    """Return a size that has its proportions and no side below one."""
    if min(size) < 1 or min(size) >= side:
        return size
    scale = max(side / size[0], side / size[1])
    return int(size[0] * scale), int(size[1] * scale)


def fitting_size(
    size: tuple[int, int], factor: int, budget: Budget, frames: int = 1, counted: int | None = None
) -> tuple[int, int]:
    """Return the size nearest to that of an image whose sides are whole patches, within a budget.

    :param size: Height and width.
    :param factor: Divisor of both sides of the result.
    :param frames: Frames of a video, which share the budget.
    :param counted: As how many frames they count before they are found to be too large or too small.
    :raises MediaError: No size keeps its proportions.
    """
    height, width = size
    if min(size) < 1 or max(size) > LARGEST_RATIO * min(size):
        raise MediaError(
            f"It is {width}x{height} pixels, and one side may be {LARGEST_RATIO} times the other at most.",
            hint="Crop it, or drop the row.",
        )
    fitted = [round(side / factor) * factor for side in size]
    pixels = frames * height * width
    total = (counted or frames) * fitted[0] * fitted[1]
    if total > budget.largest:
        shrink = math.sqrt(pixels / budget.largest)
        fitted = [max(factor, math.floor(side / shrink / factor) * factor) for side in size]
    elif total < budget.smallest:
        grow = math.sqrt(budget.smallest / pixels)
        fitted = [math.ceil(side * grow / factor) * factor for side in size]
    return fitted[0], fitted[1]


def frame_times(frames: int, rate: float, wanted: float, fewest: int, most: int) -> tuple[float, ...]:
    """Return the seconds at which frames of a video are taken, evenly from its first to its last.

    :param frames: Frames that it has.
    :param rate: Frames that it has a second; 0 if it does not say.
    :param wanted: Frames that are taken of a second.
    :param fewest: Fewest frames that are taken, if it has so many.
    """
    rate = rate or UNKNOWN_RATE
    count = min(max(int(frames / rate * wanted), fewest), most, frames)
    return tuple(float(index) / rate for index in np.linspace(0, frames - 1, count).round())


def resized(frames: Iterable[NDArray[Any]], size: tuple[int, int]) -> NDArray[np.uint8]:
    """Return frames as Pillow resizes them with cubic splines.

    :param frames: RGB, uint8 ``[H, W, 3]`` each.
    :param size: Height and width.
    :returns: ``[frames, height, width, 3]``.
    """
    from PIL import Image

    height, width = size
    return np.stack(
        [
            frame
            if frame.shape[:2] == size
            else np.asarray(Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC))
            for frame in frames
        ]
    )


def content_of(kind: MediaKind, raw: Decoded, measured: Measured, temporal: int) -> Content:
    """Return the content of an image or a video: resized, and whole patches in time.

    :param temporal: Frames of a patch; the last frame fills up one that is not whole.
    """
    frames = resized(raw.frames, measured.size)
    if kind == "image":
        return Content("image", frames[0])
    missing = -len(frames) % temporal
    whole = np.concatenate([frames, np.repeat(frames[-1:], missing, 0)]) if missing else frames
    return Content("video", whole, measured.seconds)


@dataclass(slots=True, kw_only=True)
class Patches:
    """Cutting resized images into patches, which the processors of all families share."""

    kinds: Mapping[MediaKind, int]
    marks: Mapping[MediaKind, str]
    patch: int
    """Pixels of a patch's side."""
    merge: int
    """Patches of a feature's side."""
    temporal: int
    """Frames of a patch."""

    def load(self, kind: MediaKind, raw: Decoded, measured: Measured) -> Content:
        """Return the content: resized, and whole patches in time."""
        return content_of(kind, raw, measured, self.temporal)

    def fingerprint(self) -> str:
        """Return what distinguishes this processor's contents from another's."""
        return repr(self)

    @property
    def side(self) -> int:
        """Pixels of a feature's side."""
        return self.patch * self.merge

    def grid(self, time: int, size: tuple[int, int]) -> tuple[int, int, int]:
        """Return the patches of something of this size.

        :param time: Patches in time.
        :param size: Height and width in pixels.
        """
        return time, size[0] // self.patch, size[1] // self.patch

    def features(self, size: tuple[int, int]) -> int:
        """Return how many features one patch in time of this size becomes."""
        return (size[0] // self.side) * (size[1] // self.side)

    def whole_times(self, header: Header, limits: MediaLimits, fewest: int, most: int) -> tuple[float, ...]:
        """Return the seconds at which frames of a video are taken, as :func:`frame_times` does.

        :raises MediaError: They are fewer than those of a patch.
        """
        most = min(limits.max_frames, most)
        times = frame_times(header.frames, header.fps, limits.fps, fewest, most)
        if len(times) < self.temporal:
            raise MediaError(
                f"It is a video of {header.frames} frames, {len(times)} of which are taken, and a patch "
                f"takes {self.temporal}.",
                hint="Give a single frame as an image, or raise media.max_frames.",
            )
        return times
