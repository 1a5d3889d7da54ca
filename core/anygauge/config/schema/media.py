"""Images, video and sound."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from anygauge.config.schema.section import Positive, Seconds, Section

__all__ = ["Media"]


class Media(Section):
    """Images, video and sound of prompts; ``data.multimodal_keys`` says where rows have them."""

    root: Path | None = None
    """Directory that relative paths in rows start from; ``None`` takes that of the data file."""
    allow_urls: bool = False
    """Fetch media that rows give as ``http`` or ``https`` URLs."""
    allow_private_urls: bool = False
    """Also fetch from addresses that are not public: this host, private networks and the cloud's metadata
    service; and through the proxies that the environment names."""
    timeout_s: Seconds = 10.0
    """Longest time for one URL, in seconds: name resolution, connections, redirects and the last byte."""
    max_bytes: Positive = 64 * 2**20
    """Largest file."""
    max_image_pixels: Annotated[int, Field(gt=0, le=178_956_970)] = 50_000_000
    """Largest image, or frame of a video, before it is resized; Pillow itself ends at 178,956,970."""
    max_video_pixels: Positive = 20_000_000_000
    """Largest video: height x width x all of its frames, of which ``max_frames`` are taken."""
    max_per_sample: Positive = 16
    """Most media in one row, and in one conversation with tools."""
    min_pixels: Positive | None = None
    """Smaller images are enlarged; ``None`` takes the limit of the model's processor."""
    max_pixels: Positive | None = None
    """Larger images are shrunk; ``None`` takes the limit of the model's processor."""
    fps: Annotated[float, Field(gt=0)] = 2.0
    """Frames sampled from each second of a video."""
    max_frames: Positive = 64
    """Most frames of a video."""
    max_seconds: Seconds = 30.0
    """Longest recording, in seconds."""
    on_error: Literal["stop", "drop"] = "stop"
    """Action for a row whose media cannot be read: stop the run, or drop the row and count it."""
    threads: Positive = 4
    """Threads that decode media."""
    store: Literal["auto", "files", "ray"] = "auto"
    """Store of decoded media for all processes: files in shared memory, for a run on one host, or Ray's
    object store; ``auto`` takes the one that fits."""
