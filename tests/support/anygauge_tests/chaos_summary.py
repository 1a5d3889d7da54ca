"""Summary of in-flight requests after a chaos run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["RequestSummary"]


@dataclass
class RequestSummary:
    """Requests, and the answers to them."""

    sent: int = 0
    answers: Counter[int] = field(default_factory=Counter)
    """Answers by the number of the request."""
    mixed: int = 0
    """Responses that several versions of the weights made, each of its own tokens."""
    problems: list[str] = field(default_factory=list)

    @property
    def lost(self) -> int:
        """Return how many requests were never answered."""
        return self.sent - len(self.answers)

    @property
    def doubled(self) -> int:
        """Return how many answers came a second time."""
        return sum(self.answers.values()) - len(self.answers)

    @property
    def is_well(self) -> bool:
        """Return whether each request was answered once, and rightly."""
        return not (self.problems or self.lost or self.doubled)
