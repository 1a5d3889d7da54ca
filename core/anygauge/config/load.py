"""Load the config of a run from a TOML file, a backend and a command line.

Precedence: defaults, then the file, then its table ``[on.<backend>]``, then the command line; last, plugins
fill in what none of these wrote. Relative paths start at the current directory, wherever the file is.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from anygauge.config.changes import AppliedChange, adjust
from anygauge.config.check import check
from anygauge.config.deprecated_keys import renamed_keys
from anygauge.config.overrides import read_overrides
from anygauge.config.rules.algorithm import algorithm_warnings
from anygauge.config.schema import Config
from anygauge.config.schema.section import is_name
from anygauge.config.secret_values import masked
from anygauge.config.tree import Tree, covers, flatten, merge, plain
from anygauge.config.validate import NONE, QUOTES, Checked, as_written, problems_of, validate
from anygauge.disk import parse_toml
from anygauge.hub import localized, pinned, unresolved
from anygauge.plugins import Plugins, find_backend, published_backends
from anygauge.strict_json import MAX_DEPTH, is_nested
from anygauge.wording import counted
from anygauge_hooks.errors import ConfigError
from anygauge_hooks.types import BackendSpec, ConfigProblem

__all__ = ["LoadedConfig", "dump_config", "load_config", "read_tree", "write_resolved"]

_log = logging.getLogger(__name__)

_BACKEND_NAME = re.compile(r"[a-z][a-z0-9_]*")
COMMAND_LINE = "on the command line"
IN_CALL = "in the call"
MOST_SHOWN = 20
"""Problems that an error prints: rows in place of a file have three each."""
_LONGEST_VALUE = 120
_MISSPELLED = 0.7
"""Similarity from which a name is taken for a slip: ``cudaa`` for ``cuda``, but not ``tpu`` for ``npu``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A checked config and how it came about."""

    config: Config
    backend: BackendSpec
    user_keys: frozenset[str]
    """Dotted paths that the user wrote, in the file or on the command line."""
    changes: tuple[AppliedChange, ...]
    """Changes that plugins made."""
    check_models: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)
    """Makes the checks that were deferred, and raises :class:`~anygauge_hooks.errors.ConfigError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """The layers of a config before they are checked."""

    base: Tree
    overlays: dict[str, Tree]
    overrides: Tree
    problems: list[tuple[ConfigProblem, str | None]]
    """Problems of layers that cannot be read, each with its origin if that is not the file."""
    where: str = COMMAND_LINE
    """Where the overrides were written."""

    def tree(self, backend: str) -> Tree:
        return merge(merge(self.base, self.overlays.get(backend, {})), self.overrides)

    def origin(self, backend: str, path: str) -> str | None:
        """Return which layer above the file a path was written in."""
        key_path = plain(path)
        if any(covers(key_path, key) for key in flatten(self.overrides)):
            return self.where
        if any(covers(key_path, key) for key in flatten(self.overlays.get(backend, {}))):
            return f"in [on.{backend}]"
        return None


def load_config(
    path: str | Path | Mapping[str, Any],
    overrides: Sequence[str | tuple[str, Any]] | Mapping[str, Any] = (),
    *,
    backend: BackendSpec | str,
    plugins: Plugins,
    check_files: bool = True,
    download: bool = True,
    trains: bool = True,
    defers_models: bool = False,
) -> LoadedConfig:
    """Read, overlay, complete and check a config.

    Names on a hub stay names, pinned to a commit; :func:`anygauge.hub.localized` makes paths of them.

    :param path: A TOML file, or the tree of one.
    :param overrides: Those of a command line, as :func:`anygauge.config.overrides.read_overrides` takes them;
        or the tree of those of a call in Python.
    :param backend: The backend of the run, which need not be able to run on this host.
    :param check_files: Whether to look at the files and directories that the config names.
    :param download: Whether to download what is not in the cache, once nothing else is wrong; without, such
        names are not checked.
    :param trains: As of :func:`~anygauge.config.check.check`.
    :param defers_models: Whether to leave the checks of models, which import torch, to
        :attr:`LoadedConfig.check_models` if nothing else is wrong.
    :raises ConfigError: Every problem found: in the file, in any ``[on.X]`` table, on the command line; of
        more than 20 the first, and the number of the others.
    :raises ConfigConflictError: Two plugins want different values for one key.
    :raises HubError: A model or data file cannot be had by its name.
    """
    if isinstance(backend, str):
        backend = find_backend(plugins, plugins.named("register_backends"), backend)
    source = _read(path, overrides)
    tree = source.tree(backend.name)
    # An empty table says nothing of the keys in it; only in an open table it is a value.
    user_keys = frozenset(key for key, value in flatten(tree).items() if "." in key or value != {})
    tree, changes = adjust(tree, validate(tree).config, backend, plugins, user_keys)
    checked = validate(tree)
    find = partial(
        check,
        backend=backend,
        plugins=plugins,
        user_keys=user_keys,
        broken=checked.broken,
        check_files=check_files,
        trains=trains,
    )
    config = pinned(checked.config, download=False) if check_files else checked.config
    here = localized(config, download=False) if check_files else config
    others = [*source.problems, *_other_overlays(source, backend.name, checked)]
    further = [_line(each, where) for each, where in others]
    further += [_line(each, None) for each in _unknown_backends(source, plugins)]

    def require(config: Config, *, checks_models: bool) -> None:
        problems = (*checked.problems, *find(config, checks_models=checks_models))
        lines = [_line(_as_typed(each, tree), source.origin(backend.name, each.path)) for each in problems]
        if (lines or further) and not checks_models:
            require(config, checks_models=True)  # report all problems at once
        if lines or further:
            raise _error("The config" if isinstance(path, Mapping) else path, [*lines, *further])

    require(here, checks_models=not defers_models)
    if check_files and download and unresolved(here):
        config = pinned(config)
        require(localized(config), checks_models=not defers_models)
    for each in algorithm_warnings(config) if trains else ():
        _log.warning("%s", _line(each, source.origin(backend.name, each.path)))
    later = (lambda: require(localized(config), checks_models=True)) if defers_models else (lambda: None)
    return LoadedConfig(
        config=config, backend=backend, user_keys=user_keys, changes=changes, check_models=later
    )


def dump_config(config: Config) -> str:
    """Return a config as TOML, every key written out, that loads back to the same config.

    ``None`` is written as ``"none"``.
    """
    return tomli_w.dumps(_without_null(config.model_dump(mode="json")))


def write_resolved(config: Config, path: str | Path) -> None:
    """Write a config as :func:`dump_config` returns it, with its secrets masked."""
    tree = masked(_without_null(config.model_dump(mode="json")))
    Path(path).write_text(tomli_w.dumps(tree), encoding="utf-8")


def _without_null(tree: Mapping[str, Any]) -> Tree:
    """Return a tree as TOML has it: ``"none"`` in a section; below, where null is the default, nothing.

    An evaluation data set has what was written alone, where null is a value too.
    """
    sections = {key: _spelled(table) for key, table in tree.items()}
    datasets = {name: _spelled(table) for name, table in tree["eval"]["datasets"].items()}
    pruned: Tree = _pruned(merge(sections, {"eval": {"datasets": datasets}}))
    return pruned


def _spelled(table: Mapping[str, Any]) -> Tree:
    return {key: NONE if value is None else value for key, value in table.items()}


def _pruned(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _pruned(item) for key, item in value.items() if item is not None}
    return [_pruned(item) for item in value] if isinstance(value, list) else value


def _read(
    path: str | Path | Mapping[str, Any], overrides: Sequence[str | tuple[str, Any]] | Mapping[str, Any]
) -> _Source:
    written = dict(path) if isinstance(path, Mapping) else read_tree(Path(path))
    base, both_names = renamed_keys(written)
    tables = base.pop("on", {})
    overlays = {
        name: renamed_keys(table, overlay=f"on.{name}")
        for name, table in _items(tables)
        if isinstance(table, dict)
    }
    where, problems = IN_CALL, list[ConfigProblem]()
    if isinstance(overrides, Mapping):
        above = dict(overrides)
    else:
        where = COMMAND_LINE
        above, problems = read_overrides(overrides)
    above, both_there = renamed_keys(above)
    if is_nested(above, MAX_DEPTH):
        raise ConfigError(
            f"A key or a value {where} has more than {MAX_DEPTH} levels.", hint="Nest it less deeply."
        )
    return _Source(
        base=base,
        overlays={name: table for name, (table, _) in overlays.items()},
        overrides=above,
        problems=[
            *((each, where) for each in (*problems, *both_there)),
            *((each, None) for each in (*both_names, *_bad_tables(tables))),
            *((each, f"in [on.{name}]") for name, (_, both) in overlays.items() for each in both),
        ],
        where=where,
    )


def read_tree(path: Path) -> Tree:
    """Return the tree of a TOML file, with the name of the file for that of a run that has none.

    :raises ConfigError: It cannot be read.
    """
    return _named(_parse(path), path)


def _named(tree: Tree, path: Path) -> Tree:
    """Return a file's tree, with the name of the file for that of a run that has none."""
    run = tree.get("run", {})
    is_free = isinstance(run, dict) and "name" not in run
    if is_free and is_name(path.stem):
        return {**tree, "run": {**run, "name": path.stem}}
    return tree


def _bad_tables(tables: Any) -> Iterator[ConfigProblem]:
    if not isinstance(tables, dict):
        yield ConfigProblem(path="on", found=tables, hint="must hold tables such as [on.cpu]")
    for name, table in _items(tables):
        if not isinstance(table, dict) or not _BACKEND_NAME.fullmatch(name):
            hint = "must be a table named after a backend, such as [on.cpu]"
            yield ConfigProblem(path=f"on.{name}", found=table, hint=hint)


def _items(tables: Any) -> Iterable[tuple[str, Any]]:
    return tables.items() if isinstance(tables, dict) else ()


def _parse(path: Path) -> Tree:
    try:
        return parse_toml(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        directory = path if os.path.isdir(path) else path.parent
        # os.path.isdir and not Path.is_dir, which raises where a path is too long.
        names = sorted(str(other) for other in directory.glob("*.toml")) if os.path.isdir(directory) else []
        hint = f"Config files there: {', '.join(names)}." if names else "`anygauge init` writes one."
        raise ConfigError(f"Cannot read config {path}: {error.strerror}.", hint=hint) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"Config {path} is not UTF-8: {error}.", hint="Save it as UTF-8.") from error
    except ValueError as error:
        hint = "A string needs quotes, a list brackets, a table name [brackets]."
        raise ConfigError(f"Config {path} is not valid TOML: {error}.", hint=hint) from error


def _unknown_backends(source: _Source, plugins: Plugins) -> Iterator[ConfigProblem]:
    """Yield the tables whose names look misspelled; another host may have the others."""
    backends: Mapping[str, BackendSpec] = plugins.named("register_backends")
    known = sorted({*backends, *published_backends(), *plugins.load_errors})
    for name, table in source.overlays.items():
        if name in known or not _BACKEND_NAME.fullmatch(name):
            continue
        close = [spec.name for spec in backends.values() if name in spec.aliases]
        close = close or difflib.get_close_matches(name, known, n=1, cutoff=_MISSPELLED)
        if close:
            hint = f"no such backend; did you mean [on.{close[0]}]?"
            yield ConfigProblem(path=f"on.{name}", found=table, hint=hint)
        else:
            _log.warning("[on.%s] is for a backend that is not installed; known: %s", name, ", ".join(known))


def _other_overlays(
    source: _Source, backend: str, checked: Checked
) -> Iterator[tuple[ConfigProblem, str | None]]:
    """Yield what the schema finds in the tables of the other backends."""
    for name, overlay in source.overlays.items():
        if name == backend:
            continue
        written = flatten(overlay)
        for problem in validate(merge(source.base, overlay)).problems:
            key_path = plain(problem.path)
            if problem not in checked.problems and any(covers(key_path, key) for key in written):
                yield problem, f"in [on.{name}]"


def _as_typed(problem: ConfigProblem, tree: Tree) -> ConfigProblem:
    """Return a problem of a path that was made absolute with the path as it was written."""
    values = flatten(tree)
    typed = values.get(problem.path, values.get(problem.path.removesuffix(".path")))
    if not isinstance(typed, str) or Path(typed).is_absolute() or problem.found != str(Path.cwd() / typed):
        return problem
    return replace(problem, found=typed, hint=problem.hint.replace(f"{Path.cwd()}/", "./"))


def _line(problem: ConfigProblem, where: str | None) -> str:
    text = repr(problem.found)
    text = text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."
    value = "not set" if problem.found is None else f"found {text}"
    separator = "." if problem.hint[:1].isupper() else ";"
    hint = _for_the_shell(problem) if where == COMMAND_LINE else problem.hint
    return f"{problem.path}: {value}{f' {where}' if where else ''}{separator} {hint}"


def _for_the_shell(problem: ConfigProblem) -> str:
    if problem.path.endswith("]"):
        return problem.hint
    quoted = f'"{json.dumps(problem.found, default=str)}"'
    return problem.hint.replace(f"{QUOTES}{quoted}", f"{QUOTES}'{quoted}' on the command line")


def _error(path: str | Path, lines: Sequence[str]) -> ConfigError:
    hint = "`anygauge keys WORD` explains the keys that have a word."
    more = [f"and {len(lines) - MOST_SHOWN} more"] if len(lines) > MOST_SHOWN else []
    shown = [f"{path} has {counted(len(lines), 'problem')}:", *lines[:MOST_SHOWN], *more]
    return ConfigError("\n  ".join(shown), hint=hint)


def _explain(error: ValidationError) -> ConfigError:
    return _error("The config", [_line(problem, None) for problem in problems_of(error)])


Config.explain = staticmethod(_explain)
Config.as_written = staticmethod(as_written)
