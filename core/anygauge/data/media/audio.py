"""Sound as one channel of 16 kHz: WAV by the standard library, the rest by soundfile."""

from __future__ import annotations

import wave
from math import gcd
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from anygauge.data.media.decode import decoding
from anygauge.data.media.sources import Source
from anygauge_hooks.errors import MediaError
from anygauge_hooks.media import Decoded, Header

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["RATE", "audio_header", "decode_audio", "resampled"]

RATE = 16_000
"""Samples per second that features are made of."""
_ZEROS = 32
"""Crossings of the resampling filter on each side."""
_BETA = 8.0
"""Of its Kaiser window: what is above the band is brought down by 80 dB."""
_BLOCK = 2**14
"""Samples that are made at once."""


def audio_header(source: Source) -> Header:
    """Return the length of a recording.

    :raises MediaError: It cannot be read, or nothing that reads it is installed; a clause.
    """
    with source.open() as file, decoding():
        if _is_plain(file):
            with wave.open(file) as sound:
                count, rate = sound.getnframes(), sound.getframerate()
            return Header(duration=count / rate, format="WAV")
        info = _soundfile().info(file)
        return Header(duration=info.frames / info.samplerate, format=str(info.format))


def decode_audio(source: Source) -> Decoded:
    """Return a recording: its channels averaged, at :data:`RATE`.

    :raises MediaError: It cannot be decoded; a clause.
    """
    with source.open() as file, decoding():
        samples, rate = _read_wave(file) if _is_plain(file) else _soundfile().read(file, dtype="float32")
    if samples.ndim > 1:
        samples = samples.mean(1)
    return Decoded(samples=resampled(np.asarray(samples, np.float32), rate, RATE), rate=RATE)


def resampled(samples: NDArray[Any], rate: int, wanted: int) -> NDArray[Any]:
    """Return a recording at another rate, by a sinc filter under a Kaiser window.

    :param samples: float32 ``[N]``.
    :returns: float32 ``[round(N * wanted / rate)]``; what is above half of the lower rate is gone.
    """
    if rate == wanted or not len(samples):
        return samples
    divisor = gcd(rate, wanted)
    up, down = wanted // divisor, rate // divisor
    cut = min(1.0, up / down)
    half = int(np.ceil(_ZEROS / cut))
    taps = np.arange(-half + 1, half + 1)
    away = taps[None, :] - np.arange(up)[:, None] / up
    window = np.i0(_BETA * np.sqrt(np.clip(1 - (away / half) ** 2, 0, None))) / np.i0(_BETA)
    phases = (cut * np.sinc(cut * away) * window).astype(np.float32)
    phases /= phases.sum(1, keepdims=True)
    padded = np.concatenate([np.zeros(half, np.float32), samples, np.zeros(half, np.float32)])
    count = round(len(samples) * up / down)
    made = np.empty(count, np.float32)
    for first in range(0, count, _BLOCK):
        places = np.arange(first, min(first + _BLOCK, count)) * down
        around = padded[(places // up + half)[:, None] + taps]
        made[first : first + len(places)] = np.einsum("nt,nt->n", around, phases[places % up])
    return made


def _is_plain(file: BinaryIO) -> bool:
    """Return whether a file is WAV with integer samples, which the standard library reads."""
    begin = file.read(22)
    file.seek(0)
    return begin[:4] == b"RIFF" and begin[8:12] == b"WAVE" and begin[20:22] == b"\x01\x00"


def _read_wave(file: BinaryIO) -> tuple[NDArray[Any], int]:
    with wave.open(file) as sound:
        width, channels, rate = sound.getsampwidth(), sound.getnchannels(), sound.getframerate()
        raw = sound.readframes(sound.getnframes())
    raw = raw[: len(raw) // (width * channels) * width * channels]
    if width == 1:
        samples = np.frombuffer(raw, np.uint8).astype(np.float32) / 128 - 1
    else:
        # The upper four bytes, of which the lowest are 0 where there are fewer.
        wide = np.zeros((len(raw) // width, 4), np.uint8)
        wide[:, 4 - width :] = np.frombuffer(raw, np.uint8).reshape(-1, width)
        samples = wide.view("<i4")[:, 0].astype(np.float32) / 2**31
    return samples.reshape(-1, channels), rate


def _soundfile() -> Any:
    try:
        import soundfile
    except (ImportError, OSError) as error:
        raise MediaError(
            "is a recording that needs soundfile, which is not installed.",
            hint="pip install 'anygauge[media]', or convert it to WAV with integer samples.",
        ) from error
    return soundfile
