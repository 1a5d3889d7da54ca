"""Reward shaping: from the results of reward functions to the number that is trained on."""

from __future__ import annotations

import reprlib
from numbers import Real
from typing import TYPE_CHECKING, Any

from anygauge.rollout.rewards.call import DEFAULT_KEY, number
from anygauge_hooks.errors import RewardError

if TYPE_CHECKING:
    from anygauge.config.schema import Reward

__all__ = ["overlong_penalty", "raw_number"]


def raw_number(raw_reward: Any, reward: Reward) -> float:
    """Return the number behind what reward functions returned, before any shaping.

    :param raw_reward: Reward of a sample that was scored: a number or a dict, or by name of the part.
    :param reward: The table of the config that it was scored by.
    :returns: The number that ``reward.key`` names, or the weighted sum over the parts; a number itself.
    :raises RewardError: A rollout function has set something that does not go with the table.
    """
    if isinstance(raw_reward, Real):  # also beside parts: a rollout function may set the reward of a sample
        return float(raw_reward)
    try:
        if not reward.parts:
            return number(raw_reward, reward.key)
        return sum(part.weight * number(raw_reward[name], part.key) for name, part in reward.parts.items())
    except (KeyError, TypeError, ValueError) as error:
        raise RewardError(
            f"A rollout function has set raw_reward = {reprlib.repr(raw_reward)}, and {_expected(reward)}.",
            hint="Set a number, or what the reward functions would have returned.",
        ) from error


def _expected(reward: Reward) -> str:
    if reward.parts:
        return f"reward.parts has {', '.join(reward.parts)}"
    return f"the number of a dict is its key {reward.key or DEFAULT_KEY!r}"


def overlong_penalty(length: int, *, limit: int, buffer: int, penalty: float) -> float:
    """Return the penalty of a long response, https://arxiv.org/abs/2503.14476 equation 13.

    Nothing up to ``limit - buffer`` tokens, then in proportion, and ``penalty`` from ``limit`` tokens on.

    :param length: Tokens of the response.
    :param limit: Most tokens that a response may have.
    :param buffer: Tokens before the limit over which the penalty grows; 0 is off.
    """
    over = length - (limit - buffer)
    return penalty * min(over / buffer, 1.0) if buffer and over > 0 else 0.0
