"""Audio decoding to one channel of 16 kHz: WAV by the standard library, the rest by soundfile."""

from __future__ import annotations

import wave
from math import gcd
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from anygauge.data.media.decode import decoding
from anygauge.data.media.sources import Source
from anygauge.extras import install_extra
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
"""Beta of the filter's Kaiser window: attenuates frequencies above the band by 80 dB."""
_BLOCK = 2**14
"""Samples that are made at once."""
_MAX_COEFFICIENTS = 2**22
"""Limit of the resampling filter, and of the filter's length times a block of samples.

The filter has ``2 * _ZEROS * max(rate, RATE) / gcd(rate, RATE)`` coefficients, each of which takes 40 bytes
while they are computed. Every rate up to 65,536 Hz fits, and above it the rates with a common factor:
88.2, 96, 176.4, 192, 352.8 and 384 kHz. A recording at 192,001 Hz would need 12 million coefficients.
"""
_MAX_CHANNELS = 64
"""Channels of a compressed recording. Vorbis has up to 255, and no array of microphones as many."""
_MAX_RATE = 384_000
"""Highest sample rate of audio hardware. At 2**31 Hz the filter is small, but longer than any recording."""


def audio_header(source: Source) -> Header:
    """Return the length of a recording.

    :raises MediaError: It cannot be read, or nothing that reads it is installed; a clause.
    """
    with source.open() as file, decoding():
        if _is_plain(file):
            with wave.open(file) as sound:
                count, rate = sound.getnframes(), sound.getframerate()
            _check_rate(rate)
            return Header(duration=count / rate, format="WAV")
        info = _soundfile().info(file)
        _check_rate(info.samplerate)
        return Header(duration=info.frames / info.samplerate, format=str(info.format))


def decode_audio(source: Source) -> Decoded:
    """Return a recording: its channels averaged, at :data:`RATE`.

    :raises MediaError: It cannot be decoded; a clause.
    """
    with source.open() as file, decoding():
        longest = source.settings.max_seconds
        samples, rate = _read_wave(file, longest) if _is_plain(file) else _read_other(file, longest)
        if samples.ndim > 1:
            samples = samples.mean(1)
        return Decoded(samples=resampled(np.asarray(samples, np.float32), rate, RATE), rate=RATE)


def _check_rate(rate: int) -> None:
    """Refuse a rate whose resampling filter is too large.

    :raises MediaError: A clause.
    """
    if not 0 < rate <= _MAX_RATE or _coefficients(rate) > _MAX_COEFFICIENTS:
        raise MediaError(
            f"has {rate} samples per second, a rate that cannot be resampled.",
            hint=f"Convert it to {RATE} Hz: any rate up to 65536 Hz is read, and 88.2, 96, 192 and 384 kHz.",
        )


def _coefficients(rate: int) -> int:
    return 2 * _ZEROS * max(rate, RATE) // gcd(rate, RATE)


def _check_length(count: int, rate: int, longest: float) -> None:
    """Refuse to decode what is longer than its header said when it was measured.

    :raises MediaError: A clause.
    """
    _check_rate(rate)
    if count > rate * longest:
        raise MediaError(
            f"is a recording of {count / rate:.1f} seconds, and media.max_seconds is {longest:g}.",
            hint="Cut it, or raise media.max_seconds.",
        )


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
    output = np.empty(count, np.float32)
    block = min(_BLOCK, _MAX_COEFFICIENTS // len(taps))
    for first in range(0, count, block):
        places = np.arange(first, min(first + block, count)) * down
        around = padded[(places // up + half)[:, None] + taps]
        output[first : first + len(places)] = np.einsum("nt,nt->n", around, phases[places % up])
    return output


def _is_plain(file: BinaryIO) -> bool:
    """Return whether a file is WAV with integer samples, which the standard library reads."""
    begin = file.read(22)
    file.seek(0)
    return begin[:4] == b"RIFF" and begin[8:12] == b"WAVE" and begin[20:22] == b"\x01\x00"


def _read_wave(file: BinaryIO, longest: float) -> tuple[NDArray[Any], int]:
    with wave.open(file) as sound:
        width, channels, rate = sound.getsampwidth(), sound.getnchannels(), sound.getframerate()
        _check_length(sound.getnframes(), rate, longest)
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


def _read_other(file: BinaryIO, longest: float) -> tuple[NDArray[Any], int]:
    with _soundfile().SoundFile(file) as sound:
        _check_length(sound.frames, sound.samplerate, longest)
        if sound.channels > _MAX_CHANNELS:
            raise MediaError(
                f"has {sound.channels} channels; at most {_MAX_CHANNELS} are read.", hint="Mix them to one."
            )
        # Silence is packed to nothing: 30 s of 255 channels in 52 KB would take 1.4 GB.
        blocks = sound.blocks(_BLOCK, dtype="float32", always_2d=True)
        averaged = [np.empty(0, np.float32), *(block.mean(1) for block in blocks)]
        return np.concatenate(averaged), sound.samplerate


def _soundfile() -> Any:
    try:
        import soundfile
    except (ImportError, OSError) as error:
        raise MediaError(
            "is a recording that needs soundfile, which is not installed.",
            hint=f"Convert it to WAV with integer samples, or {install_extra('media')}",
        ) from error
    return soundfile
