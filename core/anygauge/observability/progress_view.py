"""Live lines of a run on a terminal, laid out for its width."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from anygauge.observability.control_characters import visible

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["ProgressView", "format_duration", "stable_number"]

_BAR = "\N{BOX DRAWINGS HEAVY HORIZONTAL}"
_SHORTEST, _LONGEST = 8, 40
"""Columns of the bar; where there is less room, there is none."""
_GAP = "  "
_NAME = 24
"""Characters of a run's name."""


@dataclass(slots=True)
class ProgressView:
    """State of a run as the terminal shows it."""

    name: str
    step: int
    total: int
    phase: str = ""
    values: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the last step, by label."""
    tail: Sequence[str] = ()
    """Further items, such as the best score."""

    def lines(self, width: int, elapsed_s: float, left_s: float | None) -> list[Text]:
        """Return the lines: where the run is, and below it its numbers.

        Numbers keep their width and their places from step to step.

        :param left_s: Seconds that the run still takes; ``None`` before its first step.
        """
        from rich.text import Text

        items = [f"{label} {stable_number(value)}" for label, value in self.values.items()]
        rows = _packed([visible(item) for item in (*items, *self.tail)], width)
        return [self._head(width, elapsed_s, left_s), *map(Text, rows)]

    def _head(self, width: int, elapsed_s: float, left_s: float | None) -> Text:
        from rich.text import Text

        digits = len(str(self.total))
        left = "-:--" if left_s is None else format_duration(left_s)
        name = visible(self.name) if len(self.name) <= _NAME else f"{visible(self.name)[: _NAME - 3]}..."
        parts = [
            f"{self.step:>{digits}}/{self.total}",
            format_duration(elapsed_s),
            f"{left} left",
            self.phase,
        ]
        rest = _GAP.join(filter(None, parts))
        room = width - len(name) - len(rest) - 2 * len(_GAP)
        bar = min(room, _LONGEST) if room >= _SHORTEST else 0
        done = round(bar * min(self.step / max(self.total, 1), 1.0))
        head = Text(name, style="bold", no_wrap=True, overflow="ellipsis")
        if bar:
            head.append(_GAP, style="not bold").append(_BAR * done, style="not bold cyan")
            head.append(_BAR * (bar - done), style="not bold dim")
        return head.append(_GAP + rest, style="not bold")


def _packed(items: Sequence[str], width: int) -> Iterator[str]:
    """Yield rows with as many items as fit; an item alone may be wider."""
    row = ""
    for item in items:
        longer = f"{row}{_GAP}{item}" if row else item
        if row and len(longer) > width:
            yield row
            longer = item
        row = longer
    if row:
        yield row


def stable_number(value: float) -> str:
    """Return a number in seven characters, or eight with a sign, so that what follows it stays in place.

    >>> [stable_number(value) for value in (0.5, 31.25, 1234.5, 1.2e-7)]
    [' 0.5000', ' 31.250', '  1,234', '1.2e-07']
    """
    size = abs(value)
    if size and not 1e-3 <= size < 1e6:
        return f"{value:7.1e}"
    if size >= 1000:
        return f"{value:7,.0f}"
    return f"{value:7.{4 - (size >= 10) - (size >= 100)}f}"


def format_duration(seconds: float) -> str:
    """Return a duration as ``1:05:09`` or ``5:09``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
