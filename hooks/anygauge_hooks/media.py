"""Images, video and sound: how they accompany tokens, and how a model family processes them.

Contents never travel with samples. A sample names each medium by its key; whoever needs the pixels takes them
from the host's :class:`MediaStore`, where they are once, whatever the number of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from numpy.typing import NDArray
    from torch import Tensor, nn

__all__ = [
    "Content",
    "Decoded",
    "Header",
    "Measured",
    "Media",
    "MediaKind",
    "MediaLimits",
    "MediaProcessor",
    "MediaSpec",
    "MediaStore",
    "TowerSpec",
]

MediaKind = Literal["image", "video", "audio"]


class Media(NamedTuple):
    """One image, video or recording of a sample.

    Example::

        Media(kind="image", key="5be1…", spans=((4, 64),), grid=(1, 16, 16))
    """

    kind: MediaKind
    key: str
    """Hex digest of the raw bytes, the processor's fingerprint, the grid and the kind: equal keys are equal
    contents."""
    spans: tuple[tuple[int, int], ...]
    """Start and count of its placeholders in the sample's tokens; several for the frames of a video."""
    grid: tuple[int, int, int]
    """Patches in time, height and width; of sound, frames of features, 1 and 1."""
    seconds: float = 0.0
    """Seconds between two patches in time; 0 for images."""
    source: str = ""
    """File or row that it came from, for errors."""

    @property
    def num_tokens(self) -> int:
        """How many placeholders it has."""
        return sum(count for _, count in self.spans)

    def moved(self, by: int) -> Media:
        """Return it with its placeholders ``by`` tokens further on."""
        return self._replace(spans=tuple((start + by, count) for start, count in self.spans))


class Header(NamedTuple):
    """Media properties read without decoding."""

    size: tuple[int, int] = (0, 0)
    """Height and width in pixels, as shown: after the turn that a camera asks for."""
    frames: int = 1
    fps: float = 0.0
    duration: float = 0.0
    """Seconds."""
    format: str = ""


class Decoded(NamedTuple):
    """A decoded file, before a family's processor has seen it."""

    frames: Sequence[NDArray[Any]] = ()
    """RGB on white, uint8 ``[height, width, 3]``."""
    times: Sequence[float] = ()
    """Seconds at which frames of a video are shown."""
    samples: NDArray[Any] | None = None
    """Sound: one channel, float32 ``[samples]``."""
    rate: int = 0
    """Samples per second."""


class Content(NamedTuple):
    """Decoded content, the source of a tower's inputs; small enough to keep for every prompt of a step."""

    kind: MediaKind
    data: NDArray[Any]
    """Image: uint8 ``[H, W, 3]``, resized to whole patches. Video: uint8 ``[frames, H, W, 3]``. Sound:
    float32 ``[frames, mels]``."""
    seconds: float = 0.0
    """As in :class:`Media`."""


class Measured(NamedTuple):
    """Size of a media item after processing, known from its header alone."""

    grid: tuple[int, int, int]
    size: tuple[int, int]
    """Height and width to which frames are resized; 0, 0 for sound."""
    pieces: tuple[tuple[str, int], ...]
    """Text and the number of placeholders after it, in order: ``(("", 64),)`` for an image; a video's frames
    may have their time between them. Where there is text, the pieces stand in the place of the whole mark of
    the template, and otherwise in that of its placeholder."""
    seconds: float = 0.0
    """As in :class:`Media`."""
    times: tuple[float, ...] = ()
    """Times of a video's sampled frames, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """Limits of media; ``None`` takes the model family's own setting."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    """Larger images are made smaller, in their own proportions."""
    fps: float = 2.0
    """Frames that are taken of a second of video."""
    max_frames: int = 64
    max_seconds: float = 30.0
    """Longest recording of audio, in seconds; a longer one is an error."""


