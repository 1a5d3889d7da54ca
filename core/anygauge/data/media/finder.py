"""Media finder: the media of a row, measured by their headers and remembered until they are decoded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anygauge.config.schema import Media as Settings
from anygauge.data.media.contents import content_of, header_of, key_of
from anygauge.data.media.expand import Expander, Measurement
from anygauge.data.media.placeholders import Placed, find_placeholders
from anygauge.data.media.problems import naming
from anygauge.data.media.sources import Source, source_of
from anygauge.data.problems import BadMediaError
from anygauge_hooks.errors import MediaError
from anygauge_hooks.media import Content, Measured, MediaKind, MediaLimits, MediaProcessor

__all__ = ["FoundMedia", "MediaFinder", "media_limits"]


def media_limits(settings: Settings) -> MediaLimits:
    """Return the configured limits of media."""
    names = ("min_pixels", "max_pixels", "fps", "max_frames", "max_seconds")
    return MediaLimits(**{name: getattr(settings, name) for name in names})


@dataclass(frozen=True, slots=True)
class FoundMedia:
    """A medium of a row that was measured."""

    kind: MediaKind
    number: int
    """Among those of its kind in the row, from 1."""
    source: Source | None
    """``None`` once it is to be read from its row again."""
    measured: Measured
    key: str = ""
    place: str = ""
    """File and line of the row."""
    again: Callable[[], Source] | None = None
    """Reads the row again."""

    def measurement(self) -> Measurement:
        """Return the properties that determine the number of its placeholder tokens."""
        name = "" if self.source is None else self.source.name
        return Measurement(self.kind, self.measured, self.key, name)


class MediaFinder:
    """Finds the media of rows, and decodes those that were drawn.

    :param fields: Field of a row by kind.
    :param tokenizer: A Hugging Face tokenizer.
    :param kinds: Kinds of media that the run takes, of those that the model knows; ``None`` for all.
    """

    def __init__(
        self,
        settings: Settings,
        fields: Mapping[MediaKind, str],
        processor: MediaProcessor,
        tokenizer: Any,
        kinds: Collection[MediaKind] | None = None,
    ) -> None:
        self.settings = settings
        self.fields = fields
        self.processor = processor
        self.marks = {kind: mark for kind, mark in processor.marks.items() if kinds is None or kind in kinds}
        self.expander = Expander(processor, tokenizer, self.marks)
        self.drawn: dict[str, FoundMedia] = {}
        """Media drawn so far, by key; some hundred bytes each."""
        self.left_out: list[str] = []
        """Problems of rows dropped since the list was last taken."""
        self._limits = media_limits(settings)
        self._fingerprint = processor.fingerprint()

    def of(self, fields: Mapping[MediaKind, str]) -> MediaFinder:
        """Return one for rows with other fields, which remembers in the same place."""
        if fields == self.fields:
            return self
        other = copy(self)
        other.fields = fields
        return other

    def facts(self) -> dict[str, Any]:
        """Return all that decides how many tokens a medium has, as JSON can write it."""
        settings = self.settings.model_dump(mode="json", exclude={"threads", "store", "timeout_s"})
        return {"processor": self._fingerprint, **settings}

    def locate(self, row: Mapping[str, Any], prompt: Any, *, parts: bool) -> Placed:
        """Take the media of a row out of its prompt and its fields.

        :raises BadMediaError: Their number differs from that of the placeholders, or is too large.
        """
        given: dict[MediaKind, list[Any]] = {}
        for kind, key in self.fields.items():
            value = row.get(key)
            given[kind] = [] if value is None else value if isinstance(value, list) else [value]
            if None in given[kind]:
                raise BadMediaError(
                    f"has null as {kind} {given[kind].index(None) + 1} of field {key!r}",
                    hint="Take it out of the list, and its placeholder out of the prompt.",
                )
        placed = find_placeholders(prompt, given, self.marks, parts=parts)
        limit = self.settings.max_per_sample
        if len(placed.values) > limit:
            raise BadMediaError(
                f"has {len(placed.values)} media; media.max_per_sample allows {limit}",
                hint="Raise media.max_per_sample, or take media out of the rows.",
            )
        return placed

    def measure(
        self, values: Sequence[tuple[MediaKind, Any]], folder: Path | None, *, keyed: bool
    ) -> list[FoundMedia]:
        """Look at the headers of media.

        :param folder: Folder of the row's file; ``None`` for media that a tool shows.
        :param keyed: Whether all of their bytes are read, for their keys.
        :raises MediaError: One cannot be used; a clause with its kind, number and name.
        """
        counts: dict[MediaKind, int] = {}
        media = []
        for kind, value in values:
            counts[kind] = number = counts.get(kind, 0) + 1
            with naming("", kind, number, _name(kind, value) or ("in the row" if folder else "in a message")):
                media.append(self._measure(kind, number, value, folder or Path.cwd(), keyed))
        return media

    def remember(self, medium: FoundMedia, place: str, again: Callable[[], Source] | None) -> None:
        """Keep where a drawn medium is.

        :param again: Reads its row again; then bytes that are part of the row are not kept.
        """
        source = None if again is not None and medium.source and medium.source.is_large else medium.source
        self.drawn[medium.key] = replace(medium, source=source, place=place, again=again)

    def content(self, key: str) -> Content:
        """Return the content of a medium that was drawn.

        :raises KeyError: None has that key.
        :raises MediaError: It cannot be decoded.
        """
        medium = self.drawn[key]
        source = medium.source
        with naming(medium.place, medium.kind, medium.number, source.name if source else "in the row"):
            if source is None:
                assert medium.again is not None, "what is not kept can be read again"
                source = medium.again()
            return content_of(medium.kind, source, medium.measured, self.processor)

    def _measure(self, kind: MediaKind, number: int, value: Any, folder: Path, keyed: bool) -> FoundMedia:
        if kind not in self.marks:
            raise MediaError(
                f"is of a kind that the run does not take: it takes {', '.join(self.marks)}.",
                hint="Name it in data.multimodal_keys or model.modalities, if the model takes it.",
            )
        source = source_of(kind, value, self.settings.root or folder, self.settings)
        measured = self.processor.measure(kind, header_of(kind, source), self._limits)
        key = key_of(kind, source, measured, self._fingerprint) if keyed else ""
        return FoundMedia(kind, number, source, measured, key)


def _name(kind: MediaKind, value: Any) -> str:
    """Return what a row or a message calls a medium, for errors; nothing where that is its content."""
    while isinstance(value, Mapping):
        named = (value[key] for key in ("path", "url", kind, f"{kind}_url") if value.get(key) is not None)
        value = next(named, "")
    if isinstance(value, str):
        return value if len(value) < 200 and not value.startswith("data:") else ""
    return "" if isinstance(value, bytes) else type(value).__name__
