"""Registers the Megatron train engine. Imports no torch until the engine is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from anygauge.config.roles import critic_config, teacher_config
from anygauge.engines.megatron.architecture import describe_model
from anygauge.engines.megatron.model_checks import check_model
from anygauge_hooks import hookimpl, megatron
from anygauge_hooks.engines import TrainEngineSpec
from anygauge_hooks.types import ConfigProblem, PluginInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from anygauge.engines.megatron.critic import MegatronCritic
    from anygauge.engines.megatron.engine import ForwardOnlyEngine, MegatronEngine
    from anygauge.engines.megatron.process_groups import ProcessGroupProxy
    from anygauge_hooks.engines import WorkerContext
    from anygauge_hooks.types import BackendSpec, LoadedPlugins

Engine = TypeVar("Engine")


def _prepare(plugins: LoadedPlugins, backend: BackendSpec) -> None:
    from anygauge.engines.megatron.prepare import prepare_megatron

    prepare_megatron(plugins, backend)


def _preload(plugins: LoadedPlugins, backend: BackendSpec) -> None:
    _prepare(plugins, backend)
    import anygauge.engines.megatron.engine  # noqa: F401


def _make(config: Any, context: WorkerContext) -> MegatronEngine:
    _prepare(context.plugins, context.backend)
    from anygauge.engines.megatron.engine import MegatronEngine

    return MegatronEngine(config, context)


def _make_critic(config: Any, context: WorkerContext) -> MegatronCritic | ProcessGroupProxy:
    _prepare(context.plugins, context.backend)
    from anygauge.engines.megatron.critic import MegatronCritic

    return _divided(config, lambda: MegatronCritic(config, context))


def _make_frozen(config: Any, context: WorkerContext) -> ForwardOnlyEngine | ProcessGroupProxy:
    _prepare(context.plugins, context.backend)
    from anygauge.engines.megatron.engine import ForwardOnlyEngine

    return _divided(config, lambda: ForwardOnlyEngine(config, context))


def _divided(config: Any, make: Callable[[], Engine]) -> Engine | ProcessGroupProxy:
    """Make an engine beside the policy's, with groups of its own where it is divided otherwise."""
    from anygauge.engines.megatron.process_groups import ProcessGroupProxy, divides

    return make() if divides(config.train.parallel) else ProcessGroupProxy(make)


@hookimpl
def describe_plugin() -> PluginInfo:
    """Add the hooks of Megatron's annex."""
    return PluginInfo(contract_version=1, hookspecs=[megatron])


@hookimpl
def register_train_engines() -> list[TrainEngineSpec]:
    """Register the engine."""
    return [
        TrainEngineSpec(
            name=megatron.MEGATRON,
            make=_make,
            make_critic=_make_critic,
            make_forward_only=_make_frozen,
            supports_offload=True,
            supports_lora=True,
            prepare=_prepare,
            preload=_preload,
            describe_model=describe_model,
            check_model=check_model,
        )
    ]


@hookimpl
def check_config(config: Any) -> Iterable[ConfigProblem]:
    """Check the Megatron fields of each role, and the settings of experts."""
    if config.train.engine != megatron.MEGATRON:
        return list(_without_effect(config))
    problems = [*_experts(config), *_replicas(config)]
    for role, train in _trains(config):
        if train.megatron:
            from anygauge.engines.megatron.config_fields import option_problems

            problems += option_problems(train, role)
    return problems


def _replicas(config: Any) -> Iterator[ConfigProblem]:
    """Yield copies of a sharded model, which this engine does not have."""
    for role in ("train", "critic", "teacher"):
        sizes = getattr(config, role).parallel
        if sizes is not None and not sizes.reshard_after_forward:
            hint = "train.engine = 'megatron' gathers no weights in its layers; leave it out"
            yield ConfigProblem(path=f"{role}.parallel.reshard_after_forward", found=False, hint=hint)
        if sizes is not None and sizes.replicate > 1:
            hint = "train.engine = 'megatron' copies the model to the workers that are left; leave it out"
            yield ConfigProblem(path=f"{role}.parallel.replicate", found=sizes.replicate, hint=hint)


def _without_effect(config: Any) -> Iterator[ConfigProblem]:
    """Yield the engine's tables in a run of another train engine."""
    for role in ("train", "critic", "teacher"):
        if options := getattr(config, role).megatron:
            hint = f"has no effect with train.engine = {config.train.engine!r}; leave it out"
            yield ConfigProblem(path=f"{role}.megatron", found=options, hint=hint)


def _trains(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield each role that has a table ``megatron`` of its own, with what stands for ``[train]`` in it."""
    yield "train", config.train
    for role, role_config in (("critic", critic_config), ("teacher", teacher_config)):
        if getattr(config, role).megatron is not None:
            yield role, role_config(config).train


def _experts(config: Any) -> Iterator[ConfigProblem]:
    """Yield a router replay without captured routes."""
    captures = config.run.task != "sft" and config.algorithm.old_log_probs == "recompute"
    if config.train.router_replay and not captures:
        hint = 'replays what the log-prob pass of algorithm.old_log_probs = "recompute" chose'
        yield ConfigProblem(path="train.router_replay", found=True, hint=hint)
