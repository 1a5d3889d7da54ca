"""Checks of the files and directories that a config names."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from anygauge.config.data_files import NO_FILE, SUFFIXES, WANTED, meant_slice, split_slice, why_no_file
from anygauge.config.schema import Config, DataFile
from anygauge.hub.names import DATASETS, data_name, did_you_mean
from anygauge_hooks.types import ConfigProblem

__all__ = [
    "INPUTS",
    "data_files_rule",
    "no_directory",
    "overwrite_rule",
    "run_directory_rule",
    "train_files_rule",
]

Problems = Iterator[ConfigProblem]
INPUTS = "inputs"
"""Folder of the run directory with the data that a program gave; it outlives ``run.overwrite``."""


def train_files_rule(config: Config, user_keys: Collection[str]) -> Problems:
    """Yield a problem if there are no training files."""
    if not config.data.train:
        yield ConfigProblem(path="data.train", found=[], hint="name at least one file")


def data_files_rule(config: Config, user_keys: Collection[str]) -> Problems:
    """Yield data files that do not exist or are not files."""
    for path, files in _file_lists(config):
        for index, file in enumerate(files):
            problems = [*_data_file(f"{path}[{index}]", file)]
            yield from problems
            if problems and _may_be_prompt(file.path):
                break  # so may be the thousand that follow


def _file_lists(config: Config) -> Iterator[tuple[str, Sequence[DataFile]]]:
    yield "data.train", config.data.train
    yield "eval.data", config.eval.data
    for name, dataset in config.eval.datasets.items():
        yield f"eval.datasets.{name}.files", dataset.files


def _data_file(path: str, file: DataFile) -> Problems:
    try:
        local = Path(split_slice(file.path)[0])
    except ValueError as error:
        yield ConfigProblem(path=path, found=file.path, hint=str(error))
        return
    if data_name(path, file.path) is not None:
        return  # looked up once nothing else is wrong
    if file.path.startswith("hf:"):
        yield ConfigProblem(
            path=path, found=file.path, hint=f"a data file's name is {DATASETS}OWNER/NAME/FILE"
        )
    elif problem := why_no_file(local):
        hint = f"{problem}; {WANTED}"
        if _may_be_prompt(file.path):
            row = json.dumps({"prompt": file.path[:50]})
            hint = f"{NO_FILE} in {Path.cwd()}; a prompt is no file but a row: {row}"
        elif problem == NO_FILE:
            meant = meant_slice(file.path)
            here = f"; did you mean {meant}?" if meant else _from_here(local)
            hint = _other_notation(file.path) or problem + here
        yield ConfigProblem(path=path, found=file.path, hint=hint)


def _may_be_prompt(path: str) -> bool:
    """Return whether what is no file here looks like text for the model."""
    if os.path.lexists(path) or meant_slice(path) or Path(path).suffix.lower() in SUFFIXES:
        return False
    return re.search(r"\s", path) is not None or not re.search(r"[/.*?{~]", path)


def _other_notation(path: str) -> str:
    """Return how to name a file that is not there, if its path is written as elsewhere; else nothing."""
    if re.match(r"https?://", path):
        return (
            f"addresses are not read; download the file, or write {DATASETS}OWNER/NAME/FILE for one on a hub"
        )
    if path.startswith("~"):
        return "~ is not expanded; write the whole path"
    if re.search(r"[*?{]", path):
        return "patterns are not expanded; name each file"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not Path(path).suffix:
        return f"no such file; a file of the data set {path} on the hub is {DATASETS}{path}/FILE"
    return ""


def run_directory_rule(config: Config, user_keys: Collection[str]) -> Problems:
    """Yield a run directory or a cache that cannot be used."""
    directory = config.run.directory.absolute()
    existing = next(path for path in (directory, *directory.parents) if os.access(path, os.F_OK))
    if not existing.is_dir():
        hint = (
            f"{'is' if existing == directory else f'cannot be made: {existing} is'} a file; name a directory"
        )
    elif not os.access(existing, os.W_OK | os.X_OK):
        hint = f"cannot be made: {existing} is not writable; name another directory"
    else:
        return
    yield ConfigProblem(path="run.directory", found=str(config.run.directory), hint=hint)


def overwrite_rule(config: Config, user_keys: Collection[str]) -> Problems:
    """Yield inputs of the run that ``run.overwrite`` would delete first."""
    if not config.run.overwrite:
        return
    run_directory = (config.run.directory / config.run.name).resolve()
    for key, path in _read_paths(config):
        # A link is deleted with the directory, wherever it leads to.
        places = (path.resolve(), path.parent.resolve() / path.name)
        is_inside = any(place.is_relative_to(run_directory) for place in places)
        if is_inside and path.resolve().parent != run_directory / INPUTS:
            hint = f"run.overwrite would delete it with {run_directory}; "
            hint += "copy it elsewhere, or choose another run.name"
            yield ConfigProblem(path=key, found=str(path), hint=hint)


def _read_paths(config: Config) -> Iterator[tuple[str, Path]]:
    """Yield the key and the path of what a run reads; a replay has a rule of its own."""
    read = [("model.path", config.model.path), ("reference.path", config.reference.path)]
    read += [("teacher.path", config.teacher.path), ("critic.path", config.critic.path)]
    read += [("train.lora.path", config.train.lora.path)]
    for path, files in _file_lists(config):
        for index, file in enumerate(files):
            with suppress(ValueError):  # which is a problem of its own
                read.append((f"{path}[{index}]", Path(split_slice(file.path)[0])))
    yield from ((key, path) for key, path in read if path is not None and os.path.lexists(path))
    caches = (("data.cache", config.data.cache), ("hub.cache", config.hub.cache))
    yield from ((key, cache) for key, cache in caches if cache is not None)


def no_directory(path: Path) -> str:
    """Return that a directory is missing, where its path starts, and which directories may be meant."""
    return f"no such directory{_from_here(path)}{did_you_mean(path)}"


def _from_here(path: Path) -> str:
    """Return a clause that tells where a relative path starts."""
    return "" if path.is_absolute() else f" in {Path.cwd()}; relative paths start at the current directory"
