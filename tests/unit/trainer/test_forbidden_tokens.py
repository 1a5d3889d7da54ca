"""Which tokens the policy of a run may not draw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anygauge.config import Config
from anygauge.plugins import load_plugins
from anygauge.trainer.inputs import forbidden_tokens
from anygauge_hooks.models import ModelSpec, text_config

SPECS: dict[str, ModelSpec] = load_plugins(only=["cpu", "models"]).named("register_models")


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("modalities", [[], ["image"]])
def test_they_are_the_familys_whatever_a_run_shows(tmp_path: Path, name: str, modalities: list[str]) -> None:
    spec = SPECS[name]
    (tmp_path / "config.json").write_text(json.dumps(spec.tiny()))
    config = Config.model_validate(
        {
            "run": {"name": "x"},
            "model": {"path": tmp_path, "modalities": modalities},
            "data": {"train": ["t.jsonl"]},
            "reward": {"function": "exact_match"},
        }
    )
    found = forbidden_tokens(config, load_plugins(only=["cpu", "models"]))
    assert found == (() if spec.media is None else tuple(spec.media.forbidden(text_config(spec.tiny()))))
    assert bool(found) == ("vision_config" in str(spec.tiny()) and spec.media is not None)
