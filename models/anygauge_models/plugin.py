"""The model families of this package."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anygauge_hooks import hookimpl

if TYPE_CHECKING:
    from anygauge_hooks.models import ModelSpec


@hookimpl
def register_models() -> list[ModelSpec]:
    """Return the families, without importing torch."""
    from anygauge_models.qwen3.spec import QWEN3

    return [QWEN3]
