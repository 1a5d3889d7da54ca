"""Config of a train engine alone: a model and how it is trained, without data and reward."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anygauge.config import Config

__all__ = ["engine_config"]


def engine_config(model: str | Path | Mapping[str, Any], **sections: Any) -> Config:
    """Return the config of a run of ten steps.

    :param model: Directory of the model, or the section ``model``.
    :param sections: Other sections, such as ``train={"lr": 1e-3}``.
    """
    tree: dict[str, Any] = {
        "run": {"name": "test", "steps": 10},
        "model": model if isinstance(model, Mapping) else {"path": model},
        "data": {"train": []},
        "reward": {"function": "none"},
    }
    return Config.model_validate({**tree, **sections})
