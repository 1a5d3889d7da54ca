"""Data sets as metrics name them: how many a run trains on, and names that other metrics have."""

from __future__ import annotations

from collections.abc import Iterator

from anygauge.config import Config
from anygauge.config.data_files import dataset_name
from anygauge.observability.eval_names import SUFFIXES
from anygauge_hooks.types import ConfigProblem

__all__ = ["dataset_names", "train_datasets"]

RESERVED = ("step", "response_len", "sequence_len")
"""Metrics, or parts of their names, that stand where a data set's name does."""


def train_datasets(config: Config) -> int:
    """Return how many data sets a run trains on."""
    return len({dataset_name(file) for file in config.data.train})


def dataset_names(config: Config) -> Iterator[ConfigProblem]:
    """Yield data sets whose metrics would overwrite others, or be taken for them."""
    for path, name in _names(config):
        if name in RESERVED:
            hint = f"{name!r} is a name among the metrics; give the data set another name"
            yield ConfigProblem(path=path, found=name, hint=hint)
        suffix = name.rpartition("-")[2]
        if path.startswith("eval.") and suffix in SUFFIXES and name != suffix:
            of = name.removesuffix(f"-{suffix}")
            hint = f"eval/{name} would be the {suffix} of a data set {of!r}; give the data set another name"
            yield ConfigProblem(path=path, found=name, hint=hint)


def _names(config: Config) -> Iterator[tuple[str, str]]:
    """Yield path and name of every data set."""
    for path, files in (("data.train", config.data.train), ("eval.data", config.eval.data)):
        for number, file in enumerate(files):
            yield f"{path}[{number}]", dataset_name(file)
    for name in config.eval.datasets:
        yield f"eval.datasets.{name}", name
