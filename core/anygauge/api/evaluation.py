"""``anygauge.evaluate``."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.api.call import Call, check_keywords
from anygauge.api.run_view import RunView
from anygauge.api.short_errors import short_errors
from anygauge.api.start import evaluate_loaded, load_evaluation, say
from anygauge.config.rules.file import INPUTS
from anygauge.observability.terminal_warnings import terminal_warnings

if TYPE_CHECKING:
    from anygauge.config import Config

__all__ = ["evaluate"]


@short_errors()
@terminal_warnings()
def evaluate(
    source: str | Path | Mapping[str, Any] | Config | RunView | None = None,
    data: Iterable[Any] | str | Path | Mapping[str, Any] | None = None,
    reward: str | Callable[..., Any] | Sequence[Any] | Mapping[str, Any] | None = None,
    *,
    checkpoint: str | Path | RunView | None = None,
    backend: str | None = None,
    **tables: Any,
) -> dict[str, float]:
    """Return the metrics of a model or a checkpoint on evaluation data, as ``anygauge eval`` does.

    Example::

        evaluate("Qwen/Qwen3-0.6B", data=[{"prompt": "37+58=", "label": "95"}], reward="exact_match")
        evaluate(run)  # the last checkpoint, on the evaluation data of the run

    :param source: As of :func:`anygauge.train`. A run is evaluated with its own config: its last checkpoint,
        or its export where it saved none.
    :param data: Evaluation data, as ``eval_data`` of :func:`anygauge.train`.
    :param reward: As of :func:`anygauge.train`.
    :param checkpoint: A Hugging Face directory, a checkpoint, or a run for its last one, in place of the
        model of the config.
    :returns: ``{"eval/NAME": 0.25, ...}``; of a checkpoint, ``eval/step`` too.
    :raises AnygaugeError: With the codes of ``docs/errors.md``.
    """
    check_keywords(evaluate, tables)
    if isinstance(source, RunView):
        checkpoint = checkpoint or source
        source = source.directory / "config.toml"
    call = Call.of(source, tables, reward=reward, eval_data=data)
    call.name_it("evaluation")
    with tempfile.TemporaryDirectory(prefix="anygauge-rows-") as rows:
        base, overrides = call.layers(Path(rows, INPUTS))
        evaluation = load_evaluation(
            base,
            overrides,
            say=say,
            backend=backend,
            checkpoint=_path(checkpoint),
            plugins={"anygauge.python": call.functions},
        )
        call.functions.limited.timeout_s = evaluation.loaded.config.config.reward.timeout_s
        return evaluate_loaded(evaluation)


def _path(checkpoint: str | Path | RunView | None) -> Path | None:
    """Return the directory of what is evaluated: of a run that saved nothing else, its export."""
    if not isinstance(checkpoint, RunView):
        return None if checkpoint is None else Path(checkpoint)
    last = checkpoint.last_checkpoint
    return checkpoint.model if last is None else checkpoint.directory
