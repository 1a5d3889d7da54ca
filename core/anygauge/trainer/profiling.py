"""Profiles of the steps that ``profile.steps`` names."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from anygauge.observability.phases import record_phase
from anygauge.observability.profiler import PROFILES
from anygauge.trainer.session import Session

__all__ = ["profiled", "warn_of_done_steps"]

_log = logging.getLogger(__name__)


def warn_of_done_steps(steps: Iterable[int], done: int) -> None:
    """Warn of steps to profile that a resumed run does not take again.

    :param steps: Those of ``profile.steps``.
    :param done: Step at which the run goes on.
    """
    if past := sorted(step for step in steps if step <= done):
        which = ", ".join(map(str, past))
        _log.warning("profile.steps: no profile of step %s: the run resumes after step %d", which, done)


@contextmanager
def profiled(session: Session, step: int) -> Iterator[None]:
    """Record the block as a profile, if its step is to have one.

    What goes wrong is a warning. Workers write when the block is done; after an error in it they do not, for
    they are gone.
    """
    if step not in session.config.profile.steps:
        yield
        return
    directory = Path(session.info.directory) / PROFILES / f"step-{step:08d}"
    with record_phase("profile"):
        _warn(_start(session, directory))
    yield
    with record_phase("profile"):
        _warn([*session.workers.call("stop_profile"), *session.engines.stop_profile()])
    _log.info("profile of step %d: %s", step, directory)


def _start(session: Session, directory: Path) -> Iterable[str | None]:
    profile = session.config.profile
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return [f"{directory} cannot be made: {error}"]
    engines = session.engines.start_profile(profile.kind, directory, profile.ranks)
    if profile.kind == session.config.rollout.engine:  # its servers record
        return engines
    start = partial(session.workers.call, "start_profile", kind=profile.kind, ranks=profile.ranks)
    return [*engines, *start(directory=str(directory))]


def _warn(reasons: Iterable[str | None]) -> None:
    for reason in reasons:
        if reason is not None:
            _log.warning("%s", reason)
