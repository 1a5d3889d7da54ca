"""The core's own rollout engines and reward functions, registered through the same hooks as anybody's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from anygauge_hooks import hookimpl
from anygauge_hooks.engines import RolloutEngineSpec

if TYPE_CHECKING:
    from anygauge.config import Config
    from anygauge_hooks.engines import RolloutEngine, WorkerContext
    from anygauge_hooks.types import NamedFunction

__all__ = ["register_reward_functions", "register_rollout_engines"]


@hookimpl
def register_rollout_engines() -> Iterable[RolloutEngineSpec]:
    """Return the embedded engine."""
    return [RolloutEngineSpec(name="transformers", make=_make_transformers)]


@hookimpl
def register_reward_functions() -> Iterable[NamedFunction]:
    """Return the rewards that need no code of the user's."""
    from anygauge.rollout.rewards import reward_functions

    return reward_functions()


def _make_transformers(config: Config, context: WorkerContext) -> RolloutEngine:
    from anygauge.rollout.transformers.engine import make_engine

    return make_engine(config, context)
