"""Audit of the attributes that a library replaces in other libraries, by identity before and after."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Literal

__all__ = ["Audit", "Change", "unknown_changes"]

_ABSENT = object()
_OF_THE_LANGUAGE = ("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "_abc_impl")
"""Attributes of a class that say nothing, or that Python itself sets."""


@dataclass(frozen=True, slots=True)
class Change:
    """One attribute that is not what it was."""

    name: str
    """``module.attribute`` or ``module.Class.attribute``."""
    kind: Literal["replaced", "added", "removed", "made up"]
    """``made up`` is a module that no file stands behind."""
    by: str
    """Module whose code is there now; of a wrapper, the wrapper's. Empty if nobody's is."""
    value: Any
    """Current value."""


class Audit:
    """Knows every attribute of some packages, also of modules that are imported only while it watches.

    Values are compared by identity. Only what can be called or is looked up on an instance counts, and
    modules themselves: state may change, and a submodule appears on its parent when it is imported.
    """

    def __init__(self, packages: Collection[str]) -> None:
        """Look at what is loaded.

        :param packages: Top-level names.
        """
        self._packages = frozenset(packages)
        self._classes: dict[str, frozenset[str]] = {}
        self._before: dict[str, dict[str, Any]] = {}
        self._names = set(sys.modules)
        for name in list(sys.modules):
            self._look(name)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record each module of the packages that is imported in the block, before anyone can patch it."""
        finder = _Finder(self._covers, self._look)
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)

    def changes(self) -> list[Change]:
        """Return the current differences, by name."""
        changes = [
            change
            for name, before in self._before.items()
            for change in _compared(name, before, self._classes[name])
        ]
        return sorted([*changes, *self._made_up()], key=lambda change: change.name)

    def _covers(self, module: str) -> bool:
        return module.partition(".")[0] in self._packages

    def _look(self, name: str) -> None:
        module = sys.modules.get(name)
        # torch-npu's own module is there as torch.npu too
        if isinstance(module, ModuleType) and self._covers(name) and self._covers(module.__name__):
            self._classes[name] = classes = frozenset(_classes(name, module))
            self._before[name] = dict(_attributes(name, module, classes))

    def _made_up(self) -> Iterator[Change]:
        for name in sys.modules.keys() - self._names:
            module = sys.modules[name]
            # a lazy module that is asked for what it lacks imports what it stands for
            spec = vars(module).get("__spec__") if type(module) is ModuleType else None
            if spec is not None and spec.loader is None:
                yield Change(name, "made up", "", module)


def unknown_changes(
    changes: Sequence[Change], patterns: Collection[str], authors: Collection[str] = ()
) -> list[Change]:
    """Return the changes that nothing explains.

    What holds the same object as an explained change is explained too: whoever replaces a function does so
    under each name that it was imported under. So is what a library does to itself: torch wraps functions of
    its own when its compiler is first imported.

    :param patterns: Names, in which ``*`` stands for anything.
    :param authors: Packages that may replace anything.
    """
    exact = {pattern for pattern in patterns if "*" not in pattern}
    globs = [pattern for pattern in patterns if "*" in pattern]

    modules = {name.rsplit(".", depth)[0] for name in exact for depth in range(1, name.count(".") + 1)}

    def is_listed(change: Change) -> bool:
        names = exact | modules if change.kind == "made up" else exact
        return change.name in names or any(fnmatchcase(change.name, glob) for glob in globs)

    values = {id(change.value) for change in changes if change.kind != "removed" and is_listed(change)}
    return [
        change
        for change in changes
        if not (is_listed(change) or id(change.value) in values)
        and change.by.partition(".")[0] not in {change.name.partition(".")[0], *authors}
    ]


def _classes(name: str, module: ModuleType) -> Iterator[str]:
    """Yield the names of the classes that a module defines."""
    for key, value in list(vars(module).items()):
        if _is_a(value, type) and value.__module__ == name and value.__name__ == key:
            yield key


def _is_a(value: Any, kind: type) -> bool:
    """Return what ``isinstance`` does, but ask the value itself for nothing: some then warn that they go."""
    return issubclass(type(value), kind)


def _attributes(name: str, module: ModuleType, classes: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module and of its classes of these names."""
    for key, value in list(vars(module).items()):
        if _is_a(value, ModuleType) or key.startswith("__"):
            continue
        yield f"{name}.{key}", value
        if key in classes and _is_a(value, type):
            for attribute, inside in list(vars(value).items()):
                if attribute not in _OF_THE_LANGUAGE:
                    yield f"{name}.{key}.{attribute}", inside


def _compared(name: str, before: dict[str, Any], classes: frozenset[str]) -> Iterator[Change]:
    module = sys.modules.get(name)
    now = dict(_attributes(name, module, classes)) if isinstance(module, ModuleType) else {}
    for key in before.keys() | now.keys():
        old, new = before.get(key, _ABSENT), now.get(key, _ABSENT)
        if old is new or not (_counts(old) or _counts(new)):
            continue
        owner = key.rpartition(".")[0]
        if owner in before and before[owner] is not now.get(owner):
            continue  # the whole class is another one
        yield Change(key, _kind(old, new), _author(new), new)


def _counts(value: Any) -> bool:
    return callable(value) or any(_is_a(value, kind) for kind in (property, classmethod, staticmethod))


def _kind(old: Any, new: Any) -> Literal["replaced", "added", "removed"]:
    if old is _ABSENT:
        return "added"
    return "removed" if new is _ABSENT else "replaced"


def _author(value: Any) -> str:
    """Return the module of the code of a value: a wrapper has the name of what it wraps, but own globals."""
    for attribute in ("__func__", "fget", "func"):
        inner = getattr(value, attribute, None)
        value = value if inner is None else inner  # a foreign object need not be true or false
    its_globals = getattr(value, "__globals__", None)
    name = getattr(value, "__module__", None) if its_globals is None else its_globals.get("__name__")
    return name if isinstance(name, str) else ""


class _Finder(MetaPathFinder):
    """Lets the others find a module, and has it looked at once it has run."""

    def __init__(self, covers: Callable[[str], bool], look: Callable[[str], None]) -> None:
        self._covers, self._look = covers, look

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return the spec of the first other finder that knows the module, with a loader that reports."""
        if not self._covers(fullname):
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self._look)
                return spec
        return None


class _Loader(Loader):
    """Stands for a loader until the module is about to run."""

    def __init__(self, loader: Loader, look: Callable[[str], None]) -> None:
        self._loader, self._look = loader, look

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return what the loader makes."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module under its own loader."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._look(module.__name__)
