"""What runs in a process that only generates: a rollout engine alone."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

from anygauge.config import Config
from anygauge.device import memory_phase
from anygauge.observability.memory import worker_memory
from anygauge.observability.performance import WorkerReport
from anygauge.trainer.weight_parts import WeightUpdate
from anygauge_hooks.engines import RolloutEngine, WorkerContext
from anygauge_hooks.rl import Prompt, Sample, SamplingParams

__all__ = ["RolloutWorker"]


class RolloutWorker:
    """A rollout engine alone in its process."""

    def __init__(self, config: Config, context: WorkerContext) -> None:
        make = context.plugins.get("register_rollout_engines", config.rollout.engine).make
        self.engine: RolloutEngine = make(config, context)
        self._device = context.device
        self._update: WeightUpdate | None = None
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, seeds: Sequence[Sequence[int]]
    ) -> list[list[Sample]]:
        """Return one sample per seed for each prompt."""
        start = time.perf_counter()
        with memory_phase(self._device, "generate"):
            samples = self.engine.generate(prompts, params, seeds) if prompts else []
        self._seconds["generate"] += time.perf_counter() - start
        return samples

    def receive_weights(self, data: bytes, version: int, *, last: bool) -> None:
        """Take a part of new weights; with the last one, return once the engine serves them."""
        start = time.perf_counter()
        if self._update is None:
            self._update = WeightUpdate(self.engine, version, self._device.torch_device)
        assert self._update.version == version, "one update at a time"
        self._update.put(data)
        if last:
            update, self._update = self._update, None
            update.put(None)
            update.finish()
        self._seconds["weight_sync"] += time.perf_counter() - start

    def report(self) -> WorkerReport:
        """Return the seconds spent since the last call, by phase, and the memory in use, in bytes."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return {"seconds": seconds, "memory": worker_memory(self._device)}

    def close(self) -> None:
        """Release the engine."""
        if self._update is not None:
            self._update.cancel()
        self.engine.close()
