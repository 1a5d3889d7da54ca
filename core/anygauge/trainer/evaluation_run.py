"""Standalone evaluation of a Hugging Face directory or of a checkpoint."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from anygauge.config import Config
from anygauge.config.load import LoadedConfig
from anygauge.config.roles import evaluation_components
from anygauge.config.schema import Lora
from anygauge.data.media.finder import MediaFinder
from anygauge.hub import localized
from anygauge.hub.names import model_name
from anygauge.observability.report.run_files import last_export
from anygauge.plugins import Plugins
from anygauge.rollout.rewards import check_reward
from anygauge.run_directory.checkpoint_reader import (
    DIRECTORY,
    MANIFEST,
    Checkpoint,
    checkpoint_paths,
    latest_checkpoint,
    read_checkpoint,
)
from anygauge.runtime.signals import terminate_as_exception
from anygauge.trainer.evaluation import evaluate, sample_set
from anygauge.trainer.inputs import EvalSet, load_tokenizer, media_finder, read_eval_sets, rewards
from anygauge.trainer.run import open_session
from anygauge.trainer.session import Session
from anygauge.trainer.start import run_info
from anygauge.trainer.state import RunState
from anygauge_hooks.errors import AnygaugeError, CheckpointError, ConfigError, WorkerFailedError
from anygauge_hooks.rl import Group

__all__ = ["evaluate_checkpoint", "evaluation_overrides", "find_checkpoint", "generate_samples"]

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors of a disk that takes no more files."""

Override = tuple[str, Any]
OF_TRAINING: Sequence[Override] = (
    *(("data.train", []), ("run.resume", False), ("run.overwrite", False), ("run.metrics", [])),
    *((f"save.{key}", "none") for key in ("every", "best", "hf_every")),
    ("save.hf_at_end", False),
    *(("debug.mode", "none"), ("debug.replay_rollouts", "none"), ("debug.replay_batches", "none")),
    ("debug.dump_batches", False),
    *((f"{role}.path", "none") for role in ("reference", "teacher", "critic")),
)
"""Keys of what an evaluation does not do; what they name need not be there."""
WITHOUT_ADAPTERS: Sequence[Override] = tuple(
    (f"train.lora.{name}", "none" if field.default is None else field.default)
    for name, field in Lora.model_fields.items()
)
"""Keys of a directory that is evaluated as it is: the adapters of an export are merged."""


def find_checkpoint(source: Path) -> Checkpoint | None:
    """Return the checkpoint that a directory is or holds, or ``None`` for a Hugging Face directory.

    :raises CheckpointError: It is neither, or all that it holds are damaged.
    """
    if (source / MANIFEST).is_file():
        return read_checkpoint(source)
    try:
        latest = latest_checkpoint(source)
    except CheckpointError as error:
        error.hint = f"Restore the files. {_instead(source)}"
        raise
    if latest is None and not (source / "config.json").is_file():
        raise CheckpointError(
            f"{source} is not a Hugging Face directory, no checkpoint and no run with one.",
            hint=_instead(source),
        )
    return latest


def _instead(source: Path) -> str:
    """Return what to name instead of a directory."""
    places = (source, source.parent, source.parent / DIRECTORY)
    steps = (each for place in places for each in checkpoint_paths(place) if each != source)
    if meant := last_export(source) or next(steps, None):
        return f"Did you mean --checkpoint {meant}?"
    name = model_name("--checkpoint", source)
    named = f" A model on a hub is named with --model.path {name}." if name else ""
    return f"Name runs/NAME, runs/NAME/checkpoints/step-N, or a directory with config.json.{named}"


def evaluation_overrides(model: Path | None) -> list[Override]:
    """Return what an evaluation sets otherwise than the config of a training, before that is checked.

    :param model: A Hugging Face directory to evaluate; ``None`` leaves ``model.path``.
    """
    return [*OF_TRAINING, *([] if model is None else [("model.path", str(model)), *WITHOUT_ADAPTERS])]


