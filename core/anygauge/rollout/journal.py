"""Journal of a rollout's generations so far, from which the rollout can resume.

A rollout whose process has ended is run again from its beginning. The generations that it asks for then come
from here as long as it asks for the same, so that the tokens, log-probs and weight versions that were paid
for stay what they were, and the one that was cut short goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anygauge_hooks.rollout import Generation

__all__ = ["Journal", "Record"]

_NOTHING = Generation((), (), (), "abort")


@dataclass(slots=True)
class Record:
    """A generation, which may be made in several parts."""

    asked: tuple[int, ...]
    """The tokens to go on from."""
    stop: tuple[str, ...]
    shown: tuple[str, ...] = ()
    """Keys of the media among ``asked``, whose tokens alone do not tell one from another."""
    said: Generation = _NOTHING
    """All parts as one; ``"abort"`` where more will follow."""


class Journal:
    """The generations of one rollout, in the order in which they were asked for."""

    def __init__(self, records: Sequence[Record] = ()) -> None:
        self.records = list(records)
        self._unclaimed = list(records)

    def claim(self, asked: tuple[int, ...], stop: tuple[str, ...], shown: tuple[str, ...] = ()) -> Record:
        """Return the record of a generation: what is known of it, or an empty one."""
        for position, record in enumerate(self._unclaimed):
            if (record.asked, record.stop, record.shown) == (asked, stop, shown):
                return self._unclaimed.pop(position)
        self.records.append(record := Record(asked, stop, shown))
        return record

    @property
    def length(self) -> int:
        """Tokens that were generated."""
        return sum(len(record.said.tokens) for record in self.records)

    def state(self) -> list[dict[str, Any]]:
        """Return all of it; the tokens are not copied."""
        return [
            {
                "asked": record.asked,
                "stop": record.stop,
                "shown": record.shown,
                **record.said._asdict(),
                "finish_reason": None if record.said.finish_reason == "abort" else record.said.finish_reason,
            }
            for record in self.records
        ]

    @classmethod
    def restored(cls, state: Sequence[Mapping[str, Any]]) -> Journal:
        """Return the journal that :meth:`state` was asked for."""
        return cls(
            [
                Record(
                    asked=tuple(entry["asked"]),
                    stop=tuple(entry["stop"]),
                    shown=tuple(entry.get("shown", ())),
                    said=Generation(
                        tuple(entry["tokens"]),
                        tuple(entry["log_probs"]),
                        tuple(entry["weight_versions"]),
                        entry["finish_reason"] or "abort",
                    ),
                )
                for entry in state
            ]
        )
