"""RL post-training for LLMs, VLMs and omni models, hardware abstraction first.

Example::

    from anygauge import train

    run = train("Qwen/Qwen3-0.6B", data=[{"prompt": "37+58=", "label": "95"}], reward="exact_match")
    print(run.metrics_list[-1]["rollout/raw_reward"])

Importing the package is cheap: each name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from anygauge.version import __version__

if TYPE_CHECKING:
    from anygauge.api.evaluation import evaluate
    from anygauge.api.generation import generate
    from anygauge.api.run import Run
    from anygauge.api.training import train
    from anygauge.config import Config

__all__ = ["Config", "Run", "__version__", "evaluate", "generate", "train"]

_HOMES = {
    "Config": "anygauge.config",
    "Run": "anygauge.api.run",
    "evaluate": "anygauge.api.evaluation",
    "generate": "anygauge.api.generation",
    "train": "anygauge.api.training",
}


def __getattr__(name: str) -> Any:
    """Import a name of the Python API when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
