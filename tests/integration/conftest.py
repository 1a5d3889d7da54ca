"""Actors whose processes are started once for all tests that are about training, not about starting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

import pytest

from anygauge.config import Config
from anygauge.plugins import Plugins
from anygauge.trainer import run
from anygauge.trainer.launch import launch_workers
from anygauge.trainer.worker_group import WorkerGroup
from anygauge_hooks.types import BackendSpec

ACTORS = "anygauge.testing.actors:SuccessiveActors"
LaunchActors = Callable[..., "Borrowed"]


class Borrowed:
    """A group whose processes go on after the run that it was asked for."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def __enter__(self) -> Borrowed:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


@pytest.fixture(scope="session")
def launch_actors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchActors]:
    """Return what stands for ``launch_workers``: the processes of the last run go on with the next.

    There is a group for each way of starting it. The logs of the workers are not in the run directory.
    """
    groups: dict[tuple[object, ...], WorkerGroup] = {}

    def launch(
        config: Config,
        backend: BackendSpec,
        plugins: Plugins,
        *,
        options: Mapping[str, Any] = MappingProxyType({}),
        **ignored: Any,
    ) -> Borrowed:
        placement = config.placement
        key = (
            *(placement.num_workers, placement.threads_per_worker),
            *(placement.colocated, config.run.deterministic),
        )
        if key not in groups or groups[key].is_ended:
            directory = tmp_path_factory.mktemp("actors")
            local = config.model_copy(
                update={"placement": placement.model_copy(update={"launcher": "local"})}
            )
            groups[key] = launch_workers(
                local, backend, plugins, worker_class=ACTORS, role="actor", run_directory=directory
            )
            stack.callback(groups[key].end)
        groups[key].call("begin", config=config, **options)
        return Borrowed(groups[key])

    with ExitStack() as stack:
        yield launch


@pytest.fixture
def warm_actors(launch_actors: LaunchActors, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the runs of a test train in processes that are there already."""
    monkeypatch.setattr(run, "launch_workers", launch_actors)
