"""Registers the Megatron train engine. Imports no torch until the engine is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anygauge_hooks import hookimpl
from anygauge_hooks.engines import TrainEngineSpec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from anygauge.engines.megatron.engine import MegatronEngine
    from anygauge_hooks.engines import WorkerContext
    from anygauge_hooks.types import ConfigProblem


def _make(config: Any, context: WorkerContext) -> MegatronEngine:
    from anygauge.engines.megatron.prepare import prepare_megatron

    prepare_megatron(context.plugins, context.backend)
    from anygauge.engines.megatron.engine import MegatronEngine

    return MegatronEngine(config, context)


@hookimpl
def register_train_engines() -> list[TrainEngineSpec]:
    """Register the engine."""
    return [TrainEngineSpec(name="megatron", make=_make)]


@hookimpl
def check_config(config: Any) -> Iterable[ConfigProblem] | None:
    """Check the names in ``[train.megatron]``."""
    if config.train.engine != "megatron" or not config.train.megatron:
        return None
    from anygauge.engines.megatron.fields import option_problems

    return list(option_problems(config.train.megatron))
