"""Reward shaping: from the results of reward functions to the number that is trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anygauge.rollout.rewards.call import number

if TYPE_CHECKING:
    from anygauge.config.schema import Reward

__all__ = ["overlong_penalty", "raw_number"]


def raw_number(raw_reward: Any, reward: Reward) -> float:
    """Return the number behind what reward functions returned, before any shaping.

    :param raw_reward: Reward of a sample that was scored: a number or a dict, or by name of the part.
    :param reward: The table of the config that it was scored by.
    :returns: The number that ``reward.key`` names, or the weighted sum over the parts.
    """
    if not reward.parts:
        return number(raw_reward, reward.key)
    return sum(part.weight * number(raw_reward[name], part.key) for name, part in reward.parts.items())


def overlong_penalty(length: int, *, limit: int, buffer: int, penalty: float) -> float:
    """Return the penalty of a long response, https://arxiv.org/abs/2503.14476 equation 13.

    Nothing up to ``limit - buffer`` tokens, then in proportion, and ``penalty`` from ``limit`` tokens on.

    :param length: Tokens of the response.
    :param limit: Most tokens that a response may have.
    :param buffer: Tokens before the limit over which the penalty grows; 0 is off.
    """
    over = length - (limit - buffer)
    return penalty * min(over / buffer, 1.0) if buffer and over > 0 else 0.0
