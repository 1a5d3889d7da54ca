"""Registers the FSDP train engine. Imports no torch until the engine is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from anygauge.config.roles import critic_config, teacher_config
from anygauge.engines.fsdp.family import causal_lm_family, check_model
from anygauge_hooks import hookimpl
from anygauge_hooks.engines import TrainEngineSpec
from anygauge_hooks.errors import ConfigError
from anygauge_hooks.types import ConfigProblem

if TYPE_CHECKING:
    from anygauge.engines.fsdp.critic import FsdpCritic
    from anygauge.engines.fsdp.engine import ForwardOnlyEngine, FsdpEngine
    from anygauge_hooks.engines import WorkerContext
    from anygauge_hooks.models import ModelSpec
    from anygauge_hooks.types import BackendSpec, LoadedPlugins

__all__ = ["FSDP"]

FSDP = "fsdp"
"""Name of the engine."""
_HINT = f"train.engine = {FSDP!r} only shards over data-parallel ranks; leave it out, or take Megatron"


def _preload(plugins: LoadedPlugins, backend: BackendSpec) -> None:
    import anygauge.engines.fsdp.engine  # noqa: F401


def _make(config: Any, context: WorkerContext) -> FsdpEngine:
    from anygauge.engines.fsdp.engine import FsdpEngine

    return FsdpEngine(config, context)


def _make_critic(config: Any, context: WorkerContext) -> FsdpCritic:
    from anygauge.engines.fsdp.critic import FsdpCritic

    return FsdpCritic(config, context)


def _make_frozen(config: Any, context: WorkerContext) -> ForwardOnlyEngine:
    from anygauge.engines.fsdp.engine import ForwardOnlyEngine

    return ForwardOnlyEngine(config, context)


@hookimpl
def register_train_engines() -> list[TrainEngineSpec]:
    """Register the engine."""
    return [
        TrainEngineSpec(
            name=FSDP,
            make=_make,
            make_critic=_make_critic,
            make_forward_only=_make_frozen,
            preload=_preload,
            supports_offload=True,
            supports_lora=True,
            lora_bases=frozenset({"nf4"}),
            make_family=causal_lm_family,
            check_model=_check_model,
        )
    ]


def _check_model(config: Any, path: str, spec: ModelSpec, hf: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    """Yield a model that transformers does not have, or whose media no family can feed."""
    found = str(getattr(config, path.split(".")[0]).path)
    try:
        check_model(hf, spec)
    except ConfigError as error:
        yield ConfigProblem(path=path, found=found, hint=f"{error.args[0]} {error.hint}")


@hookimpl
def check_config(config: Any) -> Iterator[ConfigProblem]:
    """Yield settings that the engine does not have."""
    if config.train.engine != FSDP:
        return
    for role, train in (
        ("train", config.train),
        ("critic", critic_config(config).train),
        ("teacher", teacher_config(config).train),
    ):
        if role != "train" and getattr(config, role).parallel is None:
            continue
        sizes = train.parallel.model_dump(exclude_defaults=True)
        sizes.pop("reshard_after_forward", None)
        replicas, workers = sizes.pop("replicate", 1), config.placement.train_workers
        if workers % replicas:
            hint = f"placement.train_workers = {workers} must be a multiple of it"
            yield ConfigProblem(path=f"{role}.parallel.replicate", found=replicas, hint=hint)
        for name, size in sizes.items():
            yield ConfigProblem(path=f"{role}.parallel.{name}", found=size, hint=_HINT)
    yield from _unsupported(config.train)


def _unsupported(train: Any) -> Iterator[ConfigProblem]:
    hint = f"train.engine = {FSDP!r} has none and full"
    if train.recompute not in ("none", "full"):
        yield ConfigProblem(path="train.recompute", found=train.recompute, hint=hint)
    if train.router_replay:
        hint = f"train.engine = {FSDP!r} keeps no routes; leave it out, or take Megatron"
        yield ConfigProblem(path="train.router_replay", found=True, hint=hint)
    if train.prefix_packing:
        hint = f"train.engine = {FSDP!r} packs whole samples; leave it out, or take Megatron"
        yield ConfigProblem(path="train.prefix_packing", found=True, hint=hint)
    if train.provider is not None:
        hint = f"has no effect with train.engine = {FSDP!r}; leave it out"
        yield ConfigProblem(path="train.provider", found=train.provider, hint=hint)
