"""Helpers for groups of asyncio tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

__all__ = ["cancel", "first_error"]


@asynccontextmanager
async def first_error() -> AsyncIterator[None]:
    """Raise the first error of a task group instead of all of them."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


async def cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    """End tasks, and return once they have cleaned up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
