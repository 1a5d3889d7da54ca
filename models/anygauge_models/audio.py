"""Sound on the host: how long a recording is in frames, and its spectrum as Whisper has it."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from anygauge_hooks.errors import MediaError
from anygauge_models.architecture import unsupported
from anygauge_models.image_processing import settings

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from anygauge_hooks.media import Decoded, Header, MediaLimits

__all__ = ["FRAME_RATE", "RATE", "check_settings", "frames_of", "log_mels"]

RATE = 16_000
"""Samples a second."""
_HOP, _WINDOW = 160, 400
"""Samples from one frame to the next, and in a frame."""
FRAME_RATE = RATE // _HOP
"""Frames a second."""
_FEWEST = 2
"""Frames of a recording: half a frame is mirrored at both of its ends."""


def check_settings(directory: Path, family: str, mels: int) -> None:
    """Refuse a directory whose features are other ones than those that :func:`log_mels` makes.

    :param mels: Bands that the tower takes.
    :raises ConfigError: It says so.
    """
    values = settings(directory, "audio")
    needed = {
        "sampling_rate": RATE,
        "hop_length": _HOP,
        "n_fft": _WINDOW,
        "feature_size": mels,
        "dither": 0.0,
    }
    for key, needs in needed.items():
        if values.get(key, needs) != needs:
            raise unsupported(family, key, values[key], needs, "preprocessor_config.json")


def frames_of(header: Header, limits: MediaLimits, fewest: int = _FEWEST) -> int:
    """Return how many frames a recording has.

    :param fewest: Fewest frames that it may have.
    :raises MediaError: It is too short or too long.
    """
    frames = round(header.duration * RATE) // _HOP
    if frames < fewest:
        raise MediaError(
            f"It is a recording of {header.duration:.3f} seconds, and {fewest / FRAME_RATE} are the fewest.",
            hint="Drop the row.",
        )
    if header.duration > limits.max_seconds:
        raise MediaError(
            f"It is a recording of {header.duration:.1f} seconds, and media.max_seconds is "
            f"{limits.max_seconds:g}.",
            hint="Cut it, or raise media.max_seconds.",
        )
    return frames


def log_mels(raw: Decoded, frames: int, mels: int, *, window: int = 0) -> NDArray[np.float32]:
    """Return the logarithm of a recording's power in each band of the mel scale.

    As Whisper has it (https://arxiv.org/abs/2212.04356 section 2.2); what is quieter than the loudest by more
    than 80 dB is as quiet as that.

    :param raw: At :data:`RATE`.
    :param frames: Number of frames, from :func:`frames_of`.
    :param mels: Bands.
    :param window: Frames to which silence is added at the end before anything is computed; 0 adds none.
    :returns: ``[frames, mels]``, or ``[window, mels]``.
    """
    assert raw.samples is not None
    if raw.rate != RATE:
        raise ValueError(f"Sound has {raw.rate} samples a second here, and {RATE} are needed")
    samples = _of_length(raw.samples, frames * _HOP)
    lengths: dict[str, Any] = (
        {"padding": "max_length", "max_length": window * _HOP} if window else {"padding": "longest"}
    )
    extracted = _extractor(mels)(
        samples, sampling_rate=RATE, truncation=False, return_tensors="np", **lengths
    )
    features: NDArray[np.float32] = np.ascontiguousarray(extracted["input_features"][0].T, np.float32)
    return features


def _of_length(samples: NDArray[Any], wanted: int) -> NDArray[Any]:
    """Return samples of as many frames as a header has said, which may be wrong by a few."""
    if len(samples) < wanted:
        return np.pad(samples, (0, wanted - len(samples)))
    return samples[: wanted + _HOP - 1]


@lru_cache(maxsize=4)
def _extractor(mels: int) -> Any:
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=mels, hop_length=_HOP, n_fft=_WINDOW, sampling_rate=RATE)
