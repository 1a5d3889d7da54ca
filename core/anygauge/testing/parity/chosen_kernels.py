"""A plugin that has a side of a comparison prefer some kernels to the backend's own choice."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

from anygauge.kernels.table import reference_kernel
from anygauge.testing.parity.sides import REFERENCE
from anygauge_hooks import hookimpl
from anygauge_hooks.errors import ConfigError
from anygauge_hooks.kernels import KERNEL_OPS, KernelImpl

__all__ = ["ChosenKernels"]

_FIRST = 10_000
"""Added to a priority: before whatever a plugin has."""


class ChosenKernels:
    """Puts kernels before all others whose source has a word in it.

    :param word: :data:`~anygauge.testing.parity.sides.REFERENCE` takes the reference of every op.
    """

    def __init__(self, word: str) -> None:
        self._word = word

    @hookimpl(wrapper=True)
    def register_kernels(self) -> Generator[None, list[Any], list[Any]]:
        """Change the order of what plugins register."""
        answers = [[*answer] for answer in (yield)]
        if self._word == REFERENCE:
            return [*answers, [replace(reference_kernel(op), priority=_FIRST) for op in KERNEL_OPS]]
        chosen = [[self._chosen(kernel) for kernel in answer] for answer in answers]
        if chosen == answers:
            sources = sorted({kernel.source for answer in answers for kernel in answer})
            raise ConfigError(
                f"No kernel of this backend has {self._word!r} in its source.",
                hint=f"Its sources are: {', '.join(sources)}. Or write kernels={REFERENCE}.",
            )
        return chosen

    def _chosen(self, kernel: KernelImpl) -> KernelImpl:
        is_chosen = self._word.lower() in kernel.source.lower()
        return replace(kernel, priority=kernel.priority + _FIRST) if is_chosen else kernel
