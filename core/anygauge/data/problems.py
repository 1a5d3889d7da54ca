"""Errors in data rows, collected until all rows have been read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

from anygauge_hooks.errors import DataError

__all__ = ["MAX_REPORTED", "BadMediaError", "BadRowError", "Problems"]

MAX_REPORTED = 5
"""Problems that an error lists."""


class BadRowError(Exception):
    """Problem of one row, as a clause.

    :param hint: Advice, if it is not to correct the row.
    """

    def __init__(self, problem: str, *, hint: str | None = None) -> None:
        super().__init__(problem)
        self.hint = hint


class BadMediaError(BadRowError):
    """Problem of a row's media, as a clause; ``media.on_error`` may drop such rows."""


@dataclass(slots=True)
class Problems:
    """The first of the problems of bad rows, and how many rows there are."""

    listed: dict[str, tuple[str, int]] = field(default_factory=dict)
    """First place and number of rows, by problem: a wrong key is one problem of all rows."""
    hint: str = "Correct the rows, or set data.input_key and data.label_key to the fields they have."
    count: int = 0

    def append(self, place: str, problem: BadRowError) -> None:
        """Add a bad row.

        :param place: File and line.
        """
        if not self.count:
            self.hint = problem.hint or self.hint
        self._add(str(problem), place, 1)
        self.count += 1

    def extend(self, others: Problems) -> None:
        """Add the bad rows of another file."""
        if not self.count:
            self.hint = others.hint
        for problem, (place, num_rows) in others.listed.items():
            self._add(problem, place, num_rows)
        self.count += others.count

    def _add(self, problem: str, place: str, num_rows: int) -> None:
        if problem in self.listed or len(self.listed) < MAX_REPORTED:
            first, before = self.listed.get(problem, (place, 0))
            self.listed[problem] = first, before + num_rows

    def report(self, num_rows: int, *, which: str = "") -> NoReturn:
        """Raise the error of all rows that were added.

        :param num_rows: Good and bad.
        :param which: ``"first "`` where there are more.
        :raises DataError: Always.
        """
        lines = [_line(problem, *where) for problem, where in self.listed.items()]
        more = self.count - sum(rows for _, rows in self.listed.values())
        listed = [*lines, *([f"... and {more} more"] if more else [])]
        raise DataError(
            f"{self.count} of {f'the {which}' if which else ''}{num_rows} rows cannot be used:\n  "
            + "\n  ".join(listed),
            hint=self.hint,
        )


def _line(problem: str, place: str, num_rows: int) -> str:
    return f"{place}: {problem}" + (f" (and {num_rows - 1} more rows like it)" if num_rows > 1 else "")
