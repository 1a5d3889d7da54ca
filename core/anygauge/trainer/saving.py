"""Saving of a run: its checkpoints, those after an error, and the exported model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from anygauge.config.roles import critic_config
from anygauge.config.rules.algorithm import has_critic
from anygauge.observability.phases import record_phase
from anygauge.plugins import Plugins
from anygauge.rollout.producer import RolloutsStopped
from anygauge.run_directory.checkpoint_reader import DIRECTORY as CHECKPOINTS
from anygauge.run_directory.checkpoint_reader import checkpoint_paths
from anygauge.run_directory.checkpoints import CheckpointWriter, export_hf
from anygauge.run_directory.write_progress import expected_bytes
from anygauge.trainer.loop_state import Loop
from anygauge.trainer.state import RunState
from anygauge_hooks.errors import AnygaugeError, HealthError

__all__ = ["announce", "finish_saving", "save", "save_last", "save_on_error", "tell_of_wait"]

_log = logging.getLogger(__name__)


def save(loop: Loop, step: int, *, ends: bool = False) -> bool:
    """Write what is due after a step, see to the checkpoint that is being written, and return if any is.

    :param ends: Whether the run takes no further step, though it was to take some.
    """
    settings, due = loop.config.save, False
    if loop.checkpoints is not None and settings.every is not None:
        announce(loop, loop.checkpoints.poll())
        due = ends or step % settings.every == 0 or step == loop.info.total_steps
        if due:
            announce(loop, loop.checkpoints.start(step, loop.session.state.state_dict(), replaces=not ends))
            if ends:
                announce(loop, loop.checkpoints.finish())
    if loop.session.components.trains and settings.hf_every is not None and step % settings.hf_every == 0:
        export(loop, f"hf-step-{step}")
        due = True
    return due


def save_last(loop: Loop, *, replaces: bool = True) -> None:
    """Write a checkpoint of the last step, unless there is one, and wait for it.

    :param replaces: Whether older checkpoints make room for it.
    """
    checkpoints, step = loop.checkpoints, loop.info.step
    assert checkpoints is not None, "the run is saved"
    if step not in (checkpoints.complete, checkpoints.writing):
        announce(loop, checkpoints.start(step, loop.session.state.state_dict(), replaces=replaces))
    announce(loop, checkpoints.finish())
    if checkpoints.complete != step:
        _log.warning("the run ends without a checkpoint of step %d", step)


@contextmanager
def save_on_error(loop: Loop, step: int) -> Iterator[None]:
    """Save the steps that are complete where data, a function of the user or a health rule ends the run.

    The checkpoint is written beside those that are there. In the first step of this part of the run there is
    nothing to save. A signal is no ``Exception``: the second one stops the run at once.

    :param step: Step that the block belongs to, which has not begun to train, or is complete.
    """
    try:
        yield
    except RolloutsStopped:  # by the first signal, after which the run is saved in order
        raise
    except Exception as error:  # foreign code: plugins, rewards, metrics and data
        loop.directory.check()  # never save into a directory that has taken the place of the run's
        has_learned = step > loop.first_step
        if has_learned and loop.checkpoints is not None and not loop.session.workers.is_ended:
            save_after(loop, loop.checkpoints, error)
        if isinstance(error, AnygaugeError) and (has_learned or isinstance(error, HealthError)):
            hint = error.hint or ""
            error.hint = hint if "--resume" in hint else f"{hint}\n  {resume_hint(loop)}".strip()
        raise


def save_after(loop: Loop, checkpoints: CheckpointWriter, error: Exception) -> None:
    """Save the last step in a run that an error ends; where that fails too, a warning says so."""
    step, session = loop.info.step, loop.session
    try:
        if step != checkpoints.complete:
            tell_of_wait(session.plugins, session.state, f"saving step {step} after {type(error).__name__}")
        save_last(loop, replaces=False)
    except Exception as lost:  # noqa: BLE001 - foreign code: plugins hear of the checkpoint; `error` must be seen
        _log.warning("step %d could not be saved: %s", step, lost)


def resume_hint(loop: Loop) -> str:
    """Return where ``--resume`` goes on; the checkpoint may be one of an earlier part of the run."""
    if checkpoint_paths(loop.directory.path / CHECKPOINTS):
        return "--resume goes on from the last checkpoint."
    without = "There is no checkpoint: --resume starts again at step 1."
    return without if loop.config.save.every else f"{without} Set save.every to save checkpoints."


def finish_saving(loop: Loop) -> None:
    """Export the trained model while the last checkpoint is being written, and wait for both."""
    if loop.config.save.hf_at_end and loop.session.components.trains:
        with record_phase("save"):
            export(loop, "hf")
    if loop.checkpoints is not None:
        announce(loop, loop.checkpoints.finish())
    loop.directory.check()


def export(loop: Loop, name: str) -> None:
    """Write the trained model, and its critic, as a Hugging Face directory of the run directory."""
    config, session = loop.config, loop.session
    roles = [config, critic_config(config)] if has_critic(config, session.plugins) else [config]
    sizes = [expected_bytes(each.model.path, 2 if each.train.dtype == "bfloat16" else 4) for each in roles]
    tell = partial(tell_of_wait, session.plugins, session.state)
    is_merged = not config.train.lora.is_on or config.train.lora.export != "adapter"
    export_hf(session.workers, Path(loop.info.directory) / name, tell, sum(sizes) if is_merged else 0)


def announce(loop: Loop, checkpoint: Path | None) -> None:
    """Tell the observers of a checkpoint that has become complete."""
    if checkpoint is not None:
        _log.info("checkpoint %s is complete", checkpoint)
        loop.session.plugins.notify("after_save_checkpoint", run=loop.info, path=str(checkpoint))


def tell_of_wait(plugins: Plugins, state: RunState, message: str) -> None:
    """Log what the run waits for, and tell the observers."""
    _log.info("%s", message)
    plugins.notify("on_wait", run=state.info, message=message)
