"""Group filters: which groups are worth training on."""

from __future__ import annotations

from anygauge_hooks.rl import Group

__all__ = ["zero_variance"]


def zero_variance(group: Group, tolerance: float = 0.0) -> bool:
    """Return whether the rewards of a group differ, https://arxiv.org/abs/2503.14476 equation 11.

    Equal rewards have no advantage over each other, so that such a group teaches nothing.

    :param tolerance: Rewards that are no further apart count as equal.
    """
    rewards = [
        sample.reward for sample in group.samples if sample.error is None and sample.reward is not None
    ]
    return len(rewards) > 1 and max(rewards) - min(rewards) > tolerance