class MediaProcessor(Protocol):
    """Turns files into contents for one model. Works on the host, and needs no torch."""

    kinds: Mapping[MediaKind, int]
    """Media kinds that the model takes, each with the token that holds the place of its features in
    sequences."""
    marks: Mapping[MediaKind, str]
    """The chat template's text for one medium: ``"<|vision_start|><|image_pad|><|vision_end|>"``."""

    def measure(self, kind: MediaKind, header: Header, limits: MediaLimits) -> Measured:
        """Return the size after processing of a medium with this header.

        :raises MediaError: The model cannot take it: too narrow, too short, too long.
        """

    def load(self, kind: MediaKind, raw: Decoded, measured: Measured) -> Content:
        """Return the content: frames resized to ``measured.size``, or features of sound."""

    def fingerprint(self) -> str:
        """Return a string that identifies the processor's settings, for caches."""


class MediaStore(Protocol):
    """Contents by key, seen by every process that asks for them; each is held once per host."""

    def put(self, key: str, content: Content) -> None:
        """Keep a content. One that is there already stays."""

    def has(self, key: str) -> bool:
        """Return whether the content is there."""

    def get(self, key: str) -> Content:
        """Return a content, read-only, without a copy where the host's memory is shared.

        :raises KeyError: It is not there.
        """

    def drop(self, keys: Iterable[str]) -> None:
        """Forget contents; keys that are not there are passed over. Arrays in use stay valid."""

    def bytes(self) -> int:
        """Return how many bytes of contents there are."""

    def close(self) -> None:
        """Close this handle; the store's creator removes its contents from the host."""


def _no_levels(hf: Mapping[str, Any]) -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSpec:
    """A module that turns contents into features in the place of placeholder tokens."""

    name: str
    """Attribute of the model, and the first part of its tensors' canonical names: ``"visual"``."""
    kinds: frozenset[MediaKind]
    build: Callable[[Mapping[str, Any]], nn.Module]
    """Builds the module from the Hugging Face config, on torch's current default device and dtype."""
    inputs: Callable[[Mapping[str, Any], Sequence[Content], torch.device], Mapping[str, Any]]
    """From the Hugging Face config and contents to the module's keyword arguments: all contents packed one
    after another, pixels normalized on the device, what depends on grids alone made on the host. Under
    ``"lengths"`` are the attention lengths as host integers, which the engine takes out; where layers
    attend within different sequences, by the name of the argument that holds their boundaries."""
    outputs: Callable[[Any], tuple[Tensor, Sequence[Tensor]]]
    """From what the module returns to features ``[N, D]``, in order of the contents, and further features
    ``[N, D]`` that are added after the first decoder layers, one per layer (deepstack)."""
    blank: Callable[[Mapping[str, Any]], Content]
    """The smallest content, for a micro-batch without any."""
    levels: Callable[[Mapping[str, Any]], int] = _no_levels
    """How many decoder layers get further features."""
    hf_prefixes: tuple[str, ...] = ()
    """How its tensors' names begin in checkpoints, where they are unused if the tower is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSpec:
    """Media support of a model family."""

    make_processor: Callable[[Path, Mapping[str, Any]], MediaProcessor]
    """Makes the processor from a model's directory and its Hugging Face config."""
    towers: Callable[[Mapping[str, Any]], Sequence[TowerSpec]]
    positions: Callable[[Mapping[str, Any], int, Sequence[Media]], NDArray[Any]]
    """From the Hugging Face config, the length of a sequence and its media to rotary positions of time,
    height and width, int64 ``[3, S]``."""
    flops: Callable[[Mapping[str, Any], Media], float]
    """Floating-point operations of a tower's forward pass over one medium."""
    forbidden: Callable[[Mapping[str, Any]], Sequence[int]]
    """Tokens that the policy may not sample: those that hold places."""
    served: Mapping[str, frozenset[MediaKind]] = field(default_factory=dict)
    """Kinds that servers of a rollout engine see as the trainer does, by the engine's name; of engines that
    are not named, images."""
