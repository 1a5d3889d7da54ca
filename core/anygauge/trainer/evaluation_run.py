"""An evaluation alone, of a Hugging Face directory or of a checkpoint."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

from anygauge.config import Config
from anygauge.config.load import LoadedConfig
from anygauge.config.schema import Debug
from anygauge.plugins import Plugins
from anygauge.trainer.engines import open_engines
from anygauge.trainer.evaluation import evaluate
from anygauge.trainer.inputs import read_inputs, rewards
from anygauge.trainer.launch import launch_workers
from anygauge.trainer.loop import Loop
from anygauge.trainer.run import ACTOR, open_scorers
from anygauge.trainer.saved import latest_checkpoint, read_checkpoint
from anygauge.trainer.signals import terminate_as_exception
from anygauge.trainer.state import RunState
from anygauge_hooks.errors import CheckpointError, ConfigError
from anygauge_hooks.types import RunInfo

__all__ = ["evaluate_checkpoint"]


def evaluate_checkpoint(loaded: LoadedConfig, plugins: Plugins, source: Path | None) -> dict[str, float]:
    """Return the metrics of every evaluation data set of a config.

    :param source: A Hugging Face directory, a checkpoint, or a run directory for its latest checkpoint;
        ``None`` takes ``model.path``.
    :raises ConfigError: The config names no evaluation data.
    :raises CheckpointError: ``source`` is none of the three.
    """
    if not (loaded.config.eval.data or loaded.config.eval.datasets):
        raise ConfigError("The config has no evaluation data.", hint="Name files in eval.data.")
    checkpoint = None if source is None else find_checkpoint(source)
    config = evaluated(loaded.config, source, is_checkpoint=checkpoint is not None)
    # Kept if something goes wrong: the error names the logs in it.
    directory = Path(tempfile.mkdtemp(prefix="anygauge-eval-"))
    metrics = run_evaluation(config, loaded, plugins, checkpoint, directory)
    shutil.rmtree(directory)
    return metrics


def find_checkpoint(source: Path) -> Path | None:
    """Return the checkpoint that a directory is or holds, or ``None`` for a Hugging Face directory.

    :raises CheckpointError: It is neither.
    """
    if (source / "manifest.json").is_file():
        return read_checkpoint(source).path
    if (source / "checkpoints").is_dir():
        latest = latest_checkpoint(source)
        if latest is not None:
            return latest.path
    if (source / "config.json").is_file():
        return None
    raise CheckpointError(
        f"{source} is no Hugging Face directory, no checkpoint and no run with one.",
        hint="Name runs/NAME, runs/NAME/checkpoints/step-N, or a directory with config.json.",
    )


def evaluated(config: Config, source: Path | None, *, is_checkpoint: bool) -> Config:
    """Return the config of the evaluation: no train engine where there is nothing to load into it."""
    if source is not None and not is_checkpoint:
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": source})})
    trains = is_checkpoint or config.run.task == "sft"
    return config.model_copy(update={"debug": Debug() if trains else Debug(mode="rollout_only")})


def run_evaluation(
    config: Config, loaded: LoadedConfig, plugins: Plugins, checkpoint: Path | None, directory: Path
) -> dict[str, float]:
    """Start the workers, load the checkpoint and evaluate."""
    inputs = read_inputs(config, plugins)
    if config.run.task != "sft" and not rewards(config):
        raise ConfigError("The config has no reward to evaluate with.", hint="Set reward.function.")
    info = RunInfo(
        name=config.run.name,
        directory=str(directory),
        backend=loaded.backend.name,
        total_steps=config.run.steps,
        config=config,
    )
    with terminate_as_exception(), ExitStack() as stack:
        scorers = open_scorers(config, plugins, inputs.eval_sets, directory, stack)
        workers = stack.enter_context(
            launch_workers(
                config,
                loaded.backend,
                plugins,
                worker_class=ACTOR,
                role="actor",
                run_directory=directory,
                beside=config.placement.rollout_workers,
            )
        )
        engines = stack.enter_context(open_engines(config, loaded.backend, plugins, workers, directory))
        if checkpoint is not None:
            workers.call("load_checkpoint", path=str(checkpoint))
            engines.sync(1)
        return evaluate(
            Loop(
                config=config,
                plugins=plugins,
                workers=workers,
                engines=engines,
                source=inputs.source,
                eval_sets=inputs.eval_sets,
                scorer=None,
                scorers=scorers,
                estimator=inputs.estimator,
                flops_per_token=inputs.flops_per_token,
                trackers=(),
                state=RunState(info),
                checkpoints=None,
            )
        )
