"""A fault, and the wrapper of a hook that puts it into the answers of the backend under test."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from anygauge_hooks import hookimpl, megatron, specs

FAULT, HOOKS = "BACKEND_FAULT", "BACKEND_FAULT_HOOKS"
BACKEND, REACHED = "BACKEND_FAULT_BACKEND", "BACKEND_FAULT_REACHED"
"""Environment variables: the fault's name and hooks, the backend under test, and the file that says that the
fault was reached."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a backend."""

    name: str
    """Stable: ``"rms_norm.eps_constant"``."""
    statement: str
    hook: str
    """One, or several with spaces between them."""
    change: Callable[[Any, SimpleNamespace], Any]
    """From the hook's answer (a list of answers for a collecting hook) and arguments to the faulty answer."""
    before: Callable[[SimpleNamespace], None] | None = None
    """Called with the hook's arguments before the backend is."""


def reached() -> None:
    """Note that the fault took effect in a process of this run."""
    if path := os.environ.get(REACHED):
        Path(path).touch()


def noted(change: Callable[[Any, SimpleNamespace], Any]) -> Callable[[Any, SimpleNamespace], Any]:
    """Return a change that is reached where it gives another answer, or raises."""

    def changed(answer: Any, a: SimpleNamespace) -> Any:
        try:
            faulty = change(answer, a)
        except Exception:
            reached()
            raise
        if faulty is not answer and faulty != answer:
            reached()
        return faulty

    return changed


def other_answer(
    hook: str, *, shown: Mapping[str, Any], taken: Mapping[str, Any]
) -> Callable[[Any, SimpleNamespace], Any]:
    """Return a change that gives the backend's answer to other arguments, one of ``taken``.

    :param shown: Values of the same arguments to which a backend that reads them answers something else. A
        fault is not reached where it does not.
    """

    def change(_: Any, a: SimpleNamespace) -> Any:
        answer = ask(hook, a, **taken)
        if answer != ask(hook, a, **shown):
            reached()
        return answer

    return change


def unchanged(answer: Any, _: SimpleNamespace) -> Any:
    """Return an answer as it is, for faults that are somewhere else."""
    return answer


def plugin_of(hooks: str, find: Callable[[], Fault]) -> SimpleNamespace:
    """Return a plugin that wraps these hooks, and no other.

    :param find: Returns the fault. Called with the first hook: what a fault imports, no plugin may when it
        is loaded.
    """
    wrappers = {hook: hookimpl(_wrapper(hook, find), wrapper=True) for hook in hooks.split()}
    return SimpleNamespace(**wrappers)


def _wrapper(hook: str, find: Callable[[], Fault]) -> Callable[..., Any]:
    specification = getattr(specs, hook, None) or getattr(megatron, hook)
    signature = inspect.signature(specification)

    def wrapper(*given: Any) -> Generator[None, Any, Any]:
        arguments = SimpleNamespace(**signature.bind(*given).arguments)
        if hasattr(arguments, "backend") and arguments.backend.name != backend_name():
            return (yield)
        fault = find()
        if fault.before is not None:
            fault.before(arguments)
        return fault.change((yield), arguments)

    wrapper.__wrapped__ = specification  # type: ignore[attr-defined]  # pluggy reads its arguments there
    return wrapper


def backend_name() -> str:
    """Return the name of the backend under test."""
    return os.environ.get(BACKEND, "cpu")


def ask(hook: str, arguments: SimpleNamespace, **others: Any) -> Any:
    """Return what the backend's own plugin answers to other arguments; ``None`` if it has not the hook."""
    (entry,) = entry_points(group="anygauge.backends", name=backend_name())
    function = getattr(entry.load(), hook, None)
    if function is None:
        return None
    given = {**vars(arguments), **others}
    return function(**{name: given[name] for name in inspect.signature(function).parameters})
