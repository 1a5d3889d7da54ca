"""The data source that comes with the core, and the rules of the ``[data]`` table."""

from __future__ import annotations

from typing import Any

from anygauge_hooks import hookimpl
from anygauge_hooks.types import ConfigProblem, NamedFunction


@hookimpl
def register_data_sources() -> list[NamedFunction]:
    """Return ``jsonl``."""
    from anygauge.data.jsonl import JsonlSource

    return [NamedFunction(name="jsonl", fn=JsonlSource)]


@hookimpl
def check_config(config: Any) -> list[ConfigProblem]:
    """Return settings of ``[data]`` that would have no effect."""
    data = config.data
    if data.apply_chat_template:
        return []
    return [
        ConfigProblem(
            path=f"data.{name}",
            found=getattr(data, name),
            hint="Set data.apply_chat_template = true, or leave this out.",
        )
        for name in ("system_prompt", "chat_template_kwargs")
        if getattr(data, name)
    ]
