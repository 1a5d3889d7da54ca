"""The ``wandb`` tracker: Weights & Biases, online or offline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anygauge.config.secret_values import masked
from anygauge.observability.metrics import with_step_axes
from anygauge_hooks.errors import ConfigError
from anygauge_hooks.types import RunInfo

__all__ = ["WandbTracker", "make_wandb_tracker"]

PROJECT = "anygauge"
ID_FILE = "wandb/run-id"
"""In the run directory: a resumed run goes on as the same run."""


class WandbTracker:
    """Gives each call's metrics to a run of Weights & Biases, each group on its own step axis.

    :param run: From ``wandb.init``.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        self._groups: set[str] = set()

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record the metrics at the steps of their groups."""
        if metrics:
            self._define_axes(metrics)
            self._run.log(with_step_axes(metrics, step))

    def _define_axes(self, metrics: Mapping[str, float]) -> None:
        for group in {name.partition("/")[0] for name in metrics} - self._groups:
            self._run.define_metric(f"{group}/step")
            self._run.define_metric(f"{group}/*", step_metric=f"{group}/step")
            self._groups.add(group)

    def close(self) -> None:
        """End the run there, and the service process that wandb has started here."""
        import wandb

        self._run.finish()
        wandb.teardown()


def make_wandb_tracker(run: RunInfo) -> WandbTracker:
    """Return the tracker of a run, with ``wandb.init``'s arguments among its options.

    :raises ConfigError: It would go online and there is no key: nothing is ever asked for.
    """
    import wandb

    options: dict[str, Any] = dict(run.config.run.tracker_options.get("wandb", {}))
    _check_key(options.get("mode"))
    id_file = Path(run.directory) / ID_FILE
    folder = Path(options.pop("dir", run.directory))
    folder.mkdir(parents=True, exist_ok=True)
    started = wandb.init(
        **{"project": PROJECT, "name": run.name, **options},
        dir=str(folder),
        config=masked(run.config.model_dump(mode="json")),
        id=id_file.read_text(encoding="ascii").strip() if id_file.is_file() else None,
        resume="allow",
        settings=wandb.Settings(console="off", quiet=True),
    )
    id_file.parent.mkdir(exist_ok=True)
    id_file.write_text(f"{started.id}\n", encoding="ascii")
    return WandbTracker(started)


def _check_key(mode: str | None) -> None:
    import wandb

    wanted = mode or wandb.setup().settings.mode
    if wanted == "online" and not wandb.login(prompt=False, verify=False):
        raise ConfigError(
            "run.trackers: wandb has no API key on this host.",
            hint='Run `wandb login`, set WANDB_API_KEY, or write run.tracker_options.wandb.mode = "offline".',
        )
