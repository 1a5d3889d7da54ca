"""Registers the Megatron train engine. Imports no torch until the engine is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anygauge_hooks import hookimpl
from anygauge_hooks.engines import TrainEngineSpec
from anygauge_hooks.types import ConfigProblem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from anygauge.engines.megatron.engine import MegatronEngine
    from anygauge_hooks.engines import WorkerContext


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
    """Check the names in ``[train.megatron]``, and that what they do can be saved."""
    if config.train.engine != "megatron" or not config.train.megatron:
        return None
    from anygauge.engines.megatron.fields import option_problems

    return [*option_problems(config.train.megatron), *_unsaved(config)]


def _unsaved(config: Any) -> Iterator[ConfigProblem]:
    """Yield the options with which the optimizer keeps its weights where no checkpoint can find them."""
    for name in ("optimizer_cpu_offload", "use_precision_aware_optimizer"):
        if config.train.megatron.get(name) and config.save.every is not None:
            hint = 'no checkpoint can be made with it; leave it out, or set save.every = "none"'
            yield ConfigProblem(path=f"train.megatron.{name}", found=True, hint=hint)
