"""Seconds from the beginning of a process to the stages of its start."""

from __future__ import annotations

import time
from collections.abc import Mapping

import psutil

__all__ = ["StartTimes"]


class StartTimes:
    """The stages of a start, in their order."""

    def __init__(self) -> None:
        self._began = psutil.Process().create_time()
        self._seconds: dict[str, float] = {}

    def note(self, stage: str) -> None:
        """Note that a stage has ended."""
        self._seconds[stage] = time.time() - self._began

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds to the end of each stage that has ended."""
        return self._seconds

    def __str__(self) -> str:
        return ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in self._seconds.items())
