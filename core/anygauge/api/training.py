"""``anygauge.train``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.api.call import Call, check_keywords
from anygauge.api.run import Run
from anygauge.api.short_errors import short_errors
from anygauge.api.start import load, say, train_loaded
from anygauge.failures import on_failure
from anygauge.observability.terminal_warnings import terminal_warnings
from anygauge_hooks import hookimpl
from anygauge_hooks.errors import ConfigError

if TYPE_CHECKING:
    from anygauge.config import Config
    from anygauge_hooks.types import RunInfo

__all__ = ["train"]

OnStep = Callable[[int, Mapping[str, float]], object]
"""Called after each step with its number and its metrics; a true result ends the run."""


@short_errors()
@terminal_warnings()
def train(
    source: str | Path | Mapping[str, Any] | Config | Run | None = None,
    data: Iterable[Mapping[str, Any]] | str | Path | Mapping[str, Any] | None = None,
    reward: str | Callable[..., Any] | Sequence[Any] | Mapping[str, Any] | None = None,
    *,
    eval_data: Iterable[Any] | str | Path | Mapping[str, Any] | None = None,
    metrics: str | Callable[..., Any] | Sequence[Any] | None = None,
    before_step: Callable[[int], object] | None = None,
    on_step: OnStep | None = None,
    backend: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    **tables: Any,
) -> Run:
    """Train a policy and return the run.

    Everything that a TOML file sets can be set here: a table of the file is a keyword with a dict, and
    ``**{"train.lr": 1e-5}`` sets one key. Errors are those of the command line.

    Example::

        run = train(
            "Qwen/Qwen3-0.6B",
            data=[{"prompt": "37+58=", "label": "95"}],
            reward=lambda response, label: float(response.strip() == label),
            run={"steps": 20},
            train={"lr": 1e-6},
        )
        print(run.metrics_list[-1]["rollout/raw_reward"])

    :param source: A model (a directory, a name on a hub, or a run that trained it), or a config: a TOML file,
        a dict of its tables, or a :class:`~anygauge.config.Config`. ``None`` if a table is ``model``.
    :param data: Rows (a list of dicts, a ``datasets.Dataset``, a pandas DataFrame), one path or several; a
        dict is the table ``[data]``. Rows are written to ``inputs/`` in the run directory.
    :param reward: A function, the name of one, or a list of these, which are added up; ``(reward, 0.5)`` in a
        list has a weight, a dict is the table ``[reward]``. A function takes ``response``, ``label``,
        ``metadata`` and ``prompt`` by name, or has TRL's form ``reward(completions, **columns)``.
    :param eval_data: As ``data``; a dict has data sets by name.
    :param metrics: A function, the name of one, or a list of these. Each is called after a step and takes of
        ``groups``, ``metrics`` and ``step`` what it names; the dict that it returns is recorded as
        ``custom/<name>``.
    :param before_step: Called before each step with its number; an exception ends the run and is raised here.
    :param on_step: Called after each step with its number and its metrics. A true result ends the run as
        after its last step; an exception ends it and is raised here.
    :param backend: ``None`` takes the only usable accelerator, else ``cpu``.
    :param resume: Continue the run of ``run={"name": ...}`` from its last checkpoint.
    :param overwrite: Delete an earlier run of that name.
    :param tables: Tables of the config, and single keys by dotted name.
    :raises AnygaugeError: With the codes of ``docs/errors.md``.
    :raises KeyboardInterrupt: Ctrl-C, or the stop button of a notebook; the last step is saved, and every
        process of the run has ended.
    """
    check_keywords(train, tables)
    call = Call.of(source, tables, data=data, reward=reward, eval_data=eval_data)
    call.start_as(resume=resume, overwrite=overwrite)
    if metrics is not None:
        call.give_metrics(metrics)
    watcher = _StepWatcher(before_step, on_step)
    plugins: dict[str, object] = {"anygauge.python": call.functions, "anygauge.on_step": watcher}
    with on_failure(call.discard_unused_rows):
        base, overrides = call.layers()
        loaded = load(base, overrides, say=say, backend=backend, plugins=plugins)
        call.functions.limited.timeout_s = loaded.config.config.reward.timeout_s
        info = train_loaded(loaded, say=say, should_stop=lambda: watcher.is_stopped)
    return Run(info.directory)


class _StepWatcher:
    """Plugin that calls functions before and after each step."""

    def __init__(self, before_step: Callable[[int], object] | None, on_step: OnStep | None) -> None:
        if before_step is not None:
            what = "before_step cannot be called with the number of a step"
            _check_callable(before_step, [1], what, "Write def before_step(step).")
        if on_step is not None:
            what = "on_step cannot be called with a step and its metrics"
            _check_callable(
                on_step, [1, {}], what, "Write def on_step(step, metrics); a true result ends the run."
            )
        self._before_step = before_step
        self._on_step = on_step
        self.is_stopped = False

    @hookimpl(trylast=True)
    def before_train_step(self, run: RunInfo) -> None:
        """Call the function of the beginning."""
        if self._before_step is not None:
            self._before_step(run.step + 1)

    @hookimpl(trylast=True)
    def after_train_step(self, run: RunInfo, metrics: Mapping[str, float]) -> None:
        """Call the function of the end, and remember whether it ends the run."""
        if self._on_step is not None:
            self.is_stopped |= bool(self._on_step(run.step, dict(metrics)))


def _check_callable(function: Callable[..., object], arguments: Sequence[Any], what: str, hint: str) -> None:
    """Raise at once if a function cannot be called in a step; the run would have to begin first.

    :param what: Begins the error, such as ``on_step cannot be called with a step``.
    :raises ConfigError: It does not take the arguments, or is async: nothing would await it.
    """
    if any(inspect.iscoroutinefunction(each) for each in (function, type(function).__call__)):
        raise ConfigError(f"{what}: it is an async function.", hint=hint)
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise ConfigError(f"{what}: {error}.", hint=hint) from error
    except ValueError:
        return  # a function of C says nothing of its arguments
