"""Actors whose processes are started once for all tests that train; environments for those that install."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from anygauge.config import Config
from anygauge.plugins import Plugins
from anygauge.runtime.launch import launch_workers
from anygauge.runtime.worker_group import WorkerGroup
from anygauge.trainer import start
from anygauge_hooks.types import BackendSpec

ROOT = Path(__file__).resolve().parents[2]
ACTORS = "anygauge_tests.actors:SuccessiveActors"
LaunchActors = Callable[..., "Borrowed"]
ACTOR_GROUPS = pytest.StashKey[ExitStack]()
"""The stack that ends the groups of actors."""


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


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the actors after the last of these tests: idle, each wakes up a hundred times a second."""
    if nextitem is None or not nextitem.path.is_relative_to(Path(__file__).parent):
        item.config.stash.get(ACTOR_GROUPS, ExitStack()).close()


@pytest.fixture(scope="session")
def launch_actors(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LaunchActors]:
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
            *(placement.train_workers, placement.threads_per_worker),
            *(placement.colocated, config.run.deterministic),
            config.train.parallel,  # Megatron's groups last as long as a process
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
        groups[key].before_calls(None)
        groups[key].call("begin", config=config, **options)
        return Borrowed(groups[key])

    with ExitStack() as stack:
        request.config.stash[ACTOR_GROUPS] = stack
        yield launch


@pytest.fixture
def forked_actors(launch_actors: LaunchActors, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the runs of a test train in processes that are there already."""
    monkeypatch.setattr(start, "launch_workers", launch_actors)


# -------------------------------------------------------------------------
# What a user installs
# -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment that has the project's dependencies."""

    path: Path

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.path / "lib" / version / "site-packages"

    def pip_install(self, *arguments: str | Path) -> None:
        options = (
            "--no-deps",
            "--no-index",
            "--no-build-isolation",
            "--disable-pip-version-check",
            "--quiet",
        )
        run_command(sys.executable, "-m", "pip", "--python", self.python, "install", *options, *arguments)

    def pip_resolve(self, name: str, *wheels: Path) -> None:
        """Install a distribution as its metadata asks: from wheels, beside what is there already."""
        folders = (part for wheel in wheels for part in ("--find-links", wheel.parent))
        options = ("--no-index", "--disable-pip-version-check", "--quiet")
        run_command(sys.executable, "-m", "pip", "--python", self.python, "install", *options, *folders, name)

    def run_python(self, code: str) -> str:
        return run_command(self.python, "-I", "-c", code, cwd=self.path)

    def run_anygauge(self, *arguments: str) -> str:
        return run_command(self.path / "bin" / "anygauge", *arguments, cwd=self.path)


def run_command(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command that sees nothing of this checkout through the environment; return what it prints."""
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**plain, "OMP_NUM_THREADS": "1"},  # other tests run beside it
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def dependencies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with links to all that is installed here but the project."""
    links = tmp_path_factory.mktemp("dependencies")
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for item in Path(folder).iterdir():
            if "anygauge" not in item.name and item.suffix != ".pth":
                (links / item.name).symlink_to(item)
    return links


@pytest.fixture(scope="session")
def make_environment(
    tmp_path_factory: pytest.TempPathFactory, dependencies: Path
) -> Callable[[], Environment]:
    """Return a function that makes a fresh environment.

    It sees this one's third-party packages through links, and nothing of the project itself.
    """

    def make() -> Environment:
        environment = Environment(tmp_path_factory.mktemp("venv"))
        run_command(sys.executable, "-m", "venv", "--without-pip", environment.path)
        (environment.site_packages / "dependencies.pth").write_text(f"{dependencies}\n", encoding="utf-8")
        return environment

    return make


def build_both(project: Path, out: Path) -> tuple[Path, Path]:
    """Build the sdist of a project, and from it the wheel; return wheel and sdist."""
    run_command(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, project)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build the sdist of the root, and from it the wheel; return wheel and sdist."""
    return build_both(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="session")
def backend_artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Return wheel and sdist of each backend that is a distribution, built likewise."""
    return {
        name: build_both(ROOT / "backends" / name, tmp_path_factory.mktemp(name)) for name in ("cuda", "npu")
    }


@pytest.fixture(scope="session")
def build_wheel(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Return a function that builds the wheel of a project."""

    def build(project: Path) -> Path:
        out = tmp_path_factory.mktemp("wheel")
        run_command(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, project)
        (wheel,) = out.glob("*.whl")
        return wheel

    return build
