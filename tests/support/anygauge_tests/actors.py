"""An actor for tests that are about training: one process serves one run after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anygauge.config.schema import Config
from anygauge.distributed.process_groups import reload_process_groups
from anygauge.runtime.media_stores import open_store
from anygauge.trainer.actors import ActorWorker
from anygauge_hooks.engines import WorkerContext

__all__ = ["SuccessiveActors"]


class SuccessiveActors:
    """Stands for an actor that is made anew for each run, since a new process imports for seconds."""

    def __init__(self, config: Config, context: WorkerContext) -> None:
        del config
        self._context = context
        self._actor: ActorWorker | None = None

    def begin(self, config: Config, **options: Any) -> None:
        """Close the actor of the last run, and make that of the next.

        :param options: Further keyword arguments of the actor.
        """
        self.close()
        reload_process_groups()
        store = open_store(config, config.run.directory / config.run.name)
        self._actor = ActorWorker(config, replace(self._context, media=store), **options)

    def close(self) -> None:
        """Close the actor of the last run, if there was one."""
        if self._actor is not None:
            self._actor.close()
            self._actor = None

    def __getattr__(self, method: str) -> Any:
        return getattr(self._actor, method)
