"""Errors in data rows, collected until all rows have been read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

from anygauge_hooks.errors import DataError

__all__ = ["MAX_REPORTED", "BadMediaError", "BadRowError", "Problems"]

MAX_REPORTED = 5
"""Bad rows that an error lists."""


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
    """The first of the bad rows, and how many there are."""

    listed: list[str] = field(default_factory=list)
    hint: str = "Correct the rows, or set data.input_key and data.label_key to the fields they have."
    count: int = 0

    def append(self, place: str, problem: BadRowError) -> None:
        """Add a bad row.

        :param place: File and line.
        """
        self.count += 1
        if self.count == 1:
            self.hint = problem.hint or self.hint
        if self.count <= MAX_REPORTED:
            self.listed.append(f"{place}: {problem}")

    def extend(self, others: Problems) -> None:
        """Add the bad rows of another file."""
        if not self.count:
            self.hint = others.hint
        self.count += others.count
        self.listed += others.listed[: MAX_REPORTED - len(self.listed)]

    def report(self, num_rows: int) -> NoReturn:
        """Raise the error of all rows that were added.

        :param num_rows: Good and bad.
        :raises DataError: Always.
        """
        more = self.count - len(self.listed)
        listed = [*self.listed, *([f"... and {more} more"] if more else [])]
        raise DataError(
            f"{self.count} of {num_rows} rows cannot be used:\n  " + "\n  ".join(listed), hint=self.hint
        )
