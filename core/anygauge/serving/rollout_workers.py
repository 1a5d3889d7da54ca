"""Worker that only generates, and the base class that it shares with training workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Literal

from anygauge.config import Config
from anygauge.device import memory_phase
from anygauge.observability.memory import worker_memory
from anygauge.observability.performance import WorkerReport
from anygauge.observability.phases import Row, record_phase, take_phases
from anygauge.observability.profiler import WorkerProfiler
from anygauge_hooks.engines import RolloutEngine, WeightStream, WorkerContext
from anygauge_hooks.rollout import GenerateRequest, Generation
from anygauge_hooks.weights import WeightPeer, WeightTarget, WeightUpdate

if TYPE_CHECKING:
    from anygauge_hooks.engines import RolloutEngineSpec
    from anygauge_hooks.types import BackendSpec, LoadedPlugins

__all__ = ["GeneratingWorker", "LocalPeer", "RolloutWorker", "make_engine", "preload_engine"]


@dataclass(frozen=True, kw_only=True)
class LocalPeer(WeightPeer, WeightTarget):
    """The rollout engine of a worker that trains."""

    engine: RolloutEngine = field(repr=False)

    @property
    def is_local(self) -> bool:
        """Whether it takes the gathered tensors themselves."""
        return True

    @property
    def needs_transport(self) -> bool:
        """Whether its weights travel by a transport of the config."""
        return False

    def target(self, *, deadline_s: float) -> WeightTarget:
        """Return itself: there is no connection."""
        return self

    def load_tensors(self, weights: WeightStream, update: WeightUpdate) -> None:
        """Load the tensors as they are gathered."""
        self.engine.update_weights(weights, update.version)


class GeneratingWorker:
    """A worker that may have a rollout engine, and reports its timings.

    :param role: Role of the worker, as its log is named.
    """

    def __init__(self, context: WorkerContext, role: Literal["actor", "rollout"] = "rollout") -> None:
        self._device = context.device
        self._row = Row(role, context.rank)
        self._profiler = WorkerProfiler(context, self._row)
        self._engine: RolloutEngine | None = None
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @property
    def engine(self) -> RolloutEngine:
        """The rollout engine, where there is one."""
        assert self._engine is not None, "these workers do not generate"
        return self._engine

    def generate(self, batches: Sequence[Sequence[GenerateRequest]]) -> list[list[Generation]]:
        """Answer the requests of this worker's batches of a wave."""
        with self._timed("generate"):
            return [self.engine.answer(batch) for batch in batches]

    def start_profile(self, kind: str, directory: str, ranks: Sequence[int]) -> str | None:
        """Begin a profile, if this rank is to record one; return why it cannot."""
        return self._profiler.start(kind, directory, ranks)

    def stop_profile(self) -> str | None:
        """Write the profile, if there is one; return why that failed."""
        return self._profiler.stop()

    def report(self) -> WorkerReport:
        """Return the seconds spent since the last call, by phase, and the memory in use, in bytes."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return {
            "seconds": {**seconds, **self._engine_seconds()},
            "memory": worker_memory(self._device),
            "phases": {self._row: take_phases()},
        }

    def _engine_seconds(self) -> Mapping[str, float]:
        """Return the seconds since the last call that an engine has counted itself."""
        return {}

    def close(self) -> None:
        """Release the engine."""
        if self._engine is not None:
            self._engine.close()

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Count the time and the memory of the block as a phase's."""
        start = perf_counter()
        with record_phase(phase), memory_phase(self._device, phase):
            yield
        self._seconds[phase] += perf_counter() - start


class RolloutWorker(GeneratingWorker):
    """A rollout engine in its own process."""

    def __init__(self, config: Config, context: WorkerContext) -> None:
        super().__init__(context)
        from anygauge.serving.weight_inbox import WeightInbox  # workers that train need no HTTP

        self._engine = make_engine(config, context)
        self._inbox = WeightInbox(context.address, stall_s=config.weight_sync.deadline_s)

    @staticmethod
    def preload(config: Config, plugins: LoadedPlugins, backend: BackendSpec) -> None:
        """Import what the engine needs."""
        preload_engine(config, plugins)

    def peer(self) -> WeightPeer:
        """Return the engine as a peer of weight senders."""
        return self._inbox.peer

    def take_weights(self, version: int) -> None:
        """Load the weights that the training workers send meanwhile."""
        with self._timed("weight_sync"):
            self._inbox.load_into(self.engine, version)

    def close(self) -> None:
        """Release the engine."""
        self._inbox.close()
        super().close()


def preload_engine(config: Config, plugins: LoadedPlugins) -> None:
    """Import what the rollout engine needs."""
    spec: RolloutEngineSpec = plugins.get("register_rollout_engines", config.rollout.engine)
    if spec.preload is not None:
        spec.preload()


def make_engine(config: Config, context: WorkerContext) -> RolloutEngine:
    """Return the rollout engine."""
    make = context.plugins.get("register_rollout_engines", config.rollout.engine).make
    assert make is not None, "an engine that is a server has no place in a worker"
    engine: RolloutEngine = make(config, context)
    return engine
