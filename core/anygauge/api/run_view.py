"""Directory of a run: its metrics, samples, report and model."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.config.schema import Config
from anygauge.disk import parse_toml
from anygauge.extras import install_extra
from anygauge.health.record import HEALTH_FILE, Health, read_health
from anygauge.wording import counted
from anygauge_hooks.errors import CheckpointError

if TYPE_CHECKING:
    from anygauge.observability.report.run_files import RunFiles

__all__ = ["Report", "RunView"]

HEADLINE = {
    "reward": "rollout/raw_reward",
    "loss": "train/loss",
    "entropy": "train/entropy_loss",
    "response length": "rollout/response_len/mean",
}
"""Metrics that a notebook shows of a run."""


class Report(str):
    """Path of a report; a notebook shows the page itself."""

    def _repr_html_(self) -> str:
        page = html.escape(Path(self).read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{page}" width="100%" height="700" frameborder="0"></iframe>'


class RunView:
    """A run as its directory has it, whichever program made it.

    :param directory: Directory of a run that goes on, has ended or has failed.
    :raises CheckpointError: It is none.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory).absolute()
        """Directory of the run."""
        self._check()

    def _check(self) -> None:
        """Raise if the directory is not that of a run, or no longer."""
        from anygauge.observability.report.run_files import check_run  # not needed to import the package

        check_run(self.directory)

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.directory.resolve().name

    @property
    def config(self) -> Config:
        """Config of the run, with every key.

        :raises CheckpointError: There is none, or it is that of another version.
        """
        from anygauge.config.deprecated_keys import renamed_keys
        from anygauge.config.validate import validate
        from anygauge.observability.report.run_files import CONFIG_FILE

        path = self.directory / CONFIG_FILE
        try:
            checked = validate(renamed_keys(parse_toml(path.read_text(encoding="utf-8")), warn=False)[0])
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}.", hint="Restore the file.") from error
        if checked.problems:
            problem = checked.problems[0]
            raise CheckpointError(
                f"{path}: {problem.path}: {problem.hint}.", hint="Use the version of anygauge that wrote it."
            )
        return checked.config

    @property
    def outcome(self) -> str:
        """``finished``, ``failed``, ``interrupted``, or ``unknown`` while it goes on."""
        parts = (self._files().record or {}).get("parts") or [{}]
        return str(parts[-1].get("outcome") or "unknown")

    @property
    def metrics_list(self) -> list[dict[str, Any]]:
        """Metrics of each step, ascending; ``step`` is its number, 0 stands for before the first.

        Example: ``[{"step": 1, "rollout/raw_reward": 0.25, ...}]``
        """
        return self._files().metrics.rows()

    @property
    def metrics(self) -> Any:
        """Metrics as a pandas DataFrame with one row for each step, which is its index.

        Example: ``run.metrics["rollout/raw_reward"].plot()``

        :raises ImportError: pandas is not installed.
        """
        try:
            pandas = import_module("pandas")
        except ImportError as error:
            raise ImportError(
                f"Run.metrics needs pandas, which is not installed: {install_extra('pandas')}. "
                "Run.metrics_list has the same as a list of dicts."
            ) from error
        rows = self.metrics_list
        return pandas.DataFrame(rows, columns=None if rows else ["step"]).set_index("step")

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Recorded samples: the best, the worst and some others of the first, the last and some other steps.

        Example: ``[{"step": 1, "chosen": "best", "prompt": "37+58=", "response": "95", "reward": 1.0, ...}]``
        """
        steps = self._files().samples
        return [{"step": step, **sample} for step, samples in steps.items() for sample in samples]

    @property
    def health(self) -> Health | None:
        """State of the health rules after the last step; ``None`` before the first one.

        Example: ``[rule.rule for rule in run.health.firing] == ["truncation"]``

        :raises CheckpointError: ``health.json`` cannot be read.
        """
        self._check()
        try:
            return read_health(self.directory)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self.directory / HEALTH_FILE} cannot be read: {error}.", hint="Delete the file."
            ) from error

    @property
    def checkpoint(self) -> Path | None:
        """The last export as a Hugging Face directory, else the last checkpoint, else ``None``."""
        return self._export() or self.last_checkpoint

    @property
    def last_checkpoint(self) -> Path | None:
        """The last checkpoint, from which a run resumes; ``None`` if there is none."""
        from anygauge.run_directory.checkpoint_reader import DIRECTORY, checkpoint_paths

        self._check()
        return next(iter(checkpoint_paths(self.directory / DIRECTORY)), None)

    @property
    def model(self) -> Path:
        """The last export, which is the trained model as a Hugging Face directory.

        :raises CheckpointError: There is none.
        """
        export = self._export()
        if export is None:
            there = self.last_checkpoint
            hint = (
                "Let it run to its end with resume=True; save={'hf_every': N} exports the model on the way. "
                "A run with adapters exports the whole model unless train.lora.export is 'adapter'."
            )
            raise CheckpointError(
                f"The run in {self.directory} has no export of its model"
                + (f", only the checkpoint {there}." if there else ", and no checkpoint."),
                hint=hint,
            )
        return export

    def report(self, out: str | Path | None = None) -> Report:
        """Write the report and return its path; a notebook shows the page.

        Example: ``run.report()``

        :param out: The page; ``None`` takes ``report.html`` in the directory.
        """
        from anygauge.observability.report import write_report

        return Report(write_report(self.directory, None if out is None else Path(out)))

    def _files(self) -> RunFiles:
        from anygauge.observability.report.run_files import read_run

        return read_run(self.directory)

    def _export(self) -> Path | None:
        from anygauge.observability.report.run_files import last_export

        self._check()
        return last_export(self.directory)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.directory)!r})"

    def _repr_html_(self) -> str:
        rows = self.metrics_list
        shown = [(title, _ends(rows, name)) for title, name in HEADLINE.items()]
        body = "".join(
            f"<tr><td>{title}</td><td>{ends[0]:.4g}</td><td>{ends[1]:.4g}</td></tr>"
            for title, ends in shown
            if ends
        )
        last = max((row["step"] for row in rows), default=0)
        title = html.escape(f"{self.name}: {self.outcome}, {counted(last, 'step')}")
        head = "<tr><th></th><th>first</th><th>last</th></tr>"
        return f"<b>{title}</b><br><code>{html.escape(str(self.directory))}</code><table>{head}{body}</table>"


def _ends(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[float, float] | None:
    """Return the first and the last value of a metric, if it has any."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return (values[0], values[-1]) if values else None
