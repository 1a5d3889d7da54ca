"""One call of the Python API: its arguments as the layers of a config."""

from __future__ import annotations

import copy
import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from anygauge.api.data import Inputs, WrittenRows, is_rows, is_table
from anygauge.api.rewards import METRICS, GivenFunctions, reward_table
from anygauge.api.run_view import RunView
from anygauge.api.settings import free_name, is_config_file, model_tree, tree_of
from anygauge.config.load import read_tree
from anygauge.config.rules.file import INPUTS
from anygauge.config.schema import Config
from anygauge.config.schema.section import is_name
from anygauge.config.tree import Tree, merge
from anygauge_hooks.errors import ConfigError, DataError

__all__ = ["Call", "check_keywords"]

LOCAL: Tree = {"placement": {"launcher": "local"}}
"""Without a file a run stays on this host, and needs no Ray."""


class Call:
    """The config of a call: a file or a tree, and what lies over it.

    :param file: TOML file below everything else.
    :param base: Tree below everything else; empty with a file.
    :param above: Tree of the arguments.
    """

    def __init__(self, file: Path | None, base: Tree, above: Tree, functions: GivenFunctions) -> None:
        self.functions = functions
        self._file = file
        self._base = base
        self._above = above
        self._below = base if file is None else read_tree(file)
        self._rows: dict[str, tuple[str | None, Iterable[Any]]] = {}
        """Rows to write by config key: name of their data set, and themselves."""
        self._inputs: Inputs | None = None

    @classmethod
    def of(
        cls,
        source: str | Path | Mapping[str, Any] | Config | RunView | None,
        tables: Mapping[str, Any],
        *,
        data: Any = None,
        reward: Any = None,
        eval_data: Any = None,
    ) -> Call:
        """Return the call of :func:`anygauge.train`'s arguments.

        :raises AnygaugeError: An argument is of a kind that cannot be used, or a key is given twice.
        """
        functions = GivenFunctions()
        given = {} if reward is None else {"reward": reward_table(reward)}
        above = tree_of({**_with_model(tables), **given}, functions.name)
        file, base = _base(source, functions)
        call = cls(file, base, above, functions)
        if reward is not None:
            call._take_out("reward")
        if eval_data is not None:
            call._take_out("eval", "datasets")
        call._give_data(data)
        call._give_eval_data(eval_data)
        return call

    def _take_out(self, *path: str) -> None:
        """Take a table out of what is below the arguments, where one of them replaces it."""
        *tables, last = path
        below = copy.deepcopy(dict(self._below))
        table: Any = below
        for name in tables:
            table = table.get(name)
        if isinstance(table, dict) and last in table:
            del table[last]
            self._file, self._base, self._below = None, below, below

    def _give_data(self, data: Any) -> None:
        if data is None:
            return
        if is_table(data):
            self.put({"data": tree_of(data, self.functions.name)})
        elif is_rows(data):
            self._rows["data.train"] = ("train", data)
        else:
            self.put({"data": {"train": _paths(data)}})

    def _give_eval_data(self, data: Any) -> None:
        if data is None:
            return
        files: list[Any] = []
        for name, each in data.items() if isinstance(data, Mapping) else [(None, data)]:
            if is_rows(each):
                self._rows[f"eval.data[{len(files)}]"] = (name or "eval", each)
                files.append({})
            else:
                files += [{"path": path} | ({"name": name} if name else {}) for path in _paths(each)]
        self.put({"eval": {"data": files}})

    def give_metrics(self, metrics: Any) -> None:
        """Set the metric functions: one, or several.

        :raises ConfigError: One is neither a function nor the name of one.
        """
        functions = list(metrics) if isinstance(metrics, list | tuple) else [metrics]
        for each in functions:
            if not isinstance(each, str) and not callable(each):
                raise ConfigError(
                    f"metrics is {_shown(each)}, which is no function.",
                    hint="Write def metrics(groups), which returns a dict of numbers.",
                )
        self.put(tree_of({METRICS: functions}, self.functions.name))

    def put(self, tree: Mapping[str, Any]) -> None:
        """Lay a tree over the arguments."""
        self._above = merge(self._above, tree)

    def get(self, section: str, key: str) -> Any:
        """Return the value of a key, or ``None`` where nothing sets it."""
        table = merge(self._below, self._above).get(section)
        return table.get(key) if isinstance(table, Mapping) else None

    def start_as(self, *, resume: bool, overwrite: bool) -> None:
        """Set how the run starts, and name it if nothing else does.

        :raises ConfigError: An earlier run is meant, and not named.
        """
        if resume or overwrite:
            self.put({"run": {"resume": resume, "overwrite": overwrite}})
        if self.get("run", "name") is not None or not isinstance(self._table("run") or {}, Mapping):
            return  # what is not a table is refused as the config is checked
        if resume or overwrite:
            option = "resume" if resume else "overwrite"
            raise ConfigError(f"{option}=True needs the name of the run.", hint='Add run={"name": "NAME"}.')
        path = (
            self.get("model", "path") if isinstance(self._table("model"), Mapping) else self._table("model")
        )
        self.put({"run": {"name": free_name(self._directory, str(path or "run"))}})

    def name_it(self, name: str) -> None:
        """Name what has no name."""
        if self.get("run", "name") is None and isinstance(self._table("run") or {}, Mapping):
            self.put({"run": {"name": name}})

    def lay_below(self, tree: Mapping[str, Any]) -> None:
        """Lay a tree below the base; only where that is no file."""
        self._base = self._below = merge(tree, self._base)

    def _table(self, section: str) -> Any:
        return merge(self._below, self._above).get(section)

    @property
    def _directory(self) -> Path:
        directory = self.get("run", "directory")
        return Path(directory if isinstance(directory, str) else "runs")

    def layers(self, inputs: Path | None = None) -> tuple[Path | Tree, Tree]:
        """Write the rows and return the first two arguments of :func:`anygauge.config.load.load_config`.

        :param inputs: Folder of the rows; ``None`` takes ``inputs`` of the run directory.
        """
        if self._rows:
            self._inputs = Inputs(self._inputs_directory() if inputs is None else inputs)
            for key, (name, rows) in self._rows.items():
                self._use(key, name or "rows", self._inputs.write(rows, name or "rows"))
        if self._file is not None:
            return self._file, self._above
        return merge(self._base, self._above), {}

    def _inputs_directory(self) -> Path:
        name = self.get("run", "name")
        # Another name will be refused, and the rows discarded.
        folder = name if isinstance(name, str) and is_name(name) else "unnamed"
        return (self._directory / folder / INPUTS).absolute()

    def _use(self, key: str, name: str, rows: WrittenRows) -> None:
        """Set the keys of a file of rows, and those that follow from what the rows have."""
        file = {"path": str(rows.path), "name": name}
        if key == "data.train":
            self.put({"data": {"train": [file]}})
        else:
            self._above["eval"]["data"][int(key[len("eval.data[") : -1])] = file
        if self.get("data", "label_key") is None and "label" not in rows.columns:
            self.put({"data": {"label_key": "none"}})
        prompt = self.get("data", "input_key") or "prompt"
        if self.get("data", "apply_chat_template") is None and prompt in rows.chats:
            self.put({"data": {"apply_chat_template": True}})

    def discard_unused_rows(self) -> None:
        """Remove the rows of a run that did not begin, or whose directory belongs to another one."""
        if self._inputs is None:
            return
        try:
            used = (self._inputs.directory.parent / "config.toml").read_text(encoding="utf-8")
        except OSError:
            used = ""
        self._inputs.discard(used)


