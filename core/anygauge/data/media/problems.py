"""Errors about a media file, with its place in the data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from anygauge_hooks.errors import MediaError
from anygauge_hooks.media import MediaKind

__all__ = ["check_number", "naming"]


def check_number(count: int, limit: int | None) -> None:
    """Refuse a conversation that shows too much.

    :param limit: ``media.max_per_sample``; ``None`` for any number.
    :raises MediaError: It has more media than that.
    """
    if limit is not None and count > limit:
        raise MediaError(
            f"A conversation has {count} media; media.max_per_sample allows {limit}.",
            hint="Raise media.max_per_sample, or let tools and agents show less.",
        )


@contextmanager
def naming(place: str, kind: MediaKind, number: int, source: str) -> Iterator[None]:
    """Put row, kind, number and source before a :class:`MediaError`, whose text is a clause or a sentence.

    :param place: File and line.
    :param number: From 1, among the row's media of its kind.
    """
    try:
        yield
    except MediaError as error:
        clause = str(error.args[0])
        where = ": ".join(part for part in (place, f"{kind} {number} ({source})") if part)
        raise MediaError(
            f"{where}{' ' if clause[:1].islower() else ': '}{clause}", hint=error.hint
        ) from error
