"""A recipe that trains within seconds on CPU: a tiny model, some sums and a config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from anygauge.testing.tiny import tiny_qwen3

__all__ = ["tiny_recipe"]


def tiny_recipe(
    directory: str | Path, *, model: Mapping[str, Any] = MappingProxyType({}), **keys: Any
) -> Path:
    """Write a model, twelve sums and a config that trains on them, and return the path of the config.

    :param directory: Gets ``model/``, ``data.jsonl`` and ``run.toml``; runs go there too.
    :param model: Arguments of :func:`~anygauge.testing.tiny.tiny_qwen3`.
    :param keys: Of the config, with two underscores for each dot: ``run__steps=3``; ``None`` leaves one out.
    """
    root = Path(directory)
    tiny_qwen3(root / "model", **{"init_std": 0.3, **model})
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(3) for b in range(4)]
    (root / "data.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    path = root / "run.toml"
    # JSON's strings, numbers and lists are TOML's too.
    lines = [
        f"{name.replace('__', '.')} = {json.dumps(value, default=str)}"
        for name, value in {**_defaults(root), **keys}.items()
        if value is not None
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def _defaults(root: Path) -> dict[str, Any]:
    return {
        "run__name": "run",
        "run__directory": root,
        "run__steps": 2,
        "model__path": root / "model",
        "data__train": [root / "data.jsonl"],
        "data__cache": root / "cache",
        "reward__function": "exact_match",
        "rollout__prompts_per_step": 4,
        "rollout__samples_per_prompt": 4,
        "rollout__max_new_tokens": 4,
        "train__lr": 1e-3,
        "placement__launcher": "local",
        "placement__threads_per_worker": 1,
    }
