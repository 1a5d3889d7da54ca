"""Stand-ins for two compilers that MindSpeed imports and a host without CANN has not.

``triton`` is triton-ascend, whose import needs a driver; ``torchair`` is in torch-npu and needs libraries of
CANN. Both only decorate and register functions here. What would be compiled stays a plain function that no
grid can be given to, so a kernel that is launched raises.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

NAMES = ("triton", "torchair")
ABSENT = ("active",)
"""Attributes that are missing as they are without a device: triton's driver."""


def install() -> None:
    """Make the names importable."""
    sys.meta_path.insert(0, Finder())


def is_absent(name: str) -> bool:
    return name.startswith("__") or name in ABSENT


class Anything:
    """Anything that a module may have: a decorator, its arguments, a type."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and isinstance(args[0], (FunctionType, type)) else self

    def __getattr__(self, name: str) -> Any:
        if is_absent(name):
            raise AttributeError(name)
        return self


class Module(ModuleType):
    """A module that has everything: types, by their capital, and functions."""

    __version__ = "0"  # torch's compiler looks at triton's

    def __getattr__(self, name: str) -> Any:
        if is_absent(name):
            raise AttributeError(name)
        return type(name, (Anything,), {}) if name[0].isupper() else Anything()


class Finder(MetaPathFinder, Loader):
    """Finds the stand-ins and every submodule of theirs."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        known = fullname.partition(".")[0] in NAMES
        return ModuleSpec(fullname, self, is_package=True) if known else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Module(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...
