"""Journal of a rollout's generations so far, from which the rollout can resume.

A rollout whose process has ended is run again from its beginning. The generations that it asks for then come
from here as long as it asks for the same, so that the tokens, log-probs and weight versions that were paid
for stay what they were, and the one that was cut short goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from anygauge_hooks.rl import FinishReason
from anygauge_hooks.rollout import Generation

__all__ = ["Journal", "Record"]


@dataclass(slots=True)
class Record:
    """A generation, which may have been made in several parts."""

    asked: tuple[int, ...]
    """The tokens to go on from."""
    stop: tuple[str, ...]
    shown: tuple[str, ...] = ()
    """Keys of the media among ``asked``, whose tokens alone do not tell one from another."""
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    """``None`` of one that is not done."""

    def add(self, part: Generation) -> None:
        """Add what follows."""
        self.tokens += part.tokens
        self.log_probs += part.log_probs
        self.weight_versions += part.weight_versions

    def cut(self, length: int) -> None:
        """Forget all but the first tokens."""
        del self.tokens[length:], self.log_probs[length:], self.weight_versions[length:]

    def whole(self) -> Generation:
        """Return all parts as one."""
        assert self.finish_reason is not None
        values = tuple(self.tokens), tuple(self.log_probs), tuple(self.weight_versions)
        return Generation(*values, self.finish_reason)


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
        return sum(len(record.tokens) for record in self.records)

    def state(self) -> list[dict[str, Any]]:
        """Return all of it, as JSON can write it."""
        return [
            {
                "asked": list(record.asked),
                "stop": list(record.stop),
                "shown": list(record.shown),
                "tokens": list(record.tokens),
                "log_probs": list(record.log_probs),
                "weight_versions": list(record.weight_versions),
                "finish_reason": record.finish_reason,
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
                    tokens=list(entry["tokens"]),
                    log_probs=list(entry["log_probs"]),
                    weight_versions=list(entry["weight_versions"]),
                    finish_reason=entry["finish_reason"],
                )
                for entry in state
            ]
        )
