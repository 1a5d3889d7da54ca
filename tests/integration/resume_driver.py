"""A driver that trains, and kills its whole run with SIGKILL at a named point. Run by test_resume."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from anygauge import disk
from anygauge.config.load import load_config
from anygauge.plugins import load_plugins
from anygauge.run_directory import checkpoints
from anygauge.trainer import actors, start
from anygauge.trainer.run import train
from anygauge_hooks import hookimpl
from anygauge_hooks.types import RunInfo
from anygauge_tests.observer import Digits

POINT, COUNT = "RESUME_TEST_POINT", "RESUME_TEST_COUNT"


def countdown(point: str) -> Callable[[], None]:
    """Return a function that kills the driver and its workers when it is called as often as asked for."""
    calls = iter(range(1, 10**6))

    def reached() -> None:
        if os.environ.get(POINT) == point and next(calls) == int(os.environ[COUNT]):
            kill_run(os.getpid() if __name__ == "__main__" else os.getppid())

    return reached


def kill_run(driver: int) -> None:
    """Kill a driver and all that it started, Ray's processes included, this one last."""
    started = psutil.Process(driver).children(recursive=True)
    for process in (psutil.Process(driver), *started):
        if process.pid != os.getpid():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def before(reached: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that may not live to do what it does."""

    def wrapper(*arguments: Any, **options: Any) -> Any:
        reached()
        return function(*arguments, **options)

    return wrapper


class DyingActor(actors.ActorWorker):
    """An actor that kills its run at one of the points."""

    def __init__(self, config: Any, context: Any, **options: Any) -> None:
        super().__init__(config, context, **options)
        from anygauge.engines import background_save, checkpoint_files

        if context.rank == context.world_size - 1:
            self.generate = before(countdown("generation"), self.generate)  # type: ignore[method-assign]
            trainer: Any = self.trainer
            trainer.train_step = before(countdown("training"), trainer.train_step)
            background: Any = background_save
            # The state is copied, and nothing is written.
            background.write_rank = before(countdown("copied"), background.write_rank)
            files: Any = checkpoint_files
            # The tensors are written, and nothing that describes them.
            files.asdict = before(countdown("between files"), files.asdict)


class Boundary(Digits):
    """A plugin that kills the run after a step, and brings a reward that differs from sample to sample."""

    def __init__(self) -> None:
        self.reached = countdown("boundary")

    @hookimpl
    def after_train_step(self, run: RunInfo, metrics: Mapping[str, float]) -> None:
        self.reached()


def prepare() -> None:
    """Put the points of the driver, and the actor with its own, in place."""
    module: Any = checkpoints
    # Every rank has written, and there is no manifest yet.
    module._describe = before(countdown("written"), module._describe)
    module.publish = before(countdown("renaming"), module.publish)
    module.checkpoint_paths = before(countdown("retention"), module.checkpoint_paths)
    removal = countdown("removal")

    def rmtree(path: Path, **options: Any) -> None:
        if path.name.endswith(".removed") and path.exists():
            next(path.iterdir()).unlink()
            removal()
        shutil.rmtree(path, **options)

    directories: Any = disk
    directories.shutil = SimpleNamespace(rmtree=rmtree)
    start.ACTOR = "resume_driver:DyingActor"


def main(config: str, *overrides: str) -> None:
    plugins = load_plugins(only=["cpu", "models"])
    plugins.register(Boundary(), "boundary")
    if POINT in os.environ:
        prepare()
    train(load_config(config, overrides, backend="cpu", plugins=plugins), plugins)


if __name__ == "__main__":
    main(*sys.argv[1:])
