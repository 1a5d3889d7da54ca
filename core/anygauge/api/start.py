"""Start of a run, for the command line and for Python: plugins, backend, checked config, training."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.health.record import read_health

if TYPE_CHECKING:
    from anygauge.config import Config, LoadedConfig
    from anygauge.plugins import Plugins
    from anygauge.run_directory.checkpoint_reader import Checkpoint
    from anygauge_hooks.types import BackendSpec, RunInfo

__all__ = [
    "Evaluation",
    "Loaded",
    "evaluate_loaded",
    "find_local_modules",
    "load",
    "load_evaluation",
    "say",
    "train_loaded",
]

Say = Callable[[str], None]
"""Takes a line for the user."""
Overrides = Sequence[str | tuple[str, Any]] | Mapping[str, Any]
"""As :func:`anygauge.config.load.load_config` takes them."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checked config, and the plugins that it was checked with."""

    config: LoadedConfig
    plugins: Plugins
    backend: str | None = None
    """Backend that was asked for, which is yet to be probed."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A checked evaluation."""

    loaded: Loaded
    checkpoint: Checkpoint | None
    """Loaded over the weights of ``model.path``."""

    @property
    def kind(self) -> str:
        """``model`` or ``checkpoint``."""
        return "model" if self.checkpoint is None else "checkpoint"

    @property
    def path(self) -> Path:
        """Path or name of what is evaluated."""
        return self.loaded.config.config.model.path if self.checkpoint is None else self.checkpoint.path


def load(
    base: str | Path | Mapping[str, Any],
    overrides: Overrides,
    *,
    say: Say,
    backend: str | None = None,
    plugins: Mapping[str, object] | None = None,
    is_dry: bool = False,
    check_files: bool = True,
) -> Loaded:
    """Load the plugins and the config of a training, and say what was chosen.

    :param base: As of :func:`anygauge.config.load.load_config`.
    :param backend: ``None`` takes the only usable accelerator, else ``cpu``.
    :param plugins: Plugins of this run alone, by name.
    :param is_dry: Whether nothing is run, so that the device need not be here, nor what is not downloaded.
    :raises AnygaugeError: The backend cannot run here, or the config has problems.
    """
    from anygauge.config import load_config

    loaded_plugins = _plugins(plugins or {})
    for name, error in sorted(loaded_plugins.load_errors.items()):
        say(f"warning: plugin {name!r} failed to load: {error!r}")
    chosen, reason = _backend(loaded_plugins, backend, is_dry=is_dry)
    say(f"backend: {chosen.name} ({reason})")
    loaded = load_config(
        base,
        overrides,
        backend=chosen,
        plugins=loaded_plugins,
        check_files=check_files,
        download=not is_dry,
        defers_models=not is_dry,
    )
    for change in loaded.changes:
        say(f"filled in: {change}")
    for line in _model(loaded.config, loaded_plugins, is_dry=is_dry):
        say(line)
    return Loaded(loaded, loaded_plugins, backend)


