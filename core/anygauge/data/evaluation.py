"""The evaluation data sets of a config, and how their files are read."""

from __future__ import annotations

from typing import Any

from anygauge.config.data_files import dataset_name
from anygauge.config.schema import Config, Data, DataFile, EvalDataset

__all__ = ["CHAT_ONLY", "eval_data", "eval_datasets"]

CHAT_ONLY = ("system_prompt", "chat_template_kwargs", "tools_key")
"""Settings that only a chat template uses."""
_KEYS = ("input_key", "label_key", "metadata_key", "multimodal_keys")
_READING = (*_KEYS, "apply_chat_template", "max_prompt_tokens", *CHAT_ONLY)
_SAMPLING = ("samples_per_prompt", "max_prompts", "temperature", "top_p", "top_k", "max_new_tokens")
_STOPS = ("stop", "stop_token_ids")
_MAY_BE_NONE = {"label_key", "metadata_key", "tools_key", "system_prompt", "max_prompt_tokens", "max_prompts"}
"""Fields in which ``None`` that is written out is a value; in the others it leaves them out."""


def eval_datasets(config: Config) -> dict[str, EvalDataset]:
    """Return every evaluation data set by name: those of ``eval.data``, then those of ``eval.datasets``.

    What a data set leaves out is filled in, except its reward: ``None`` is that of ``[reward]``. Everywhere
    else ``None`` is a value then. Its files have its name.
    """
    files: dict[str, tuple[DataFile, ...]] = {}
    for file in config.eval.data:
        name = dataset_name(file)
        files[name] = (*files.get(name, ()), file)
    datasets = {name: EvalDataset(files=group) for name, group in files.items()} | config.eval.datasets
    return {name: _filled(config, name, dataset) for name, dataset in datasets.items()}


def eval_data(config: Config, dataset: EvalDataset) -> Data:
    """Return the settings that read the files of an evaluation data set: its own, in file order.

    :param dataset: From :func:`eval_datasets`.
    """
    own = {key: getattr(dataset, key) for key in _READING}
    return config.data.model_copy(update={"train": dataset.files, "shuffle": False, **own})


def _filled(config: Config, name: str, dataset: EvalDataset) -> EvalDataset:
    left_out = {
        key: value for key, value in _defaults(config, dataset).items() if not _is_written(dataset, key)
    }
    # A weight has no meaning where every row is read once.
    files = tuple(file.model_copy(update={"name": name, "weight": None}) for file in dataset.files)
    return dataset.model_copy(update={**left_out, "files": files})


def _defaults(config: Config, dataset: EvalDataset) -> dict[str, Any]:
    """Return a data set's defaults of the fields that it leaves out."""
    # Without a template its settings would ask each row for tools that are of no use.
    source = Data(train=()) if dataset.apply_chat_template is False else config.data
    reading = {key: getattr(source if key in CHAT_ONLY else config.data, key) for key in _READING}
    sampling = {key: getattr(config.eval, key) for key in _SAMPLING}
    sampling["max_new_tokens"] = config.eval.max_new_tokens or config.rollout.max_new_tokens
    return reading | sampling | {key: getattr(config.rollout, key) for key in _STOPS}


def _is_written(dataset: EvalDataset, key: str) -> bool:
    return getattr(dataset, key) is not None or (key in _MAY_BE_NONE and key in dataset.model_fields_set)
