"""Built-in engines, rewards, rollout functions and filters, registered like those of any plugin."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from anygauge_hooks import hookimpl
from anygauge_hooks.engines import RolloutEngineSpec
from anygauge_hooks.types import NamedFunction

if TYPE_CHECKING:
    from anygauge.config import Config
    from anygauge_hooks.engines import RolloutEngine, WorkerContext
    from anygauge_hooks.rollout import EngineServer
    from anygauge_hooks.types import BackendSpec, ConfigProblem

__all__ = [
    "check_config",
    "register_reward_functions",
    "register_rollout_engines",
    "register_rollout_functions",
    "register_sample_filters",
]


@hookimpl
def register_rollout_engines() -> Iterable[RolloutEngineSpec]:
    """Return the embedded engine, and SGLang's servers."""
    return [
        RolloutEngineSpec(name="transformers", make=_make_transformers),
        RolloutEngineSpec(
            name="sglang",
            serve=_serve_sglang,
            devices=_sglang_devices,
            context=_sglang_context,
            kinds=("regular", "prefill", "decode", "encoder"),
            attach=_attach_sglang,
            releases_memory=True,
        ),
    ]


@hookimpl
def check_config(config: Config, backend: BackendSpec) -> Iterable[ConfigProblem]:
    """Check what the config says of agents and of SGLang's servers."""
    from anygauge.rollout.gateway.rules import agent_problems
    from anygauge.rollout.sglang.rules import sglang_problems

    return [*agent_problems(config), *sglang_problems(config, backend)]


@hookimpl
def register_reward_functions() -> Iterable[NamedFunction]:
    """Return the rewards that need no code of the user's."""
    from anygauge.rollout.rewards import reward_functions

    return reward_functions()


@hookimpl
def register_rollout_functions() -> Iterable[NamedFunction]:
    """Return ``single_turn``, ``multi_turn`` and ``agent``."""
    from anygauge.rollout.control.functions import single_turn
    from anygauge.rollout.control.multi_turn import multi_turn
    from anygauge.rollout.gateway.agent import agent

    return [NamedFunction(name=fn.__name__, fn=fn) for fn in (single_turn, multi_turn, agent)]


@hookimpl
def register_sample_filters() -> Iterable[NamedFunction]:
    """Return ``zero_variance``."""
    from anygauge.rollout.control.filters import zero_variance

    return [NamedFunction(name="zero_variance", fn=zero_variance)]


def _make_transformers(config: Config, context: WorkerContext) -> RolloutEngine:
    from anygauge.rollout.transformers.engine import make_engine

    return make_engine(config, context)


def _sglang_devices(config: Config) -> int:
    from anygauge.rollout.server_plan import plan_servers
    from anygauge.rollout.sglang.kinds import plan_devices

    return max(plan_devices(config, plan) for plan in plan_servers(config))


def _sglang_context(config: Config, longest: int | None) -> int | None:
    from anygauge.rollout.sglang.kinds import context_room

    return context_room(config, longest)


def _serve_sglang(config: Config, context: WorkerContext) -> EngineServer:
    from anygauge.rollout.sglang.server import make_server

    return make_server(config, context)


def _attach_sglang(config: Config, address: str) -> EngineServer:
    from anygauge.rollout.sglang.attached import AttachedServer

    return AttachedServer(config, address)