def evaluate_checkpoint(
    loaded: LoadedConfig,
    plugins: Plugins,
    checkpoint: Checkpoint | None,
    *,
    when_built: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Return the metrics of every evaluation data set of a config; of a checkpoint, its step is the first.

    :param loaded: With :func:`evaluation_overrides`.
    :param checkpoint: Loaded over the weights of ``model.path``.
    :param when_built: Called once all processes and objects are there, before the first sample.
    :raises ConfigError: The config names no evaluation data, or no reward to evaluate with.
    """
    with open_evaluation(loaded, plugins, checkpoint) as session:
        when_built()
        metrics = evaluate(session)
    return metrics if checkpoint is None else {"eval/step": checkpoint.step, **metrics}


def generate_samples(loaded: LoadedConfig, plugins: Plugins) -> list[Group]:
    """Return samples of every evaluation data set of a config, without rewards.

    :param loaded: With :func:`evaluation_overrides`.
    """
    with open_evaluation(loaded, plugins, None) as session:
        return [group for each in session.eval_sets for group in sample_set(session, each)]


@contextmanager
def open_evaluation(
    loaded: LoadedConfig, plugins: Plugins, checkpoint: Checkpoint | None
) -> Iterator[Session]:
    """Start the processes of an evaluation; the block's end ends them."""
    eval_sets, media = read_evaluation(localized(loaded.config), plugins)
    components = evaluation_components(loaded.config, loads=checkpoint is not None)
    with terminate_as_exception(), logs_of_failures() as directory, ExitStack() as stack:
        state = RunState(run_info(loaded, directory, plugins.environment()), version=1)
        if checkpoint is not None:
            state.finish_step(checkpoint.step)
        path = None if checkpoint is None else checkpoint.path.absolute()
        yield open_session(loaded, plugins, components, eval_sets, state, stack, checkpoint=path, media=media)


def read_evaluation(config: Config, plugins: Plugins) -> tuple[list[EvalSet], MediaFinder | None]:
    """Read the data sets and check their rewards; return what finds their media, too."""
    if not (config.eval.data or config.eval.datasets):
        raise ConfigError("The config has no evaluation data.", hint="Name files in eval.data.")
    if config.run.task != "sft" and not rewards(config):
        raise ConfigError("The config has no reward to evaluate with.", hint="Set reward.function.")
    for reward in rewards(config):
        check_reward(reward, plugins)
    tokenizer = load_tokenizer(config)
    media = media_finder(config, plugins, tokenizer)
    return read_eval_sets(config, plugins, tokenizer, media), media


@contextmanager
def logs_of_failures() -> Iterator[Path]:
    """Make a directory for the logs of the processes; an error that leaves the block keeps and names it.

    :raises CheckpointError: It cannot be made, or there is no room in it.
    """
    try:
        directory = Path(tempfile.mkdtemp(prefix="anygauge-eval-"))
    except OSError as error:
        raise _no_place(error) from error
    with ExitStack() as block:
        block.push(lambda kind, error, _: _keep_or_remove(directory, error))
        yield directory


def _keep_or_remove(directory: Path, error: BaseException | None) -> None:
    kept = f"The logs are kept in {directory}/logs."
    is_full = isinstance(error, OSError) and error.errno in NO_ROOM
    if isinstance(error, AnygaugeError):
        shown = error.__cause__ if isinstance(error, WorkerFailedError) else None
        for each in (error, shown):
            if isinstance(each, AnygaugeError):
                each.hint = " ".join(filter(None, (each.hint, kept)))
    elif isinstance(error, Exception) and not is_full:
        error.add_note(kept)
    else:  # a result is worth more than order in a temporary directory
        shutil.rmtree(directory, ignore_errors=True)
    if isinstance(error, OSError) and is_full:
        raise _no_place(error) from error


def _no_place(error: OSError) -> CheckpointError:
    return CheckpointError(
        f"The logs of the evaluation cannot be written: {error}.",
        hint="Set TMPDIR to a directory that you may write to, on a disk with room.",
    )
