"""Built-in rollout engines, registered like those of any plugin."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from anygauge_hooks import hookimpl
from anygauge_hooks.engines import RolloutEngineSpec

if TYPE_CHECKING:
    from anygauge.config import Config
    from anygauge_hooks.engines import RolloutEngine, WorkerContext
    from anygauge_hooks.serving import EngineServer
    from anygauge_hooks.types import BackendSpec, ConfigChange, ConfigProblem

__all__ = ["adjust_config", "check_config", "register_rollout_engines"]


@hookimpl
def register_rollout_engines() -> Iterable[RolloutEngineSpec]:
    """Return the embedded engine, and SGLang's servers."""
    return [
        RolloutEngineSpec(name="transformers", make=_make_transformers, preload=_preload_transformers),
        RolloutEngineSpec(
            name="sglang",
            serve=_serve_sglang,
            devices=_sglang_devices,
            context=_sglang_context,
            kinds=("regular", "prefill", "decode", "encoder"),
            attach=_attach_sglang,
            releases_memory=True,
            loads_adapters=True,
            starts_early=True,
            profiles=True,
        ),
    ]


@hookimpl
def adjust_config(config: Config, backend: BackendSpec) -> Iterable[ConfigChange]:
    """Choose arguments of SGLang's servers for the work of the run."""
    from anygauge.serving.sglang.defaults import server_defaults

    return server_defaults(config, backend)


@hookimpl
def check_config(config: Config, backend: BackendSpec) -> Iterable[ConfigProblem]:
    """Check the config of SGLang's servers."""
    from anygauge.serving.sglang.rules import sglang_problems

    return sglang_problems(config, backend)


def _preload_transformers() -> None:
    import anygauge.serving.embedded.engine  # noqa: F401


def _make_transformers(config: Any, context: WorkerContext) -> RolloutEngine:
    from anygauge.serving.embedded.engine import make_engine

    return make_engine(config, context)


def _sglang_devices(config: Any) -> int:
    from anygauge.serving.server_plan import plan_servers
    from anygauge.serving.sglang.kinds import plan_devices

    return max(plan_devices(config, plan) for plan in plan_servers(config))


def _sglang_context(config: Any, longest: int | None) -> int | None:
    from anygauge.serving.sglang.kinds import context_room

    return context_room(config, longest)


def _serve_sglang(config: Any, context: WorkerContext) -> EngineServer:
    from anygauge.serving.sglang.server import make_server

    return make_server(config, context)


def _attach_sglang(config: Any, address: str) -> EngineServer:
    from anygauge.serving.sglang.attached import AttachedServer

    return AttachedServer(config, address)
