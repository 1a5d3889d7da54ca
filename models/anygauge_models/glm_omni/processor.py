"""Images, video and sound of GLM that sees and hears, on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from anygauge_hooks.media import Content, Decoded, Measured
from anygauge_models.audio import FRAME_RATE, RATE, check_settings, frames_of, log_mels
from anygauge_models.glm4v.processor import Processor as Seeing
from anygauge_models.glm4v.processor import make_processor as make_seeing
from anygauge_models.glm_omni.audio import FEWEST, features_of, window_of
from anygauge_models.glm_omni.config import audio_of, token_of

if TYPE_CHECKING:
    from anygauge_hooks.media import Header, MediaKind, MediaLimits

__all__ = ["make_processor"]

_MARK = "<|begin_of_audio|><|pad|><|end_of_audio|>"


def make_processor(directory: Path, hf: Mapping[str, Any]) -> Processor:
    """Return the processor of a model.

    :raises ConfigError: Its settings are another family's.
    """
    mels = audio_of(hf)["num_mel_bins"]
    check_settings(directory, "glm_omni", mels)
    seeing = make_seeing(directory, hf)
    return Processor(
        kinds={**seeing.kinds, "audio": token_of(hf, "audio")},
        marks={**seeing.marks, "audio": _MARK},
        seeing=seeing,
        mels=mels,
        window=window_of(hf),
    )


@dataclass(slots=True, kw_only=True)
class Processor:
    """A ``MediaProcessor``: GLM-4.1V's for what is seen."""

    kinds: Mapping[MediaKind, int]
    marks: Mapping[MediaKind, str]
    seeing: Seeing
    mels: int
    window: int
    """Frames of sound that are heard together."""

    def measure(self, kind: MediaKind, header: Header, limits: MediaLimits) -> Measured:
        """Return what a medium of this header becomes.

        :raises MediaError: The model cannot take it.
        """
        if kind != "audio":
            return self.seeing.measure(kind, header, limits)
        frames = frames_of(header, limits, FEWEST)
        pieces = (("", features_of(frames, self.window)),)
        return Measured((frames, 1, 1), (0, 0), pieces, seconds=frames / FRAME_RATE)

    def load(self, kind: MediaKind, raw: Decoded, measured: Measured) -> Content:
        """Return the content; of sound, whole windows, and as ``seconds`` how long it is without silence."""
        if kind != "audio":
            return self.seeing.load(kind, raw, measured)
        assert raw.samples is not None
        size = self.window * RATE // FRAME_RATE
        windows = [
            log_mels(
                raw._replace(samples=raw.samples[at * size : (at + 1) * size]),
                min(self.window, measured.grid[0] - at * self.window),
                self.mels,
                window=self.window,
            )
            for at in range(-(-measured.grid[0] // self.window))
        ]
        return Content("audio", np.concatenate(windows), measured.seconds)

    def fingerprint(self) -> str:
        """Return what distinguishes this processor's contents from another's."""
        return repr(self)
