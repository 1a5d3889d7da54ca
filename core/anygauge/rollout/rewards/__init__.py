"""Reward functions, and how a config names and a rollout calls them.

A reward function takes any of the keyword arguments ``response`` (required), ``label``, ``metadata`` and
``prompt``, then its options. It returns a finite number, or a dict of which ``reward.key`` names one, for one
sample; with ``reward.scope = "group"`` it takes lists and returns a list. It may be ``async``.
"""

from __future__ import annotations

from anygauge.rollout.rewards.choice import multiple_choice
from anygauge.rollout.rewards.dapo_recipe import dapo
from anygauge.rollout.rewards.extraction import boxed
from anygauge.rollout.rewards.http_client import remote
from anygauge.rollout.rewards.matching import exact_match, f1
from anygauge.rollout.rewards.mathematics import math
from anygauge.rollout.rewards.scorer import Scorer, check_columns, check_reward
from anygauge.rollout.rewards.shaping import overlong_penalty, raw_number
from anygauge_hooks.types import NamedFunction

__all__ = [
    "Scorer",
    "boxed",
    "check_columns",
    "check_reward",
    "dapo",
    "exact_match",
    "f1",
    "math",
    "multiple_choice",
    "overlong_penalty",
    "raw_number",
    "remote",
    "reward_functions",
]


def reward_functions() -> list[NamedFunction]:
    """Return the reward functions that come with the core."""
    return [
        NamedFunction(name="dapo", fn=dapo, inline=True),
        NamedFunction(name="exact_match", fn=exact_match, inline=True),
        NamedFunction(name="f1", fn=f1, inline=True),
        NamedFunction(name="math", fn=math),
        NamedFunction(name="multiple_choice", fn=multiple_choice, inline=True),
        NamedFunction(name="remote", fn=remote),
    ]
