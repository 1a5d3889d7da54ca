"""Built-in rewards, rollout functions and filters, registered like those of any plugin."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from anygauge_hooks import hookimpl
from anygauge_hooks.types import NamedFunction

if TYPE_CHECKING:
    from anygauge.config import Config
    from anygauge_hooks.types import BackendSpec, ConfigProblem

__all__ = [
    "check_config",
    "register_reward_functions",
    "register_rollout_functions",
    "register_sample_filters",
]


@hookimpl
def check_config(config: Config, backend: BackendSpec) -> Iterable[ConfigProblem]:
    """Check what the config says of agents."""
    from anygauge.rollout.gateway.rules import agent_problems

    return agent_problems(config)


@hookimpl
def register_reward_functions() -> Iterable[NamedFunction]:
    """Return the rewards that need no code of the user's."""
    from anygauge.rollout.rewards import reward_functions

    return reward_functions()


@hookimpl
def register_rollout_functions() -> Iterable[NamedFunction]:
    """Return ``single_turn``, ``multi_turn`` and ``agent``."""
    from anygauge.rollout.functions import single_turn
    from anygauge.rollout.gateway.agent import agent
    from anygauge.rollout.multi_turn import multi_turn

    return [NamedFunction(name=fn.__name__, fn=fn) for fn in (single_turn, multi_turn, agent)]


@hookimpl
def register_sample_filters() -> Iterable[NamedFunction]:
    """Return ``zero_variance``."""
    from anygauge.rollout.functions import zero_variance

    return [NamedFunction(name="zero_variance", fn=zero_variance)]
