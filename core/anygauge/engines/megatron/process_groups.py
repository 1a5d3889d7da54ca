"""Process groups of several layouts in one process; Megatron knows one layout at a time.

Megatron keeps its groups in variables of ``parallel_state``, and so has one layout. The policy's stay there;
an engine that is divided otherwise puts its own in their place while one of its methods runs.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from megatron.core import parallel_state

from anygauge.config.schema import Parallel

__all__ = ["ProcessGroupProxy", "ProcessGroups", "divides", "parallel_sizes"]

_VARIABLE = re.compile(r"_[A-Z][A-Z_]*")
Call = Callable[..., Any]


class ProcessGroups:
    """The groups of one layout; there are none until an engine makes them while they are current."""

    def __init__(self) -> None:
        self._own: dict[str, Any] = {name: _nothing(value) for name, value in _variables().items()}

    @contextmanager
    def current(self) -> Iterator[None]:
        """Let Megatron know these groups, and afterwards those that it knew before."""
        before = _variables()
        vars(parallel_state).update(self._own)
        try:
            yield
        finally:
            self._own = _variables()
            vars(parallel_state).update(before)


def divides(sizes: Parallel) -> bool:
    """Return whether Megatron's groups divide a model in this way, or would if they were made now."""
    if not parallel_state.model_parallel_is_initialized():
        return True
    return all(getattr(sizes, name) == size for name, size in parallel_sizes().items())


def parallel_sizes() -> dict[str, int]:
    """Return the sizes of Megatron's current process groups, by the keys of ``train.parallel``."""
    return {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "context": parallel_state.get_context_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "expert": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor": parallel_state.get_expert_tensor_parallel_world_size(),
    }


class ProcessGroupProxy:
    """An engine with groups of its own, which are current while one of its methods runs.

    :param make: Makes the engine and the groups.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._groups = ProcessGroups()
        with self._groups.current():
            self._engine = make()

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._engine, name)
        if not inspect.ismethod(attribute):
            return attribute
        return self._stepwise(attribute) if inspect.isgeneratorfunction(attribute) else self._whole(attribute)

    def _whole(self, method: Call) -> Call:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._groups.current():
                return method(*args, **kwargs)

        return call

    def _stepwise(self, method: Call) -> Call:
        """Leave the groups between two items: whoever asks for them may be of another layout."""

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Iterator[Any]:
            items = method(*args, **kwargs)
            while True:
                with self._groups.current():
                    try:
                        item = next(items)
                    except StopIteration:
                        return
                yield item

        return call


def _variables() -> dict[str, Any]:
    return {name: value for name, value in vars(parallel_state).items() if _VARIABLE.fullmatch(name)}


def _nothing(value: Any) -> Any:
    """Return what a variable holds before there are groups."""
    return {} if isinstance(value, dict) else None
