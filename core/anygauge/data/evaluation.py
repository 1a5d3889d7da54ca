"""The evaluation data sets of a config, and how their files are read."""

from __future__ import annotations

from typing import Any

from anygauge.config.data_files import dataset_name
from anygauge.config.schema import Config, Data, DataFile, EvalDataset

__all__ = ["eval_data", "eval_datasets"]

_SAMPLING = ("samples_per_prompt", "max_prompts", "temperature", "top_p", "top_k", "max_new_tokens")


def eval_datasets(config: Config) -> dict[str, EvalDataset]:
    """Return every evaluation data set by name: those of ``eval.data``, then those of ``eval.datasets``.

    What a data set leaves out is filled in, except its reward: ``None`` is that of ``[reward]``. Its files
    have its name.
    """
    files: dict[str, tuple[DataFile, ...]] = {}
    for file in config.eval.data:
        name = dataset_name(file)
        files[name] = (*files.get(name, ()), file)
    found = {name: EvalDataset(files=group) for name, group in files.items()} | config.eval.datasets
    return {name: _filled(config, name, dataset) for name, dataset in found.items()}


def eval_data(config: Config, dataset: EvalDataset) -> Data:
    """Return the settings that read the files of an evaluation data set: those of ``[data]``, in file order.

    :param dataset: From :func:`eval_datasets`.
    """
    return config.data.model_copy(
        update={
            "train": dataset.files,
            "input_key": dataset.input_key,
            "label_key": dataset.label_key,
            "shuffle": False,
        }
    )


def _filled(config: Config, name: str, dataset: EvalDataset) -> EvalDataset:
    defaults: dict[str, Any] = {key: getattr(config.eval, key) for key in _SAMPLING}
    defaults["max_new_tokens"] = config.eval.max_new_tokens or config.rollout.max_new_tokens
    defaults |= {"input_key": config.data.input_key, "label_key": config.data.label_key}
    left_out = {key: value for key, value in defaults.items() if getattr(dataset, key) is None}
    # A weight has no meaning where every row is read once.
    files = tuple(file.model_copy(update={"name": name, "weight": None}) for file in dataset.files)
    return dataset.model_copy(update={**left_out, "files": files})
