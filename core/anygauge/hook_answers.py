"""Owners of hook results: pluggy returns bare results, but messages and tables name the plugin."""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, NamedTuple

import pluggy

from anygauge_hooks import hookimpl
from anygauge_hooks.errors import PluginError

__all__ = ["Owned", "RecordedPlugin", "call_collecting"]

Answer = Mapping[str, Any] | Sequence[Any]


class Owned(NamedTuple):
    """An item of an answer, or a key and its value, with the plugin that returned it."""

    owner: str
    item: Any


class RecordedPlugin:
    """Wrapper of a plugin for pluggy that records what each implementation returns.

    Unlike some plugins it can be hashed, which pluggy needs to leave it out of a call.
    """

    def __init__(self, manager: pluggy.PluginManager, plugin: object, name: str) -> None:
        for attribute in dir(plugin):
            options = manager.parse_hookimpl_opts(plugin, attribute)
            if options is None:
                continue
            if options.get("hookwrapper"):
                raise PluginError(f"{attribute!r} is a hookwrapper; write a wrapper (wrapper=True) instead")
            record = _recorded_wrapper if options.get("wrapper") else _recorded
            hook = options.get("specname") or attribute
            setattr(self, attribute, hookimpl(record(name, hook, getattr(plugin, attribute)), **options))

    def __dir__(self) -> list[str]:
        """Return the implementations alone: pluggy looks at each name for a hook."""
        return [*vars(self)]


def call_collecting(caller: pluggy.HookCaller, arguments: Mapping[str, Any]) -> list[Owned]:
    """Call a collecting hook and return all items in registration order.

    Items of plugins with ``tryfirst`` come before all others, those of plugins with ``trylast`` after them.
    Items that a wrapper added or replaced belong to the wrapper's plugin.
    """
    with _recording(caller.name) as record:
        owned = record.owned(caller(**arguments))
    ranked = sorted(caller.get_hookimpls(), key=lambda one: one.trylast - one.tryfirst)
    owners = [implementation.plugin_name for implementation in ranked]
    return sorted(owned, key=lambda item: owners.index(item.owner))


# -------------------------------------------------------------------------
# Recording
# -------------------------------------------------------------------------


class _Record:
    """Owners of the items that the implementations of one call returned."""

    def __init__(self, hook: str) -> None:
        self.hook = hook
        self._owners: dict[Hashable, list[str]] = defaultdict(list)
        self._answers: list[Answer] = []
        """Keeps the items alive, so that no other object gets the identity of one."""

    def add(self, owner: str, answer: Answer) -> None:
        """Note what an implementation returned."""
        self._answers.append(answer)
        for key, _ in _items(answer):
            self._owners[key].append(owner)

    def add_changes(self, owner: str, answers: Sequence[Answer]) -> None:
        """Note the items that a wrapper put among those of the plugins."""
        self._answers.extend(answers)
        counts = Counter(key for answer in answers for key, _ in _items(answer))
        for key, count in counts.items():
            owners = self._owners[key]
            owners += [owner] * (count - len(owners))

    def owned(self, answers: Iterable[Answer]) -> list[Owned]:
        """Return each item of a call's result with its owner."""
        return [Owned(self._owners[key].pop(0), item) for answer in answers for key, item in _items(answer)]


_current: ContextVar[_Record | None] = ContextVar("hook_answers", default=None)


@contextmanager
def _recording(hook: str) -> Iterator[_Record]:
    record = _Record(hook)
    token = _current.set(record)
    try:
        yield record
    finally:
        _current.reset(token)


def _items(answer: Answer) -> Iterator[tuple[Hashable, Any]]:
    """Yield the identity of each item, and the item."""
    if isinstance(answer, Mapping):
        yield from (((key, id(value)), (key, value)) for key, value in answer.items())
    else:
        yield from ((id(item), item) for item in answer)


def _record_of(hook: str) -> _Record | None:
    """Return the record of the call under way, unless that is of another hook, which called this one."""
    record = _current.get()
    return record if record is not None and record.hook == hook else None


def _recorded(owner: str, hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def implementation(*arguments: Any, **named: Any) -> Any:
        try:
            answer = function(*arguments, **named)
        except Exception as error:  # foreign code: a plugin, which the error names
            error.add_note(f"raised by plugin {owner!r} in the hook {hook}")
            raise
        record = _record_of(hook)
        if answer is None or record is None:
            return answer
        answer = _concrete(owner, hook, answer)
        record.add(owner, answer)
        return answer

    return implementation


def _recorded_wrapper(owner: str, hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
    if not inspect.isgeneratorfunction(function):
        return function  # pluggy refuses it

    @wraps(function)
    def wrapper(*arguments: Any, **named: Any) -> Generator[None, Any, Any]:
        result = yield from function(*arguments, **named)
        if record := _record_of(hook):
            result = [_concrete(owner, hook, answer) for answer in _concrete(owner, hook, result)]
            record.add_changes(owner, result)
        return result

    return wrapper


def _concrete(owner: str, hook: str, answer: Any) -> Answer:
    """Return an answer whose items are the same each time that it is read."""
    if isinstance(answer, Mapping | list | tuple):
        return answer
    if isinstance(answer, Iterable) and not isinstance(answer, str):
        return tuple(answer)
    raise PluginError(
        f"Plugin {owner!r} returned {answer!r} from {hook}, which is neither a list of items nor a mapping.",
        hint="A wrapper returns the list that it received from `yield`; docs/hooks.md has every hook.",
    )