def _base(
    source: str | Path | Mapping[str, Any] | Config | RunView | None, functions: GivenFunctions
) -> tuple[Path | None, Tree]:
    """Return the file or the tree below the arguments."""
    if is_config_file(source):
        return Path(str(source)), {}
    if source is None:
        return None, LOCAL
    if isinstance(source, Config):
        return None, merge(LOCAL, source.model_dump(mode="json", exclude_unset=True))
    if isinstance(source, Mapping):
        return None, merge(LOCAL, tree_of(source, functions.name))
    if isinstance(source, str | Path | RunView):
        return None, merge(LOCAL, model_tree(source))
    raise ConfigError(
        f"The source is {_shown(source)}, neither a model nor a config.",
        hint="Give a directory, a name on a hub, a TOML file, a dict of its tables, a Config or a Run.",
    )


def _shown(source: object) -> str:
    """Return a value with its type; of an object that prints as several lines, only the type."""
    text, kind = repr(source), type(source).__name__
    return f"an object of type {kind}" if "\n" in text else f"{text:.80} ({kind})"


def check_keywords(function: Callable[..., object], tables: Mapping[str, Any]) -> None:
    """Refuse a keyword that is no table of the config, and is like an argument of a function.

    Others may be keys without their tables, and are refused as the config is checked.

    :raises ConfigError: Names the argument that was meant.
    """
    parameters = inspect.signature(function).parameters.values()
    known = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
    for name in tables:
        is_key = "." in name or name in Config.model_fields
        if not is_key and (close := difflib.get_close_matches(name, known, n=1, cutoff=0.75)):
            raise ConfigError(
                f"{function.__name__}() has no argument {name!r}; did you mean {close[0]}?",
                hint=f"Its arguments are {', '.join(known)}, and the tables of a config.",
            )


def _with_model(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return tables in which a run in place of a model is what it trained."""
    model = tables.get("model")
    return {**tables, **model_tree(model)} if isinstance(model, str | Path | RunView) else dict(tables)


def _paths(data: Any) -> Sequence[str]:
    return [str(data)] if isinstance(data, str | Path) else [str(each) for each in data]


def rows_of(prompts: str | Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield prompts, or a single one, as rows.

    :raises DataError: They are no list, or one is no text and no list of messages; an error of its row would
        name a file.
    """
    # A table would be iterated over the names of its columns.
    if isinstance(prompts, Mapping) or hasattr(prompts, "columns") or not isinstance(prompts, Iterable):
        raise DataError(
            f"The prompts are {_shown(prompts)}, not a list.",
            hint='Give a string, or a list of strings or of lists of messages: ["37+58="].',
        )
    for number, prompt in enumerate([prompts] if isinstance(prompts, str) else prompts):
        if prompt is None or isinstance(prompt, bytes | int | float | Mapping):
            raise DataError(
                f"Prompt {number} is {_shown(prompt)}, neither a string nor a list of messages.",
                hint='Give "37+58=" or [{"role": "user", "content": "37+58="}], without a row around it.',
            )
        yield {"prompt": prompt}
