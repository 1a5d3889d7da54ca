"""Observe which kernels are resolved, and what they are called with.

For ``anygauge parity``. Without an observer, modules call their kernels directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from anygauge_hooks.kernels import KernelImpl, KernelOp

__all__ = ["KernelObserver", "ResolvedKernel", "current_observer", "observe_kernels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedKernel:
    """The function that a module gets for an op."""

    op: KernelOp
    dtype: str
    """Name of the dtype of the activations."""
    facts: Mapping[str, Any]
    fn: Callable[..., Any]
    kernel: KernelImpl
    """Kernel that serves the op; the reference of an op that is made of the kernels of others."""


KernelObserver = Callable[[ResolvedKernel], Callable[..., Any]]
"""Returns the function that the module calls: that of the kernel, or one around it."""

_observer: ContextVar[KernelObserver | None] = ContextVar("kernel_observer", default=None)


def current_observer() -> KernelObserver | None:
    """Return the observer of this thread."""
    return _observer.get()


@contextmanager
def observe_kernels(observer: KernelObserver) -> Iterator[None]:
    """Let an observer see each kernel that is resolved inside of the block, from any table."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)
