"""The constructor of a config, which validates like pydantic's own by an undocumented attribute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from anygauge.config import Config
from anygauge_hooks.errors import ConfigError

SEAMS = Path(__file__).parents[3] / "docs" / "seams.md"
TREE: dict[str, Any] = {
    "run": {"name": "test", "steps": 1},
    "model": {"path": "model"},
    "data": {"train": []},
    "reward": {"function": "none"},
}
WRONG = TREE | {"run": {"nam": "test", "steps": 1}}


def test_pydantic_validates_trees_and_json_without_the_constructor() -> None:
    with pytest.raises(ConfigError, match=r"run\.nam"):
        Config(**WRONG)
    with pytest.raises(ValidationError):
        Config.model_validate(WRONG)
    with pytest.raises(ValidationError):
        Config.model_validate_json(json.dumps(WRONG))


def test_json_is_validated_strictly_if_asked() -> None:
    steps = TREE | {"run": {"name": "test", "steps": "1"}}
    assert Config.model_validate_json(json.dumps(TREE), strict=True).run.steps == 1
    with pytest.raises(ValidationError, match="valid integer"):
        Config.model_validate_json(json.dumps(steps), strict=True)


def test_the_ledger_has_the_attribute_that_pydantic_reads() -> None:
    assert vars(BaseModel.__init__) == vars(Config.__init__) == {"__pydantic_base_init__": True}
    assert "`pydantic.BaseModel.__init__.__pydantic_base_init__`" in SEAMS.read_text(encoding="utf-8")
