"""Video as frames, however it is given, and sound at one rate."""

from __future__ import annotations

import io
import sys
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from anygauge.config.schema import Data, DataFile
from anygauge.config.schema import Media as Settings
from anygauge.data.media.audio import RATE, audio_header, decode_audio, resampled
from anygauge.data.media.contents import content_of, header_of, key_of
from anygauge.data.media.finder import MediaFinder, media_limits
from anygauge.data.media.sources import Source, source_of
from anygauge.data.media.video import decode_video
from anygauge.data.source import FileSource
from anygauge_hooks.errors import MediaError
from anygauge_hooks.media import Content, Header, Measured

WriteRows = Callable[..., Path]
SHADES = (0, 40, 80, 120, 160, 200)


def frames() -> list[Image.Image]:
    return [Image.new("RGB", (16, 8), (shade, shade, shade)) for shade in SHADES]


def shades(content: Content) -> list[int]:
    return [int(frame[0, 0, 0]) for frame in content.data]


def raw(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def video_of(how: str, folder: Path) -> Any:
    pictures = frames()
    if how == "list":
        return [raw(each, "PNG") for each in pictures]
    if how == "folder":
        (folder / "clip").mkdir()
        for number, each in enumerate(pictures):
            each.save(folder / "clip" / f"{number}.png")
        (folder / "clip" / "notes.txt").write_text("no frame")
        return "clip"
    options = {"lossless": True} if how == "WEBP" else {}
    return raw(pictures[0], how, save_all=True, append_images=pictures[1:], duration=500, **options)


@pytest.mark.parametrize("how", ["list", "folder", "GIF", "WEBP", "PNG"])
def test_the_frames_of_a_video_are_the_same_however_it_is_given(
    how: str, processor: Any, tmp_path: Path
) -> None:
    source = source_of("video", video_of(how, tmp_path), tmp_path, Settings())
    header = header_of("video", source)
    assert (header.size, header.frames, round(header.fps, 3)) == ((8, 16), 6, 2.0)
    measured = processor.measure("video", header, media_limits(source.settings))
    assert shades(content_of("video", source, measured, processor)) == list(SHADES)
    fewer = processor.measure("video", header, media_limits(Settings(max_frames=2)))
    assert fewer.grid[0] == 1
    assert shades(content_of("video", source, fewer, processor)) == [SHADES[0], SHADES[-1]]
    assert key_of("video", source, measured, "") != key_of("video", source, fewer, "")


@pytest.mark.parametrize("how", ["list", "GIF"])
def test_frames_are_decoded_in_any_order_and_one_at_a_time(how: str, tmp_path: Path) -> None:
    source = source_of("video", video_of(how, tmp_path), tmp_path, Settings())
    times = [number / 2 for number in (4, 0, 0, 5, 3)]
    taken = decode_video(source, header_of("video", source), times).frames
    order = [int(frame[0, 0, 0]) for frame in taken]
    assert order == [SHADES[number] for number in (4, 0, 0, 5, 3)]
    assert (len(taken), taken[-2][0, 0, 0], len(taken[1:3])) == (5, SHADES[5], 2)


def test_a_video_that_ends_early_is_named(tmp_path: Path) -> None:
    source = source_of("video", video_of("GIF", tmp_path), tmp_path, Settings())
    longer = header_of("video", source)._replace(frames=9)
    with pytest.raises(MediaError, match="cannot be decoded: no more images in GIF file"):
        list(decode_video(source, longer, [0.0, 4.0]).frames)


def test_a_row_with_a_video_has_room_for_its_frames_and_their_times(
    vision_tokenizer: Any, processor: Any, tmp_path: Path, write_rows: WriteRows
) -> None:
    (tmp_path / "clip.gif").write_bytes(video_of("GIF", tmp_path))
    rows = write_rows({"prompt": "<video>?", "video": "clip.gif"})
    data = Data(
        train=(DataFile(path=str(rows)),), label_key=None, multimodal_keys={"video": "video"}, cache=tmp_path
    )
    reader = MediaFinder(Settings(), data.multimodal_keys, processor, vision_tokenizer)
    (prompt,) = FileSource(data, vision_tokenizer, media=reader).next(1)
    (medium,) = prompt.media
    pad = processor.kinds["video"]
    held = [place for place, token in enumerate(prompt.tokens) if token == pad]
    assert held == [place for start, count in medium.spans for place in range(start, start + count)]
    assert [count for _, count in medium.spans] == [2, 2, 2]
    text = vision_tokenizer.decode([token for token in prompt.tokens if token != pad])
    assert (
        text
        == "<s>"
        + "".join(f"<{time:.1f} seconds><|vision_start|><|vision_end|>" for time in (0.25, 1.25, 2.25))
        + "?"
    )
    assert reader.content(medium.key).data.shape == (6, 8, 16, 3)


def test_a_video_for_which_nothing_is_installed_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    source = source_of("video", b"\0\0\0\x18ftypmp42" + bytes(64), tmp_path, Settings())
    with pytest.raises(MediaError, match=r"needs PyAV.*\n.*anygauge\[media\]"):
        header_of("video", source)


def test_frames_of_different_sizes_are_seen_in_their_headers(tmp_path: Path) -> None:
    odd = [raw(Image.new("RGB", size), "PNG") for size in ((16, 8), (8, 16))]
    source = source_of("video", odd, tmp_path, Settings())
    with pytest.raises(MediaError, match=r"frames of different sizes: \(8, 16\) and \(16, 8\)"):
        header_of("video", source)


# -------------------------------------------------------------------------
# Sound
# -------------------------------------------------------------------------


def tone(rate: int, hertz: float, seconds: float = 0.5) -> NDArray[Any]:
    return np.sin(2 * np.pi * hertz * np.arange(round(rate * seconds)) / rate).astype(np.float32)


def recording(samples: NDArray[Any], rate: int, width: int) -> Source:
    """Return samples ``[N, channels]`` as a WAV file of integers of ``width`` bytes."""
    buffer = io.BytesIO()
    scaled = np.round(samples * (2 ** (8 * width - 1) - 1)).astype(np.int64)
    if width == 1:
        scaled += 128
    parts = scaled.astype("<i8").reshape(-1, 1).view(np.uint8)[:, :width]
    with wave.open(buffer, "wb") as sound:
        sound.setnchannels(samples.shape[1])
        sound.setsampwidth(width)
        sound.setframerate(rate)
        sound.writeframes(parts.tobytes())
    return Source("a.wav", Settings(), raw=buffer.getvalue())


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_wav_is_read_in_every_width_and_its_channels_are_averaged(width: int) -> None:
    left, right = tone(RATE, 440) * 0.5, tone(RATE, 880) * 0.5
    source = recording(np.stack([left, right], 1), RATE, width)
    assert audio_header(source).duration == pytest.approx(0.5)
    found = decode_audio(source)
    assert (found.rate, found.samples.dtype) == (RATE, np.float32)
    assert np.abs(found.samples - (left + right) / 2).max() < 2 ** (2 - 8 * min(width, 3))


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_a_tone_keeps_its_pitch_at_another_rate_and_what_is_too_high_is_gone(rate: int) -> None:
    found = resampled(tone(rate, 1000), rate, RATE)
    assert len(found) == RATE // 2
    inner = slice(RATE // 20, -RATE // 20)
    assert np.abs(found - tone(RATE, 1000))[inner].max() < 2e-3
    if rate > RATE:
        assert np.abs(resampled(tone(rate, 0.46 * rate), rate, RATE))[inner].max() < 2e-3


def test_a_broken_recording_is_named() -> None:
    source = Source("a.wav", Settings(), raw=b"RIFF\0\0\0\0WAVEfmt " + b"\x10\0\0\0\x01\0")
    with pytest.raises(MediaError, match="cannot be decoded"):
        audio_header(source)


def test_a_recording_for_which_nothing_is_installed_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(MediaError, match=r"needs soundfile.*\n.*anygauge\[media\]"):
        audio_header(Source("a.mp3", Settings(), raw=bytes(64)))


class Hears:
    """A processor of sound: one feature for 100 samples."""

    def load(self, kind: str, given: Any, measured: Measured) -> Content:
        return Content("audio", given.samples[: len(given.samples) // 100 * 100].reshape(-1, 100))


def test_sound_is_what_its_header_says() -> None:
    source = recording(tone(48_000, 440)[:, None], 48_000, 2)
    header: Header = audio_header(source)
    measured = Measured(grid=(80, 1, 1), size=(0, 0), pieces=(("", 80),))
    content = content_of("audio", source, measured, Hears())  # type: ignore[arg-type]
    assert content.data.shape == (round(header.duration * RATE) // 100, 100)