def train_loaded(
    loaded: Loaded,
    *,
    say: Say,
    when_built: Callable[[], object] = lambda: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> RunInfo:
    """Train, and say where everything is; the arguments are those of :func:`anygauge.trainer.run.train`.

    The processes start first. What takes longer is checked and imported while they come up.
    """
    from anygauge.trainer.start import start_run

    config, plugins = loaded.config, loaded.plugins
    with start_run(config, plugins, check=partial(_check, loaded)) as started:
        from anygauge.trainer.run import train_started

        info = train_started(config, plugins, started, when_built=when_built, should_stop=should_stop)
    say(f"done: {info.step} of {info.total_steps} steps; everything is in {info.directory}")
    if firing := _firing_rules(Path(info.directory)):
        say(f"health: {', '.join(firing)} fired at the end: see `anygauge report {info.directory}`")
    return info


def _firing_rules(directory: Path) -> list[str]:
    """Return the health rules that fire at the end of a run; none where the file cannot be read."""
    try:
        health = read_health(directory)
    except (OSError, ValueError):
        return []
    return [] if health is None else [rule.rule for rule in health.firing]


def _check(loaded: Loaded) -> None:
    """Check what needs torch, or reads the model."""
    if loaded.backend is not None:
        from anygauge.plugins import select_backend

        select_backend(loaded.plugins, loaded.backend)
    loaded.config.check_models()


def load_evaluation(
    base: str | Path | Mapping[str, Any],
    overrides: Overrides,
    *,
    say: Say,
    backend: str | None = None,
    checkpoint: Path | None = None,
    plugins: Mapping[str, object] | None = None,
) -> Evaluation:
    """Load the plugins and the config of an evaluation, and say what is evaluated.

    :param checkpoint: A Hugging Face directory, a checkpoint of a run, or a run for its latest; ``None``
        evaluates ``model.path``.
    :raises AnygaugeError: The backend cannot run here, the config has problems, or there is no checkpoint.
    """
    from anygauge.config import load_config
    from anygauge.plugins import select_backend
    from anygauge.trainer.evaluation_run import evaluation_overrides, find_checkpoint

    loaded_plugins = _plugins(plugins or {})
    chosen, reason = select_backend(loaded_plugins, backend)
    say(f"backend: {chosen.name} ({reason})")
    found = None if checkpoint is None else find_checkpoint(checkpoint)
    fixed = evaluation_overrides(checkpoint if found is None else None)
    loaded = load_config(
        base,
        _above(overrides, fixed),
        backend=chosen,
        plugins=loaded_plugins,
        trains=False,
    )
    evaluation = Evaluation(Loaded(loaded, loaded_plugins), found)
    say(f"{evaluation.kind}: {evaluation.path}")
    return evaluation


def evaluate_loaded(
    evaluation: Evaluation, *, when_built: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """Return the metrics of every evaluation data set."""
    from anygauge.trainer.evaluation_run import evaluate_checkpoint

    loaded = evaluation.loaded
    return evaluate_checkpoint(loaded.config, loaded.plugins, evaluation.checkpoint, when_built=when_built)


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def _above(overrides: Overrides, fixed: Sequence[tuple[str, Any]]) -> Overrides:
    """Return overrides with others laid over them."""
    if not isinstance(overrides, Mapping):
        return [*overrides, *fixed]
    from anygauge.config.overrides import read_overrides
    from anygauge.config.tree import merge

    return merge(overrides, read_overrides(fixed)[0])


def find_local_modules() -> None:
    """Let modules of the current directory be found, as `python -m` does: a config may name some."""
    if not {"", os.getcwd()} & {*sys.path}:
        sys.path.append(os.getcwd())


def _plugins(more: Mapping[str, object]) -> Plugins:
    """Return the installed plugins and those of this run."""
    from anygauge.plugins import load_plugins

    find_local_modules()
    plugins = load_plugins()
    for name, plugin in more.items():
        plugins.register(plugin, name)
    return plugins


def _backend(plugins: Plugins, name: str | None, *, is_dry: bool) -> tuple[BackendSpec, str]:
    """Return the backend and why it was chosen. One that was asked for is yet to be probed."""
    from anygauge.plugins import find_backend, select_backend

    if name is None:
        return select_backend(plugins)
    reason = "asked for; a dry run does not probe it" if is_dry else "asked for"
    return find_backend(plugins, plugins.named("register_backends"), name), reason


def _model(config: Config, plugins: Plugins, *, is_dry: bool) -> Iterator[str]:
    """Yield which model the train engine builds, and what else supports it where nothing is trained."""
    from anygauge.config.rules.architecture import engine_support, support_text
    from anygauge.disk import read_json

    engine = plugins.find("register_train_engines", config.train.engine)
    try:
        hf = read_json(config.model.path / "config.json")
        names = ", ".join(map(str, hf["architectures"]))
    except (OSError, ValueError, KeyError, TypeError):
        return  # not downloaded yet, or a problem that the check of the files has told
    if engine is not None and engine.make_family is not None:
        yield f"model: {names}, built by transformers (train.engine = {engine.name!r})"
    if is_dry and (families := engine_support(plugins, hf)[0]):
        yield support_text(hf, families)
