"""Resolve the names in a config to paths of this host.

A name is looked up in the cache first and then downloaded, so a run that worked once works without a network.
The driver pins each name to the commit that it found; a worker on another node then gets the same files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from anygauge.hub.client import Client
from anygauge.hub.files import HubFiles, lacking
from anygauge.hub.huggingface import HuggingFace
from anygauge.hub.modelscope import ModelScope
from anygauge.hub.names import HubName, data_name, model_name
from anygauge_hooks.errors import HubError

if TYPE_CHECKING:
    from anygauge.config.schema import Config, DataFile, Hub, Section

__all__ = ["cached_model", "localized", "pinned", "sizes_command", "unresolved"]

Replace = Callable[[HubName], str]
Table = TypeVar("Table", bound="Section")


def pinned(config: Config, *, download: bool = True) -> Config:
    """Return a config whose hub names are pinned to the commit in this host's cache.

    :param download: Whether to download what is not in the cache; without, such a name stays as it is.
    :raises HubError: A name cannot be had.
    """
    find = _finder(config, download=download)

    def replace(name: HubName) -> str:
        files = find(name)
        return str(name if files is None else name.at(files.revision))

    config = _replaced(config, replace)
    name = model_name("model.path", config.model.path, config.model.revision)
    if name is None or name.revision is None:
        return config
    # A revision has a key of its own only in [model].
    model = _with(config.model, path=Path(name.repository), revision=name.revision)
    return _with(config, model=model)


def localized(config: Config, *, download: bool = True, data: bool = True) -> Config:
    """Return a config in which models and data files are local paths; the same config if they are already.

    Workers call it too: each node may have a cache of its own.

    :param download: Whether to download what is not in the cache; without, such a name stays as it is.
    :param data: Whether to look up the data files too.
    :raises HubError: A name cannot be had.
    """
    find = _finder(config, download=download)

    def replace(name: HubName) -> str:
        if name.kind == "dataset" and not data:
            return str(name)
        files = find(name)
        return str(name) if files is None else f"{files.path}{name.rows}"

    return _replaced(config, replace)


def cached_model(name: HubName, hub: Hub) -> Path | None:
    """Return the directory that the cache keeps for a model, if it has its ``config.json`` at least."""
    files = _source(hub, code=False).cached(name)
    return files.path if files is not None and (files.path / "config.json").is_file() else None


def sizes_command(name: HubName, hub: Hub) -> str:
    """Return the command that fetches the ``config.json`` of a model, and none of its weights."""
    return _source(hub, code=False).command(name.of_file("config.json"))


def unresolved(config: Config) -> list[HubName]:
    """Return the hub names in a config."""
    names: list[HubName] = []

    def collect(name: HubName) -> str:
        names.append(name)
        return str(name)

    _replaced(config, collect)
    return names


# -------------------------------------------------------------------------
# Where names are written
# -------------------------------------------------------------------------


def _replaced(config: Config, replace: Replace) -> Config:
    """Return a copy with another path for each name, or the config itself if it holds none."""
    changed: dict[str, Any] = {}
    name = model_name("model.path", config.model.path, config.model.revision)
    if name is not None:
        changed["model"] = _with(config.model, path=Path(replace(name)))
    for key, path in _other_models(config).items():
        name = model_name(f"{key}.path", path) if path else None
        if name is not None:
            changed[key] = _with(getattr(config, key), path=Path(replace(name)))
    if files := _files("data.train", config.data.train, replace):
        changed["data"] = _with(config.data, train=files)
    if evaluation := _evaluation(config, replace):
        changed["eval"] = _with(config.eval, **evaluation)
    return _with(config, **changed) if changed else config


def _other_models(config: Config) -> dict[str, Path | None]:
    """Return the models that a run needs beside the policy, by section."""
    algorithm = config.algorithm
    is_compared = algorithm.kl_coef or algorithm.kl_reward_coef
    return {
        "reference": config.reference.path if is_compared else None,
        "teacher": config.teacher.path,
        "critic": config.critic.path,
    }


def _evaluation(config: Config, replace: Replace) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    if files := _files("eval.data", config.eval.data, replace):
        changed["data"] = files
    datasets = {
        name: _with(dataset, files=files)
        for name, dataset in config.eval.datasets.items()
        if (files := _files(f"eval.datasets.{name}.files", dataset.files, replace))
    }
    if datasets:
        changed["datasets"] = config.eval.datasets | datasets
    return changed


def _files(key: str, files: tuple[DataFile, ...], replace: Replace) -> tuple[DataFile, ...] | None:
    """Return the files with another path for each name, or ``None`` if there is none."""
    names = [data_name(f"{key}[{index}]", file.path) for index, file in enumerate(files)]
    if not any(names):
        return None
    pairs = zip(files, names, strict=True)
    return tuple(file if name is None else _with(file, path=replace(name)) for file, name in pairs)


def _with(table: Table, **changed: Any) -> Table:
    return table.model_copy(update=changed)


# -------------------------------------------------------------------------
# Where names are found
# -------------------------------------------------------------------------


def _finder(config: Config, *, download: bool) -> Callable[[HubName], HubFiles | None]:
    """Return a function that looks up names; the hub's client is imported on first use."""

    @cache
    def source() -> Client:
        return _source(config.hub, code=config.model.trust_remote_code)

    return lambda name: _find(source(), name, download=download)


def _source(hub: Hub, *, code: bool) -> Client:
    make = HuggingFace if hub.source == "huggingface" else ModelScope
    return make(hub, code=code)


def _find(source: Client, name: HubName, *, download: bool) -> HubFiles | None:
    files = source.cached(name)
    missing = list(_missing(name, files))
    if files is not None and not missing:
        return files
    if not download:
        return None
    if source.offline is None:
        return source.download(name)
    what = f"lacks {', '.join(missing)} of it" if missing else "does not hold it"
    raise HubError(
        f"{name.key} = {str(name)!r}: the cache {source.cache} {what}, "
        f"and {source.offline} forbids a download.",
        hint=f"Run `{source.command(name)}` on a connected machine and copy its {source.folder(name).name} "
        f"into {source.cache}, or name a local path.",
    )


def _missing(name: HubName, files: HubFiles | None) -> Iterator[str]:
    if files is None or name.kind != "model":
        return
    missing = list(lacking(files.path))
    yield from missing if missing or files.complete else ["some files"]
