"""Counts of rollouts since the last step, and limits on their failures."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from anygauge_hooks.errors import RewardError, RolloutError
from anygauge_hooks.rl import Group

__all__ = ["Tally", "reasons"]

REASONS = 3
"""Distinct reasons that a message lists."""
PLACES = 3
"""Prompts that it names for each."""


@dataclass(slots=True)
class Tally:
    """Counts of one step.

    :param most_failed: Rollouts whose function may fail.
    :param most_unscored: Rollouts that may fail to be scored.
    """

    most_failed: float
    most_unscored: float
    rejected: Counter[str] = field(default_factory=Counter)
    """Groups, by the filter that did not let them pass."""
    discarded: int = 0
    """Groups that were not done when the step was."""
    dropped: int = 0
    """Discarded groups whose prompts are not drawn again."""
    continued: int = 0
    """Tokens of samples that were begun in an earlier step."""
    failed: dict[str, list[str]] = field(default_factory=dict)
    """Places of the rollouts that could not be made, by reason."""
    unscored: dict[str, list[str]] = field(default_factory=dict)
    """Places of those that could not be scored."""

    def reset(self) -> None:
        """Begin to count for the next step."""
        self.discarded = self.dropped = self.continued = 0
        for counts in (self.rejected, self.failed, self.unscored):
            counts.clear()

    def add_failure(self, place: str, why: str) -> None:
        """Count a rollout whose function failed.

        :raises RolloutError: They are too many.
        """
        self.failed.setdefault(why, []).append(place)
        if _count(self.failed) > self.most_failed:
            raise RolloutError(
                f"{_count(self.failed)} rollouts of a step failed{reasons(self.failed)}",
                hint="Correct the function or the data, or raise rollout.max_failed_ratio.",
            )

    def add_scored(self, group: Group, scored: Group) -> None:
        """Count the rollouts of a group that were made, and could not be scored.

        :raises RewardError: They are too many.
        """
        if not any(sample.error for sample in scored.samples):
            return
        was = [rollout[-1].error for rollout in group.rollouts()]
        now = [rollout[-1].error for rollout in scored.rollouts()]
        lost = [why for before, why in zip(was, now, strict=True) if before is None and why is not None]
        for why in lost:
            self.unscored.setdefault(why, []).append(group.prompt.source or f"prompt {group.prompt.index}")
        if lost and _count(self.unscored) > self.most_unscored:
            raise RewardError(
                f"{_count(self.unscored)} rollouts of a step could not be scored{reasons(self.unscored)}",
                hint="Correct the data or the function, or raise reward.max_failed_ratio.",
            )

    def metrics(self, groups: int) -> dict[str, float]:
        """Return ``rollout/*`` of a step.

        :param groups: Number of groups that the step trains on.
        """
        rejected = self.rejected.total()
        seen = groups + rejected
        return {
            "rollout/filtered_ratio": rejected / seen if seen else 0.0,
            "rollout/unfinished_groups": self.discarded,
            "rollout/dropped_prompts": self.dropped,
            "rollout/continued_tokens": self.continued,
            "rollout/failed_rollouts": _count(self.failed),
        }


def _count(places: dict[str, list[str]]) -> int:
    return sum(map(len, places.values()))


def reasons(places: dict[str, list[str]]) -> str:
    """Return the most frequent reasons, with some of the prompts of each."""
    lines = []
    for why, where in sorted(places.items(), key=lambda entry: -len(entry[1]))[:REASONS]:
        some = list(dict.fromkeys(where))
        more = ", ..." if len(some) > PLACES else ""
        lines.append(f"\n  {len(where)} ({', '.join(some[:PLACES])}{more}): {why}")
    rest = len(places) - REASONS
    return ":" + "".join(lines) + (f"\n  and {rest} other reasons" if rest > 0 else "")
