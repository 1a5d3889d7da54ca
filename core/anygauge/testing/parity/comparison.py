"""Run both sides of a comparison, one after the other, each in processes of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anygauge.config.load import LoadedConfig
from anygauge.distributed.layout import layout_of
from anygauge.plugins import Plugins, select_backend
from anygauge.runtime.launch import launch_workers
from anygauge.runtime.worker_group import WorkerGroup
from anygauge.testing.model_worker import load_model_config
from anygauge.testing.parity.differences import Difference, limits_of
from anygauge.testing.parity.sides import REFERENCE, Side
from anygauge.wording import counted
from anygauge_hooks.errors import ConfigError

__all__ = ["LoadedSide", "check_apart", "compare_sides", "load_side"]

_WORKER = "anygauge.testing.parity.worker:ParityWorker"
_DEFAULTS: Mapping[str, Any] = {"placement.launcher": "local", "run.timeout_s": 3600.0}
LogProbs = Mapping[int, Sequence[float]]


@dataclass(frozen=True, slots=True)
class LoadedSide:
    """A side with its checked config."""

    side: Side
    loaded: LoadedConfig

    @property
    def workers(self) -> int:
        """Number of its ranks."""
        return self.loaded.config.placement.train_workers

    def __str__(self) -> str:
        train = self.loaded.config.train
        kernels = f", kernels {self.side.kernels}" if self.side.kernels else ""
        workers = counted(self.workers, "worker")
        return f"{self.loaded.backend.name}, {train.engine}, {train.dtype}{kernels}, {workers}"


def load_side(side: Side, model: Path, plugins: Plugins, *, trust_remote_code: bool = False) -> LoadedSide:
    """Return a side whose config was checked.

    :raises ConfigError: A run could not be as the side says.
    :raises BackendUnavailableError: Its backend cannot run here.
    """
    backend, _ = select_backend(plugins, side.backend)
    settings = {**_DEFAULTS, **side.settings}
    engine = settings.pop("train.engine", "megatron")
    loaded = load_model_config(
        model, engine, plugins, backend, trust_remote_code=trust_remote_code, settings=settings
    )
    return LoadedSide(side, loaded)


def check_apart(a: LoadedSide, b: LoadedSide) -> None:
    """Refuse sides that would compute the same in the same way.

    :raises ConfigError: Nothing tells them apart.
    """
    if (a.loaded.backend, a.side.kernels, a.loaded.config) == (
        b.loaded.backend,
        b.side.kernels,
        b.loaded.config,
    ):
        raise ConfigError(
            f"A is {a.side.text!r} and B is {b.side.text!r}: both are {a}.",
            hint="Let them differ in the backend, or in one of kernels, engine, dtype, workers and the "
            f"parallel sizes, such as {b.side.backend}:kernels={REFERENCE}.",
        )


def compare_sides(
    a: LoadedSide, b: LoadedSide, plugins: Plugins, prompt: str, scratch: Path
) -> list[Difference]:
    """Return how far the second side is from the first, in the order in which a pass computes.

    :param scratch: An empty directory for the record of the first side: its gradients, and the inputs of each
        op.
    """
    sides = {name: scratch / name for name in ("a", "b")}
    for directory in sides.values():
        directory.mkdir()
    options = {
        "prompt": prompt,
        "sequences": max(2, *(layout_of(each.loaded.config).data for each in (a, b))),
        "traces": a.workers == b.workers == 1,
    }
    # The processes of the second side import their libraries meanwhile, and load the model afterwards.
    with _workers(b, plugins, sides["b"], options) as workers:
        with _workers(a, plugins, sides["a"], options) as first:
            first.ready()
            expected = _merged(first.call("log_probs"))
            first.call("record")
        workers.ready()
        actual = _merged(workers.call("log_probs"))
        dtype = str(a.loaded.config.train.dtype)
        differences: list[Difference] = workers.call("compare", record=str(sides["a"]), dtype=dtype)[0]
    limit = limits_of(dtype, str(b.loaded.config.train.dtype)).log_probs
    return [*differences, *_log_prob_differences(actual, expected, limit)]


@contextmanager
def _workers(
    side: LoadedSide, plugins: Plugins, directory: Path, options: Mapping[str, Any]
) -> Iterator[WorkerGroup]:
    with launch_workers(
        side.loaded.config,
        side.loaded.backend,
        plugins,
        worker_class=_WORKER,
        role="train",
        run_directory=directory,
        options={**options, "directory": str(directory), "kernels": side.side.kernels},
        wait=False,
    ) as workers:
        workers.begin()
        yield workers


def _merged(answers: Sequence[LogProbs]) -> LogProbs:
    return {number: values for answer in answers for number, values in answer.items()}


def _log_prob_differences(actual: LogProbs, expected: LogProbs, limit: float) -> Iterator[Difference]:
    for number, values in sorted(expected.items()):
        apart = [abs(one - other) for one, other in zip(actual[number], values, strict=True)]
        error = max(math.inf if math.isnan(each) else each for each in apart)
        place = f"sequence {number}"
        yield Difference(kind="log-probs", name="", place=place, forward=error, limit=limit)
