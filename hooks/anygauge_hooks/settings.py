"""Config keys that plugins may read: the part of a run's config that the contract keeps stable.

``anygauge keys`` lists every key, and :meth:`RunConfig.model_dump` returns all of them as plain values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "ModelSettings",
    "ParallelSettings",
    "PlacementSettings",
    "RolloutSettings",
    "RunConfig",
    "RunSettings",
    "TrainSettings",
]


class RunSettings(Protocol):
    """Table ``[run]``."""

    @property
    def name(self) -> str:
        """Name of the run and of its directory."""

    @property
    def task(self) -> Literal["rl", "sft"]:
        """Kind of training."""

    @property
    def deterministic(self) -> bool:
        """Whether two runs must give the same bits."""

    @property
    def progress(self) -> bool:
        """Whether the terminal shows progress."""

    @property
    def log_every(self) -> int:
        """Steps between two lines where no progress is shown."""

    @property
    def report(self) -> bool:
        """Whether the run writes a report."""

    @property
    def tracker_options(self) -> Mapping[str, Mapping[str, Any]]:
        """Options of each tracker, by its name."""


class ModelSettings(Protocol):
    """Table ``[model]``."""

    @property
    def path(self) -> Path:
        """Hugging Face directory of the policy."""


class ParallelSettings(Protocol):
    """Table ``[train.parallel]``."""

    @property
    def tensor(self) -> int:
        """Ranks that split each matrix."""

    @property
    def sequence(self) -> bool | None:
        """Whether to use sequence parallelism; ``None`` uses it with more than one tensor rank."""

    @property
    def pipeline(self) -> int:
        """Ranks that split the layers."""

    @property
    def context(self) -> int:
        """Ranks that split each sequence."""

    @property
    def expert(self) -> int:
        """Ranks that split the experts."""


class TrainSettings(Protocol):
    """Table ``[train]``."""

    @property
    def engine(self) -> str:
        """Train engine, by registered name."""

    @property
    def dtype(self) -> str | None:
        """Precision of the weights, as torch names it; ``None`` until a backend has chosen."""

    @property
    def provider(self) -> str | None:
        """Library of ``BackendSpec.providers`` that replaces kernels or engine functions."""

    @property
    def provider_options(self) -> Mapping[str, Any]:
        """Options of that library."""

    @property
    def parallel(self) -> ParallelSettings:
        """Layout of the ranks."""


class RolloutSettings(Protocol):
    """Table ``[rollout]``."""

    @property
    def engine(self) -> str:
        """Rollout engine, by registered name."""

    @property
    def dtype(self) -> str | None:
        """Precision of the engine's weights, as torch names it; ``None`` takes that of the trainer."""

    @property
    def max_batch_tokens(self) -> int:
        """Prompt and response tokens that fit into one engine's KV cache at once."""

    @property
    def max_new_tokens(self) -> int:
        """Most tokens of a response."""


class PlacementSettings(Protocol):
    """Table ``[placement]``."""

    @property
    def train_workers(self) -> int:
        """Processes that train, one for each device."""

    @property
    def rollout_workers(self) -> int:
        """Processes that generate or own a server; 0 if the training processes generate."""

    @property
    def colocated(self) -> bool:
        """Whether rollout workers share the devices of the trainers."""

    @property
    def sleeps(self) -> bool:
        """Whether engines and trainers may have to release the memory of devices that they share."""


class RunConfig(Protocol):
    """A resolved config, read-only."""

    @property
    def run(self) -> RunSettings:
        """Table ``[run]``."""

    @property
    def model(self) -> ModelSettings:
        """Table ``[model]``."""

    @property
    def train(self) -> TrainSettings:
        """Table ``[train]``."""

    @property
    def rollout(self) -> RolloutSettings:
        """Table ``[rollout]``."""

    @property
    def placement(self) -> PlacementSettings:
        """Table ``[placement]``."""

    def model_dump(self, *, mode: Literal["json", "python"] = "python") -> Mapping[str, Any]:
        """Return every key of every table as plain values."""
