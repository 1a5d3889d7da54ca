"""Placeholder expansion: from the tokens of a text with marks to a sequence with room for features."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from anygauge.data.problems import BadMediaError
from anygauge_hooks.errors import ConfigError
from anygauge_hooks.media import Measured, Media, MediaKind, MediaProcessor

__all__ = ["Expander", "Measurement"]


class Measurement(NamedTuple):
    """A medium that was measured, and not yet placed."""

    kind: MediaKind
    measured: Measured
    key: str
    source: str


class Expander:
    """Replaces media marks by their placeholder tokens.

    A mark is found by its tokens. The placeholder inside it is repeated; where a medium has text of its own
    between placeholders, as a video has, the whole mark is replaced.

    :param tokenizer: A Hugging Face tokenizer.
    :param marks: The template's text for one medium of each kind that there is.
    :raises ConfigError: The token that holds the place of a kind is not among those of its mark.
    """

    def __init__(self, processor: MediaProcessor, tokenizer: Any, marks: Mapping[MediaKind, str]) -> None:
        self._processor = processor
        self._tokenizer = tokenizer
        self._marks = {kind: self._encode(text) for kind, text in marks.items()}
        for kind in marks:
            self._check(kind)
        self._reserved = {*processor.kinds.values(), *self._unexpanded()}
        self._texts: dict[str, list[int]] = {}

    def expand(
        self, tokens: Sequence[int], waiting: Iterator[Measurement], start: int = 0
    ) -> tuple[list[int], list[Media]]:
        """Return the tokens of a sequence and its media.

        :param tokens: Tokens of a text with marks.
        :param waiting: Media of this text and those that follow it, in order.
        :param start: Tokens that stand before these in the sequence.
        :raises BadMediaError: Marks and media differ, or the text itself holds a placeholder token.
        """
        expanded: list[int] = []
        media: list[Media] = []
        position = 0
        while (mark := self._next_mark(tokens, position)) is not None:
            place, kind = mark
            expanded += self._plain(tokens[position:place])
            medium = next(waiting, None)
            if medium is None or medium.kind != kind:
                raise BadMediaError(f"holds {self._processor.marks[kind]!r} in its text")
            spans: list[tuple[int, int]] = []
            for ids, count in self._pieces(medium):
                expanded += ids
                if count:
                    spans.append((start + len(expanded), count))
                    expanded += [self._processor.kinds[kind]] * count
            measured = medium.measured
            media.append(
                Media(kind, medium.key, tuple(spans), measured.grid, measured.seconds, medium.source)
            )
            position = place + len(self._marks[kind])
        return expanded + self._plain(tokens[position:]), media

    def has_mark(self, tokens: Sequence[int]) -> bool:
        """Return whether a medium stands among tokens."""
        return self._next_mark(tokens, 0) is not None

    def _check(self, kind: MediaKind) -> None:
        """Refuse a kind whose place is held by a token that no mark has."""
        kinds, marks = self._processor.kinds, self._processor.marks
        held = kinds[kind]
        # The frames of a video may be images to a model, and have their token.
        owners = [other for other in kinds if kinds[other] == held]
        if any(held in self._encode(marks[other]) for other in owners):
            return
        owner = owners[0]
        listed = ", ".join(
            f"{token} {self._tokenizer.decode([token])!r}" for token in self._encode(marks[owner])
        )
        raise ConfigError(
            f"Token {held} is the placeholder of {kind}, as {owner}_token_id in the model's "
            f"config.json (or its family's, if that has none), and the tokenizer makes other tokens of the "
            f"mark {marks[owner]!r}: {listed or 'none'}.",
            hint="Take config.json and the tokenizer's files from one checkpoint; or write into config.json "
            "the id that the tokenizer has for the token in the middle of the mark.",
        )

    def _unexpanded(self) -> Iterator[int]:
        """Yield the tokens of marks that never stand in a sequence: their places are another kind's."""
        for kind, text in self._processor.marks.items():
            if self._processor.kinds[kind] not in (mark := self._encode(text)):
                yield from mark

    def _plain(self, tokens: Sequence[int]) -> list[int]:
        """Return tokens that are text.

        :raises BadMediaError: One of them holds the place of features.
        """
        if not self._reserved.isdisjoint(tokens):
            token = next(token for token in tokens if token in self._reserved)
            raise BadMediaError(
                f"holds {self._tokenizer.decode([token])!r} in its text, which is a placeholder of media",
                hint="Write <image>, <video> or <audio>, and take the token out.",
            )
        return list(tokens)

    def _pieces(self, medium: Measurement) -> list[tuple[list[int], int]]:
        """Return the tokens that stand before each run of placeholders, and how many these are."""
        pieces = medium.measured.pieces
        if any(text for text, _ in pieces):
            return [(self._known(text), count) for text, count in pieces]
        mark = self._marks[medium.kind]
        place = mark.index(self._processor.kinds[medium.kind])
        return [(mark[:place], sum(count for _, count in pieces)), (mark[place + 1 :], 0)]

    def _next_mark(self, tokens: Sequence[int], start: int) -> tuple[int, MediaKind] | None:
        """Return where the next mark begins, and whose it is."""
        places = ((_find(tokens, mark, start), kind) for kind, mark in self._marks.items())
        return min(((place, kind) for place, kind in places if place >= 0), default=None)

    def _known(self, text: str) -> list[int]:
        if text not in self._texts:
            self._texts[text] = self._encode(text)
        return self._texts[text]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def _find(tokens: Sequence[int], wanted: list[int], start: int) -> int:
    """Return where some tokens begin among others, or -1."""
    last = len(tokens) - len(wanted)
    while start <= last:
        try:
            start = tokens.index(wanted[0], start, last + 1)
        except ValueError:
            return -1
        if list(tokens[start : start + len(wanted)]) == wanted:
            return start
        start += 1
    return -1
