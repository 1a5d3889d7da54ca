"""Built-in data source, and the rules of the ``[data]`` table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from anygauge_hooks import hookimpl
from anygauge_hooks.types import ConfigProblem, NamedFunction


@hookimpl
def register_data_sources() -> list[NamedFunction]:
    """Return ``files``."""
    from anygauge.data.source import FileSource

    return [NamedFunction(name="files", fn=FileSource)]


@hookimpl
def check_config(config: Any) -> list[ConfigProblem]:
    """Return settings of data files that contradict each other or would have no effect."""
    return [*_without_template(config), *_weights(config), *_names(config), *_answers(config)]


def _without_template(config: Any) -> Iterator[ConfigProblem]:
    from anygauge.data.evaluation import CHAT_ONLY

    for path, table in {"data": config.data, **_eval_tables(config)}.items():
        used = table.apply_chat_template
        if used is None:
            used = config.data.apply_chat_template
        for name in CHAT_ONLY:
            if (value := getattr(table, name)) and not used:
                hint = f"Set {path}.apply_chat_template = true, or leave this out."
                yield ConfigProblem(path=f"{path}.{name}", found=value, hint=hint)


def _eval_tables(config: Any) -> dict[str, Any]:
    return {f"eval.datasets.{name}": table for name, table in config.eval.datasets.items()}


def _weights(config: Any) -> Iterator[ConfigProblem]:
    weights = [file.weight for file in config.data.train]
    if None in weights and any(weight is not None for weight in weights):
        hint = "Give every file a weight, or none."
        yield ConfigProblem(path="data.train", found=weights, hint=hint)
    evaluation = {f"{path}.files": table.files for path, table in _eval_tables(config).items()}
    for path, files in {"eval.data": config.eval.data, **evaluation}.items():
        for number, file in enumerate(files):
            if file.weight is not None:
                hint = "Evaluation reads each row once; leave the weight out."
                yield ConfigProblem(path=f"{path}[{number}].weight", found=file.weight, hint=hint)


def _names(config: Any) -> Iterator[ConfigProblem]:
    from anygauge.config.data_files import dataset_name

    for path, files in (("data.train", config.data.train), ("eval.data", config.eval.data)):
        count = Counter(dataset_name(file) for file in files)
        for number, file in enumerate(files):
            name = dataset_name(file)
            if file.name is None and count[name] > 1:
                hint = (
                    f"Another file's data set is called {name!r} too: give it a name, as in {{path, name}}."
                )
                yield ConfigProblem(path=f"{path}[{number}]", found=file.path, hint=hint)


def _answers(config: Any) -> Iterator[ConfigProblem]:
    data = config.data
    if config.run.task == "sft" and not data.apply_chat_template and data.label_key is None:
        hint = "SFT on plain prompts trains on the label; name its field, or set data.apply_chat_template."
        yield ConfigProblem(path="data.label_key", found=None, hint=hint)
